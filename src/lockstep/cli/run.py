"""``lockstep run``: ranks with ``lockstep.install()`` called in each of them first.

The words of the command line are read by torchrun's own parser with a few options added, so every torchrun option of
the installed torch works here by the same name and with the same meaning.  The ranks of one host are started and
watched by ``lockstep.launch``; several hosts meet through torch's elastic launcher.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from lockstep import settings
from lockstep.cli import bootstrap
from lockstep.launch.attempt import Limits
from lockstep.launch.hosts import run_on_hosts
from lockstep.launch.spawn import CannotStart, Program
from lockstep.launch.store import NoLoopback, PortTaken
from lockstep.launch.supervise import Job, supervise
from lockstep.testing.faults import BadFault, read_faults, require_rank

__all__ = ["BadUse", "build_parser", "launch", "pick_backend", "prepare", "rank_environment"]

EXIT_BAD_USE = 2
USUAL_PORT = 29500
LOOPBACK = ("", "localhost", "127.0.0.1")

DESCRIPTION = """\
Launch a script on many ranks.

In each rank lockstep.install() runs before the script, so a script that uses torch's
DistributedDataParallel runs on Lockstep unchanged. Every torchrun option is accepted.
The ranks of one host meet over loopback, at a store in this process; several hosts
meet through torch's rendezvous (--nnodes, --rdzv-backend, --rdzv-endpoint).
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
    """Torchrun's parser plus ``--nproc`` (short for ``--nproc-per-node``) and our own options."""
    parser = OneLineParser(
        prog="lockstep run",
        usage="lockstep run [--nproc N] [--max-restarts N] [options] script.py [args ...]\n"
        "       lockstep run [--nproc N] [--max-restarts N] [options] -m module [args ...]",
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
    parser.add_argument(
        "--report-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="Where to write a report (HTML and JSON) of an end that was not planned; default: out.",
    )
    parser.add_argument(
        "--stop-grace",
        type=float,
        default=None,
        metavar="SECONDS",
        help="Between SIGTERM and SIGKILL when the job is stopped; default: 5. A last checkpoint may need more.",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=Limits.start,
        metavar="SECONDS",
        help="How long ranks may wait in init_process_group for one that does not come; default: 600, off: 0.",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="A fault on purpose, such as kill:rank=1,step=5,moment=backward; see docs/launcher.md.",
    )
    return parser


def launch(words: Sequence[str]) -> int:
    """Run ``lockstep run <words>`` to its end and return the exit code, which is the script's."""
    try:
        args = prepare(words)
        _check_settings()
        _pass_faults_on(args.inject)
        os.environ.update(
            rank_environment(os.environ, int(args.nproc_per_node), is_one_host=args.is_supervised),
        )
        gc.freeze()  # torch, which is here to stay; the launcher is away sooner if no collection looks through it
        if args.is_supervised:
            return supervise(_job(args, words))
    except (BadUse, CannotStart, NoLoopback, PortTaken) as error:
        print(f"lockstep run: error: {error}", file=sys.stderr)
        return EXIT_BAD_USE
    return run_on_hosts(args, _command(words), args.report_dir or settings.report_dir())


def _job(args: argparse.Namespace, words: Sequence[str]) -> Job:
    port = _port(args)
    args.master_port = USUAL_PORT if args.master_port is None else args.master_port
    config, entrypoint, arguments = torchrun.config_from_args(args)
    run_id = args.rdzv_id if args.rdzv_id != "none" else str(uuid.uuid4())
    grace = args.stop_grace
    if grace is None:
        grace = float(getattr(args, "shutdown_timeout", None) or Limits.grace)
    return Job(
        program=Program(config, str(entrypoint), [str(word) for word in arguments], args.max_restarts, run_id),
        name=args.program,
        command=_command(words),
        report_dir=args.report_dir or settings.report_dir(),
        limits=Limits(grace=grace, start=args.start_timeout),
        signals=_signals(args),
        port=port,
    )


def _command(words: Sequence[str]) -> list[str]:
    return ["lockstep", "run", *words]


def _signals(args: argparse.Namespace) -> str:
    return str(getattr(args, "signals_to_handle", None) or "SIGTERM,SIGINT,SIGHUP,SIGQUIT")


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
    _check_faults(args, max_hosts)
    if not args.no_install:
        _check_can_install(args)
    _check_program(args)
    args.is_supervised = max_hosts == 1 and not _needs_torchs_agent(args)
    if not args.is_supervised:
        args.standalone = args.standalone or (max_hosts == 1 and not _names_a_rendezvous(args))
        args.master_port = usual_port if args.master_port is None else args.master_port
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
    for option, seconds in (("stop-grace", args.stop_grace), ("start-timeout", args.start_timeout)):
        if seconds is not None and not (seconds >= 0 and math.isfinite(seconds)):
            raise BadUse(f"--{option} is {seconds:g}; give seconds, 0 or more")
    if args.report_dir is not None and args.report_dir.exists() and not args.report_dir.is_dir():
        raise BadUse(f"--report-dir is {str(args.report_dir)!r}, which is not a folder")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if getattr(args, "virtual_local_rank", False) and visible is not None:
        num_devices = len(visible.split(","))
        if num_devices < int(args.nproc_per_node):
            raise BadUse(
                f"--virtual-local-rank with --nproc {args.nproc_per_node} needs a device for each rank; "
                f"CUDA_VISIBLE_DEVICES is {visible!r}"
            )


def _check_texts(args: argparse.Namespace) -> None:
    """Small languages inside an option, where the launcher's own complaint is a traceback."""
    readers: list[tuple[str, str | None, Callable[[str], object], str]] = [
        ("rdzv-conf", args.rdzv_conf, _read_pairs, "pairs such as timeout=60,read_timeout=30"),
        ("redirects", args.redirects, Std.from_str, "0 to 3, or local ranks with one each (0:3,1:1)"),
        ("tee", args.tee, Std.from_str, "0 to 3, or local ranks with one each (0:3,1:1)"),
        ("local-ranks-filter", args.local_ranks_filter, _read_integers, "local ranks such as 0,1"),
        ("signals-to-handle", _signals(args), _read_signals, "names of signals such as SIGTERM,SIGINT"),
    ]
    for option, given, read, wanted in readers:
        if given and given.strip():
            try:
                read(given)
            except ValueError:
                raise BadUse(f"--{option} is {given!r}; give {wanted}")


def _read_integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _read_signals(text: str) -> None:
    for name in text.split(","):
        if name.strip() not in signal.Signals.__members__ or name.strip() in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} is not a signal that can be handled")


