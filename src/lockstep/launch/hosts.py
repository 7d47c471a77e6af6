"""Several hosts: torch's elastic launcher starts the ranks of this one; they end with it, and it leaves a report."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousError

from lockstep import settings
from lockstep.launch.attempt import Ended, Outcome, say, show
from lockstep.launch.cause import Cause, find_cause
from lockstep.launch.checkin import HostCheckin
from lockstep.launch.facts import Ending, RankFacts
from lockstep.launch.inside import PARENT_FILE
from lockstep.launch.report import Report
from lockstep.launch.run_folder import make_run_folder
from lockstep.launch.summary import ranks_table
from lockstep.launch.supervise import Reaper, leave_report, shell_exit_code

EXIT_NO_RENDEZVOUS = 1
EXIT_NO_FOLDER = 2


def run_on_hosts(args: argparse.Namespace, command: Sequence[str], report_dir: Path) -> int:
    """Run this host's part of a job to its end; the status for the shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so that there is time to clean up
    try:
        root = make_run_folder()
    except OSError as error:
        print(f"lockstep run: error: no temporary folder can be made: {error}", file=sys.stderr)
        return EXIT_NO_FOLDER
    folder = root / "ranks"
    folder.mkdir()
    (folder / PARENT_FILE).write_text(str(os.getpid()))
    os.environ[settings.RUN_FOLDER.name] = str(folder)
    guard = Reaper()
    guard.tell("watch", folder)
    hosts = HostCheckin.of(args)
    hosts.start()
    began = time.monotonic()
    try:
        # `record` is what torchrun's own entry point wears: it hands a failure's details on to an outer launcher.
        record(torchrun.run)(args)
        return 0
    except ChildFailedError as error:
        # The user started a script and never heard of the file that starts it.
        print(str(error).replace(args.training_script, args.program), file=sys.stderr)
        ranks = _facts(error.failures, folder)
        ended = Ended(0, Outcome.FAILED, find_cause(ranks), time.monotonic() - began, ranks)
        _conclude(args.program, command, report_dir, ended)
        return shell_exit_code(ended.cause.exit_code)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, TimeoutError, RuntimeError) as error:
        missing = hosts.explain()
        if not missing and not isinstance(error, RendezvousError):
            raise
        say(f"{args.program} FAILED: the hosts did not meet: {missing or error}")
        cause = Cause(None, missing or str(error))
        ended = Ended(0, Outcome.FAILED, cause, time.monotonic() - began)
        _conclude(args.program, command, report_dir, ended)
        return EXIT_NO_RENDEZVOUS
    finally:
        hosts.stop()
        guard.tell("forget", folder)
        guard.close()
        shutil.rmtree(root, ignore_errors=True)
        os.environ.pop(settings.RUN_FOLDER.name, None)


def _facts(failures: Mapping[int, Any], folder: Path) -> list[RankFacts]:
    found = []
    for rank, failure in failures.items():
        facts = RankFacts(rank, failure.pid, socket.gethostname(), Ending.FAILED, failure.exitcode, failure.timestamp)
        facts.read(folder)
        found.append(facts)
    return found


def _conclude(name: str, command: Sequence[str], report_dir: Path, ended: Ended) -> None:
    if ended.ranks:
        say(f"{name} FAILED on this host: {ended.cause.text}")
        show(ranks_table(ended.ranks))
    leave_report(report_dir, Report(name, tuple(command), os.getcwd(), [ended]))
