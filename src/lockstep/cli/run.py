"""``lockstep run``: torch's elastic launcher, with ``lockstep.install()`` called in each rank first.

The words of the command line are read by torchrun's own parser with two options added, so every torchrun
option of the installed torch works here by the same name and with the same meaning.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from lockstep import settings
from lockstep.cli import bootstrap

__all__ = ["BadUse", "build_parser", "launch", "pick_backend", "prepare", "rank_environment"]

EXIT_BAD_USE = 2

DESCRIPTION = """\
Launch a script on many ranks through torch's elastic launcher.

In each rank lockstep.install() runs before the script, so a script that uses torch's
DistributedDataParallel runs on Lockstep unchanged. Every torchrun option is accepted.
On one host, without rendezvous options, --standalone is the default.
"""


class BadUse(Exception):
    """The command line asks for something that cannot be done; the message is one line for the user."""


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line: the usage text of torchrun's options fills a screen and hides the message."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:  # torchrun's name for it, which the user never typed
            message = "no script given"
        raise BadUse(f"{message} (see lockstep run --help)")


def build_parser() -> argparse.ArgumentParser:
    """Torchrun's parser plus ``--nproc`` (short for ``--nproc-per-node``) and ``--no-install``."""
    parser = OneLineParser(
        prog="lockstep run",
        usage="lockstep run [--nproc N] [--no-install] [torchrun options] script.py [args ...]\n"
        "       lockstep run [--nproc N] [--no-install] [torchrun options] -m module [args ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun.get_args_parser()],
        conflict_handler="resolve",
    )
    parser.add_argument(
        "--nproc",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,  # torchrun's own option keeps its default and its environment variable
        metavar="N",
        help="Ranks on this host: a number, 'gpu', 'cpu' or 'auto'. The same as --nproc-per-node.",
    )
    parser.add_argument(
        "--no-install",
        action="store_true",
        help="Launch the script as it is, without calling lockstep.install().",
    )
    return parser


def launch(words: Sequence[str]) -> int:
    """Run ``lockstep run <words>`` to its end and return the exit code, which is the script's."""
    try:
        args = prepare(words)
        _check_settings()
    except BadUse as error:
        print(f"lockstep run: error: {error}", file=sys.stderr)
        return EXIT_BAD_USE
    os.environ.update(rank_environment(os.environ, int(args.nproc_per_node)))
    try:
        # `record` is what torchrun's own entry point wears: it hands a failure's details on to an outer
        # launcher.
        record(torchrun.run)(args)
    except ChildFailedError as error:
        # The user started a script and never heard of the file that starts it.
        print(str(error).replace(args.training_script, args.program), file=sys.stderr)
        _, first_failure = error.get_first_failure()
        return _shell_exit_code(first_failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def prepare(words: Sequence[str]) -> argparse.Namespace:
    """Read and check the words; the result is what torchrun's ``run`` takes, plus ``program``."""
    parser = build_parser()
    # Older torch has a port as the default, which would look like one that the user asked for.
    usual_port = parser.get_default("master_port")
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)
    args = parser.parse_args(list(words))
    args.program = args.training_script
    # In the order in which a command line is read: options first, what they are to launch last.
    args.nproc_per_node = str(_num_local_ranks(args.nproc_per_node))
    max_hosts = _max_hosts(args.nnodes)
    _check_numbers(args)
    _check_texts(args)
    if not args.no_install:
        _check_can_install(args)
    _check_program(args)
    if max_hosts == 1 and not _names_a_rendezvous(args):
        args.standalone = True
    if args.master_port is None:
        args.master_port = usual_port
    if not args.no_install:
        _start_through_bootstrap(args)
    return args


def _num_local_ranks(nproc: str) -> int:
    try:
        num_ranks = int(torchrun.determine_local_world_size(nproc))
    except ValueError as error:
        reason = "" if str(error).startswith("Unsupported") else f" ({str(error).rstrip('.')})"
        raise BadUse(f"--nproc is {nproc!r}{reason}; give a number of ranks, 'gpu', 'cpu' or 'auto'")
    if num_ranks < 1:
        raise BadUse(f"--nproc is {nproc!r}, which is {num_ranks} ranks; at least 1 is needed")
    return num_ranks


def _max_hosts(nnodes: str) -> int:
    try:
        min_hosts, max_hosts = torchrun.parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        min_hosts, max_hosts = 0, 0
    if not 0 < min_hosts <= max_hosts:
        raise BadUse(f"--nnodes is {nnodes!r}; give a number of hosts (2) or a range (1:4)")
    return int(max_hosts)