def _read_pairs(text: str) -> None:
    for pair in text.strip().split(","):
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise ValueError(f"{pair!r} is not key=value")


def _check_faults(args: argparse.Namespace, max_hosts: int) -> None:
    for source, text in (*(("--inject", text) for text in args.inject), (settings.INJECT.name, settings.inject())):
        try:
            for fault in read_faults(text):
                if max_hosts == 1:
                    require_rank(fault, int(args.nproc_per_node))
        except BadFault as error:
            raise BadUse(f"{source} is {text!r}: {error}")
    if args.inject and args.no_python:
        raise BadUse("--inject works in Python programs only, and --no-python starts another one")


def _pass_faults_on(faults: Sequence[str]) -> None:
    if faults:
        os.environ[settings.INJECT.name] = ";".join(filter(None, [settings.inject(), *faults]))


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
    elif shutil.which(name) is None:
        raise BadUse(f"no such program: {name!r}; give one that is on the PATH, or its path")


def _needs_torchs_agent(args: argparse.Namespace) -> bool:
    """Whether something was asked of a job on one host that only torch's own launcher does."""
    address, _, _ = args.rdzv_endpoint.rpartition(":") if ":" in args.rdzv_endpoint else (args.rdzv_endpoint, "", "")
    return bool(
        args.rdzv_backend not in ("static", "c10d")
        or address not in LOOPBACK
        or args.master_addr not in LOOPBACK
        or args.rdzv_conf
        or args.event_log_handler != "null"
        or os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        or "TORCHELASTIC_HEALTH_CHECK_PORT" in os.environ
    )


def _names_a_rendezvous(args: argparse.Namespace) -> bool:
    named = args.rdzv_endpoint or args.rdzv_conf or args.master_port is not None
    return bool(named or args.rdzv_backend != "static" or args.rdzv_id != "none")


def _port(args: argparse.Namespace) -> int:
    """The port that was asked for, by whichever option; 0 for any."""
    _, _, port = args.rdzv_endpoint.rpartition(":")
    if args.rdzv_endpoint and port:
        if not (port.isdecimal() and int(port) <= 65535):
            raise BadUse(f"--rdzv-endpoint is {args.rdzv_endpoint!r}; give host:port, ports go from 0 to 65535")
        return int(port)
    return int(args.master_port or 0)


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
    """Put a file of ours before the user's program, so that each rank installs, or at least ends with its launcher."""
    program = ["-m", args.training_script] if args.module else [args.training_script]
    if args.no_python:
        args.training_script = "lockstep.launch.inside"
        args.training_script_args = [*program, *args.training_script_args]
        args.module, args.no_python = True, False
        return
    plain = [bootstrap.PLAIN] if args.no_install else []
    args.training_script_args = [*plain, *program, *args.training_script_args]
    # By path and not by -m: python would then put the working directory on sys.path before Lockstep is
    # imported, where a file of the user's could take the place of a module that Lockstep or torch needs.
    args.training_script = os.path.abspath(bootstrap.__file__)
    args.module = args.run_path = False


def pick_backend(num_local_ranks: int) -> str:
    """``nccl`` where each local rank can have a GPU of its own, ``gloo`` otherwise."""
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks
    return "nccl" if enough_gpus and dist.is_nccl_available() else "gloo"


def rank_environment(current: Mapping[str, str], num_local_ranks: int, *, is_one_host: bool = False) -> dict[str, str]:
    """Variables the ranks inherit besides torchrun's own; what the user has set is left alone."""
    wanted = {
        settings.BACKEND.name: pick_backend(num_local_ranks),
        # A rendezvous store shared with the ranks outlives a failed attempt, and the next attempt then
        # reads the old attempt's addresses from it.  With a store of its own, each attempt starts clean.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if num_local_ranks > 1:
        wanted["OMP_NUM_THREADS"] = "1"  # torchrun's choice, made here so that it needs no banner
    if is_one_host and os.path.exists("/sys/class/net/lo"):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # gloo, too, listens where ranks of this host are, and nowhere else
    return {name: value for name, value in wanted.items() if name not in current}
