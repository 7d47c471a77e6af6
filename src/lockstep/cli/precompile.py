"""``lockstep precompile``: compile the steps of a training script in one process, for ranks that are not there."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from lockstep import settings
from lockstep.install import install
from lockstep.program import precompiling

__all__ = ["precompile"]

EXIT_NOTHING = 1
DESCRIPTION = """\
Run SCRIPT in this process as rank 0 of a world that is not there, until each of its
lockstep.TrainStep has made a few updates, and write what was compiled to a folder.
The ranks load it with LOCKSTEP_ARTIFACTS=DIR, or lockstep.load_step(), and start
without compiling. What the script computes meanwhile means nothing: let it write
no checkpoints.
"""


def precompile(words: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status."""
    words = list(words)
    own, theirs = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = _parser().parse_args(own)
    if not options.module and not Path(options.script).is_file():
        print(f"lockstep precompile: there is no script {options.script}", file=sys.stderr)
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"lockstep precompile: {options.out} cannot be a folder: {error.strerror}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="lockstep-precompile-") as cache:
        # In a cache of its own, so that what is written holds everything that had to be compiled.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ.pop(settings.ARTIFACTS.name, None)
        if options.world > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # kernels are made for a number of threads: that of lockstep run and torchrun
        making = precompiling.begin(options.out, options.world, options.updates)
        making.leave = lambda: _leave(making, cache)
        install()
        status = _run(options.script, theirs, making, is_module=options.module)
    return _report(making) or status


def _run(script: str, words: list[str], making: precompiling.Precompiling, *, is_module: bool) -> int:
    """Run the script until everything is written, or it ends; returns the exit status that it ended with."""
    sys.argv[:] = [script, *words]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if is_module else str(Path(script).resolve().parent))
    status = 0
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except precompiling.Enough:
        return 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status:
            print(f"lockstep precompile: the script ended by sys.exit({end.code!r})", file=sys.stderr)
    except Exception as error:
        traceback.print_exc()
        print(f"lockstep precompile: the script raised {type(error).__name__}", file=sys.stderr)
        status = EXIT_NOTHING
    making.end()
    return status


def _leave(making: precompiling.Precompiling, cache: str) -> NoReturn:
    """End the process: the script catches everything, and would train on."""
    status = _report(making)
    shutil.rmtree(cache, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report(making: precompiling.Precompiling) -> int:
    for made in making.made.values():
        print(f"{made.path}  {made.path.stat().st_size / 2**20:.1f} MiB  sha256:{made.digest}\n{made.explanation}")
    for number, why in making.failed.items():
        print(f"lockstep precompile: TrainStep {number} of the script: {why}", file=sys.stderr)
    if not making.made and not making.failed:
        print("lockstep precompile: the script ended without a lockstep.TrainStep", file=sys.stderr)
    return EXIT_NOTHING if making.failed or not making.made else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep precompile",
        usage="lockstep precompile [-m] SCRIPT --world N --out DIR [--updates K] [-- ARGS...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script; its arguments follow --")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("--world", type=_count, required=True, metavar="N", help="how many ranks will train")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where artifacts go")
    parser.add_argument(
        "--updates", type=_count, default=3, metavar="K", help="updates of each step, enough to see all shapes (3)"
    )
    return parser


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