def _check_numbers(args: argparse.Namespace) -> None:
    """Numbers that torch's launcher refuses too, but late and with a traceback."""
    if args.max_restarts < 0:
        raise BadUse(f"--max-restarts is {args.max_restarts}; give 0 or more")
    if args.monitor_interval <= 0:
        raise BadUse(f"--monitor-interval is {args.monitor_interval:g}; give seconds above 0")
    if args.node_rank < 0:
        raise BadUse(f"--node-rank is {args.node_rank}; hosts are counted from 0")
    if args.master_port is not None and not 0 <= int(args.master_port) <= 65535:
        raise BadUse(f"--master-port is {args.master_port}; ports go from 0 to 65535")


def _check_texts(args: argparse.Namespace) -> None:
    """Small languages inside an option, where the launcher's own complaint is a traceback."""
    readers: list[tuple[str, str | None, Callable[[str], object], str]] = [
        ("rdzv-conf", args.rdzv_conf, _read_pairs, "pairs such as timeout=60,read_timeout=30"),
        ("redirects", args.redirects, Std.from_str, "0 to 3, or local ranks with one each (0:3,1:1)"),
        ("tee", args.tee, Std.from_str, "0 to 3, or local ranks with one each (0:3,1:1)"),
        ("local-ranks-filter", args.local_ranks_filter, _read_integers, "local ranks such as 0,1"),
    ]
    for option, given, read, wanted in readers:
        if given and given.strip():
            try:
                read(given)
            except ValueError:
                raise BadUse(f"--{option} is {given!r}; give {wanted}")


def _read_integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _read_pairs(text: str) -> None:
    for pair in text.strip().split(","):
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise ValueError(f"{pair!r} is not key=value")


def _check_settings() -> None:
    try:
        settings.check(os.environ)  # once here rather than once in every rank
    except ValueError as error:
        raise BadUse(str(error))


def _check_program(args: argparse.Namespace) -> None:
    name = args.training_script
    if args.module:
        if not _module_exists(name):
            raise BadUse(f"no module named {name!r} can be found from {os.getcwd()!r}")
    elif not args.no_python:
        if not os.path.exists(name):
            raise BadUse(f"no such script: {name!r}; give the path of a Python file, or -m and a module")
        if os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
            raise BadUse(f"{name!r} is a folder without a __main__.py; give the path of a Python file")


def _names_a_rendezvous(args: argparse.Namespace) -> bool:
    return bool(
        args.rdzv_backend != "static"
        or args.rdzv_endpoint
        or args.rdzv_id != "none"
        or args.rdzv_conf
        or args.master_port is not None
    )


def _module_exists(name: str) -> bool:
    # Only the outermost package is looked for: looking deeper would import the user's package in the
    # launcher.
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        return bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def _check_can_install(args: argparse.Namespace) -> None:
    for option, why in (
        ("no_python", "starts a program that is not Python"),
        ("run_path", "runs the script inside the launcher's own worker function"),
    ):
        if getattr(args, option, False):
            name = option.replace("_", "-")
            raise BadUse(f"--{name} {why}, where lockstep.install() cannot be called first; add --no-install")


def _start_through_bootstrap(args: argparse.Namespace) -> None:
    """Put ``bootstrap.py`` before the user's program, so that each rank installs and then runs it."""
    program = ["-m", args.training_script] if args.module else [args.training_script]
    args.training_script_args = [*program, *args.training_script_args]
    # By path and not by -m: python would then put the working directory on sys.path before Lockstep is
    # imported, where a file of the user's could take the place of a module that Lockstep or torch needs.
    args.training_script = os.path.abspath(bootstrap.__file__)
    args.module = False


def pick_backend(num_local_ranks: int) -> str:
    """``nccl`` where each local rank can have a GPU of its own, ``gloo`` otherwise."""
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks
    return "nccl" if enough_gpus and dist.is_nccl_available() else "gloo"


def rank_environment(current: Mapping[str, str], num_local_ranks: int) -> dict[str, str]:
    """Variables the ranks inherit besides torchrun's own; what the user has set is left alone."""
    wanted = {
        settings.BACKEND.name: pick_backend(num_local_ranks),
        # A rendezvous store shared with the ranks outlives a failed attempt, and the next attempt then
        # reads the old attempt's addresses from it.  With a store of its own, each attempt starts clean.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if num_local_ranks > 1:
        wanted["OMP_NUM_THREADS"] = "1"  # torchrun's choice, made here so that it needs no banner
    return {name: value for name, value in wanted.items() if name not in current}


def _shell_exit_code(exitcode: int) -> int:
    """A process ended by signal n has exit code -n in Python and 128 + n in a shell."""
    return 128 - exitcode if exitcode < 0 else exitcode
