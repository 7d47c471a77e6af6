"""What the launcher knows of each rank when an attempt has ended."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from lockstep.launch.inside import stack_path
from lockstep.launch.page import Place, place_of
from lockstep.launch.words import Words, read_words


class Ending(Enum):
    """How a rank came to its end."""

    RUNNING = "was running"
    DONE = "ended well"
    FAILED = "failed"
    ENDED_BY_LAUNCHER = "was ended by the launcher"


@dataclass
class RankFacts:
    """One rank of one attempt."""

    rank: int
    pid: int
    host: str
    ending: Ending = Ending.RUNNING
    exit_code: int | None = None
    ended_at: float = 0.0
    place: Place = field(default_factory=Place)
    words: list[Words] = field(default_factory=list)
    stack: str = ""
    was_stopped: bool = False
    out_of_memory: str = ""  # the limit that it ran into
    perhaps_out_of_memory: bool = False  # something on its machine was killed for want of memory while it ran

    def read(self, folder: Path) -> None:
        """Read what the rank has left in the launcher's folder: where it was, its errors, its stack."""
        self.place = place_of(folder, self.rank, self.pid)
        self.words = read_words(folder, self.rank)
        with contextlib.suppress(OSError):
            self.stack = stack_path(folder, self.rank).read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def first_words(self) -> Words | None:
        """The error that ended it: the first of the main thread, else the first of all."""
        own = [words for words in self.words if not words.thread]
        return next(iter(own or self.words), None)

    @property
    def began_to_end(self) -> float:
        """When its first error was raised, or it ended without one."""
        words = self.first_words
        return min(words.time, self.ended_at or words.time) if words is not None else self.ended_at

    def how(self) -> str:
        """How it ended, in a few words."""
        words = self.first_words
        if self.ending is Ending.DONE:
            return "ended well"
        if self.was_stopped and self.ending is not Ending.FAILED:
            return "was stopped (SIGSTOP, a debugger or a frozen cgroup)"
        if self.out_of_memory:
            return f"was killed: out of memory, {self.out_of_memory}"
        if words is not None and not words.thread:
            return words.text if words.type == "SystemExit" else f"raised {words.first_line}"
        if self.ending is Ending.RUNNING:
            return "was running"
        if self.ending is Ending.ENDED_BY_LAUNCHER:
            return "was ended by the launcher"
        if self.exit_code is not None and self.exit_code < 0:
            why = " (perhaps out of memory: the kernel killed a process of this machine for that meanwhile)"
            return f"was killed by {signal_name(-self.exit_code)}{why if self.perhaps_out_of_memory else ''}"
        if words is not None:
            return f"ended with status {self.exit_code}, after thread {words.thread!r} raised {words.first_line}"
        return f"ended with status {self.exit_code}, without a Python exception (os._exit, or a library ended it)"

    def as_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "host": self.host,
            "ending": self.ending.value,
            "how": self.how(),
            "exit_code": self.exit_code,
            "ended_at": self.ended_at,
            "last_seen": self.place.as_json(),
            "errors": [words.as_json() for words in self.words],
            "stack": self.stack,
            "was_stopped": self.was_stopped,
            "out_of_memory": self.out_of_memory,
            "perhaps_out_of_memory": self.perhaps_out_of_memory,
        }


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
