"""Attempt after attempt, until one ends well or it makes no sense to go on; and what is said about it at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import settings
from lockstep.launch import reaper
from lockstep.launch.attempt import Attempt, Ended, Limits, Outcome, say, show
from lockstep.launch.facts import signal_name
from lockstep.launch.report import Report, write_reports
from lockstep.launch.run_folder import make_run_folder
from lockstep.launch.signals import Signals
from lockstep.launch.spawn import CannotStart, Program, mark_of
from lockstep.launch.store import NoLoopback, PortTaken
from lockstep.launch.summary import attempts_table, ranks_table

_MAX_SAME_STEP = 3


@dataclass(frozen=True)
class Job:
    """A program to run, and how to go about it.  ``command`` is what the user typed; ``name`` is the script's."""

    program: Program
    name: str
    command: Sequence[str]
    report_dir: Path
    limits: Limits
    signals: str
    port: int = 0


def supervise(job: Job) -> int:
    """Run a job to its end; the status for the shell."""
    signals = Signals(job.signals)
    signals.listen()
    attempts: list[Ended] = []
    try:
        root = make_run_folder()
    except OSError as error:
        raise CannotStart(f"no temporary folder can be made: {error}") from error
    guard = Reaper()
    try:
        while True:
            number = len(attempts)
            try:
                attempts.append(_run_attempt(job, number, root / f"attempt-{number}", signals, guard))
            except (CannotStart, NoLoopback, PortTaken) as error:
                if not attempts:
                    raise
                say(f"attempt {number} cannot be begun: {error}")  # how the one before ended is still to be told
                break
            ended = attempts[-1]
            if ended.outcome is not Outcome.FAILED or not _goes_on(job, attempts):
                break
            if signals.received:  # while what was left of the attempt was ended
                _stop_between(ended, signals.received[0])
                break
            say(f"attempt {number} failed: {ended.cause.text}")
            say(f"starting attempt {number + 1}; {job.program.max_restarts - number - 1} more after it")
        _conclude(job, attempts)
    finally:
        signals.ignore()
        guard.close()
        shutil.rmtree(root, ignore_errors=True)
        _remove_empty_logs(str(getattr(getattr(job.program.config, "logs_specs", None), "root_log_dir", "")))
    return shell_exit_code(ended.cause.exit_code)


def _run_attempt(job: Job, number: int, folder: Path, signals: Signals, guard: Reaper) -> Ended:
    try:
        folder.mkdir()
    except OSError as error:
        raise CannotStart(f"no folder can be made: {error}") from error
    guard.tell("watch", folder)
    ended = Attempt(job.program, number, folder, signals, job.limits, job.port).run()
    guard.tell("forget", folder)
    return ended


def _goes_on(job: Job, attempts: Sequence[Ended]) -> bool:
    if len(attempts) > job.program.max_restarts:
        return False
    last = [attempt.step for attempt in attempts[-_MAX_SAME_STEP:]]
    if len(last) == _MAX_SAME_STEP and last[0] >= 0 and len(set(last)) == 1:
        say(f"step {last[0]} failed {_MAX_SAME_STEP} times; it is not tried again")
        return False
    return True


def _stop_between(ended: Ended, number: int) -> None:
    """The job was told to stop when an attempt had failed: that is how it ends, and no other attempt is begun."""
    text = f"stopped by {signal_name(number)}, after an attempt that failed: {ended.cause.text}"
    ended.outcome, ended.signal = Outcome.STOPPED, number
    ended.cause = replace(ended.cause, text=text, exit_code=-number)


def _conclude(job: Job, attempts: Sequence[Ended]) -> None:
    ended = attempts[-1]
    if ended.outcome is not Outcome.DONE:
        verb = "FAILED" if ended.outcome is Outcome.FAILED else "STOPPED"
        say(f"{job.name} {verb}: {ended.cause.text}")
        show(ranks_table(ended.ranks))
    if len(attempts) > 1:
        show(attempts_table(attempts))
    if any(attempt.outcome is not Outcome.DONE for attempt in attempts):
        leave_report(job.report_dir, Report(job.name, tuple(job.command), os.getcwd(), attempts))


def leave_report(directory: Path, report: Report) -> None:
    """Write the report, and say where it is."""
    try:
        say(f"report: {write_reports(directory, report)}")
    except Exception as error:  # whatever it is, how the job ended is not to be hidden by it
        reason = getattr(error, "strerror", None) or error
        say(f"no report could be written to {directory}: {reason} (--report-dir)")


def _remove_empty_logs(folder: str) -> None:
    """Remove the folders that torch makes for logs, wherever it chose the place itself and nothing was written."""
    if os.path.basename(folder).startswith("torchelastic_"):
        for place, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)  # one that is empty


def shell_exit_code(exit_code: int) -> int:
    """A process ended by signal n has exit code -n in Python and 128 + n in a shell."""
    return 128 - exit_code if exit_code < 0 else exit_code


class Reaper:
    """A process that cleans up after a launcher that was killed; without one, ranks still end by themselves."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != settings.RUN_FOLDER.name}
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def tell(self, word: str, folder: Path) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(os.fsencode(f"{word} {mark_of(folder)}\n"))
                self._process.stdin.flush()

    def close(self) -> None:
        """Let it end; an attempt that it was not told to forget is cleaned up first."""
        if self._process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.communicate(timeout=10)
