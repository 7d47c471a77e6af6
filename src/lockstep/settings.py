"""Every ``LOCKSTEP_*`` environment variable: its name, its default, what it means, and the one place that reads it.

A variable is read when it is asked for, so that a program may still set one after the import.  A value that cannot be
used is an error that names the variable; none is ever quietly replaced by the default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "SETTINGS",
    "Setting",
    "agreement_timeout",
    "artifacts",
    "backend",
    "check",
    "compile_timeout",
    "heartbeat_timeout",
    "inject",
    "late_timeout",
    "report_dir",
    "run_folder",
    "stall_seconds",
]


@dataclass(frozen=True)
class Setting:
    """One variable.  ``default`` is the value where it is not set, as a user would write it."""

    name: str
    default: str
    meaning: str
    may_be_zero: bool = False
    is_seconds: bool = True

    def text(self, environment: Mapping[str, str] | None = None) -> str:
        """The value as it was given, or the default; an empty value is one that was not given."""
        current = os.environ if environment is None else environment
        return current.get(self.name, "").strip() or self.default

    def seconds(self, environment: Mapping[str, str] | None = None) -> float:
        """A number of seconds; zero only where it means something."""
        text = self.text(environment)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > 0 or (value == 0 and self.may_be_zero))):
            least = "0 or more" if self.may_be_zero else "above 0"
            raise ValueError(
                f"The environment variable {self.name} is {text!r}; it must be a number of seconds, {least} (default "
                f"{self.default}): {self.meaning}."
            )
        return value


AGREEMENT_TIMEOUT = Setting(
    "LOCKSTEP_AGREEMENT_TIMEOUT",
    "600",
    "how many seconds a rank waits for all others to wrap their model, or to agree on bucket sizes",
)
STALL_SECONDS = Setting(
    "LOCKSTEP_STALL_SECONDS",
    "10",
    "seconds after which a waiting rank logs who is late; the interval doubles with each message",
)
HEARTBEAT_TIMEOUT = Setting(
    "LOCKSTEP_HEARTBEAT_TIMEOUT",
    "60",
    "seconds without a sign of life, from a rank that others wait for or from the store, until that is an error; 0: "
    "never",
    may_be_zero=True,
)
LATE_TIMEOUT = Setting(
    "LOCKSTEP_LATE_TIMEOUT",
    "0",
    "seconds to wait for a rank that is alive but has not arrived, where the wrapper is not given `late_timeout=`; 0: "
    "the process group's timeout",
    may_be_zero=True,
)
COMPILE_TIMEOUT = Setting(
    "LOCKSTEP_COMPILE_TIMEOUT",
    "300",
    "seconds to wait for the rank that compiles a graph, before compiling it here too",
)
BACKEND = Setting(
    "LOCKSTEP_BACKEND",
    "",
    "backend for `init_process_group()` calls that name none; `lockstep run` sets it to nccl where each rank can have "
    "a GPU, else to gloo",
    is_seconds=False,
)
REPORT_DIR = Setting(
    "LOCKSTEP_REPORT_DIR",
    "out",
    "folder for the reports that `lockstep run` writes after a failure or a signal; `--report-dir` takes precedence",
    is_seconds=False,
)
INJECT = Setting(
    "LOCKSTEP_INJECT",
    "",
    "faults on purpose, such as `kill:rank=1,step=5,moment=backward`, in the ranks of `lockstep run`",
    is_seconds=False,
)
ARTIFACTS = Setting(
    "LOCKSTEP_ARTIFACTS",
    "",
    "folder that `lockstep precompile` wrote, from which each `TrainStep` loads its compiled programs. They are "
    "executable code: trust the folder",
    is_seconds=False,
)
RUN_FOLDER = Setting(
    "LOCKSTEP_RUN_FOLDER",
    "",
    "set by `lockstep run` for its ranks: the folder they share with the launcher",
    is_seconds=False,
)

SETTINGS = (
    AGREEMENT_TIMEOUT,
    STALL_SECONDS,
    HEARTBEAT_TIMEOUT,
    LATE_TIMEOUT,
    COMPILE_TIMEOUT,
    BACKEND,
    REPORT_DIR,
    INJECT,
    ARTIFACTS,
    RUN_FOLDER,
)


def check(environment: Mapping[str, str]) -> None:
    """Raise for the first variable with a value that its reader would refuse."""
    for setting in SETTINGS:
        if setting.is_seconds:
            setting.seconds(environment)


def agreement_timeout() -> float:
    return AGREEMENT_TIMEOUT.seconds()


def stall_seconds() -> float:
    return STALL_SECONDS.seconds()


def heartbeat_timeout() -> float:
    return HEARTBEAT_TIMEOUT.seconds()


def late_timeout() -> float:
    return LATE_TIMEOUT.seconds()


def compile_timeout() -> float:
    return COMPILE_TIMEOUT.seconds()


def backend() -> str | None:
    """The backend to use where a program names none; None leaves the choice to torch.

    Which backends there are is torch's to say: others can be registered, and one may be named per device.
    """
    return BACKEND.text() or None


def report_dir() -> Path:
    return Path(REPORT_DIR.text())


def inject() -> str:
    """The faults that were asked for, as text; empty for none."""
    return INJECT.text()


def artifacts() -> Path | None:
    """Where compiled programs are loaded from; None where the user did not say so."""
    text = ARTIFACTS.text()
    return Path(text) if text else None


def run_folder() -> Path | None:
    """Where this process leaves word for its launcher; None where it has none."""
    text = RUN_FOLDER.text()
    return Path(text) if text else None


def silence_mark(folder: Path, rank: int) -> Path:
    """The file by which a rank tells its launcher how long others may give no sign of life."""
    return folder / f"rank-{rank}.silence"


def stop_mark(folder: Path, rank: int) -> Path:
    """The file by which a rank tells its launcher that it was told to stop, and that all ranks do."""
    return folder / f"rank-{rank}.stopping"


def signal_mark(folder: Path, rank: int) -> Path:
    """The file by which a rank tells its launcher that it takes SIGTERM as a question, for what it has started too."""
    return folder / f"rank-{rank}.takes-sigterm"
