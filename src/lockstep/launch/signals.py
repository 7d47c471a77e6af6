"""Signals to the launcher, and what they mean for its ranks."""

from __future__ import annotations

import signal
from types import FrameType


class Signals:
    """The first signal to the launcher asks all ranks to end, the second one ends them; more make no difference.

    Ctrl-Z (SIGTSTP) pauses the ranks too: the terminal reaches only the launcher, since each rank has its own session.
    What was ignored when the launcher started, as ``nohup`` does with SIGHUP, stays ignored.
    """

    def __init__(self, names: str) -> None:
        self.received: list[int] = []
        self.wants_pause = False
        numbers = [getattr(signal, name.strip()) for name in names.split(",") if name.strip()]
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._ignored = [number for number in numbers if number not in self._numbers]
        self._can_pause = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL

    def listen(self) -> None:
        """Take the signals; again after torch's process starter has taken them for itself."""
        for number in self._numbers:
            signal.signal(number, lambda received, _: self.received.append(received))
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)
        if self._can_pause:
            signal.signal(signal.SIGTSTP, self._pause_soon)

    def _pause_soon(self, number: int, frame: FrameType | None) -> None:
        self.wants_pause = True

    def ignore(self) -> None:
        """All is over, and the exit status is known; an impatient Ctrl-C must not change it."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
