"""Where a step is, and what kind of window it is in."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a step is between two reductions."""

    IDLE = "idle"
    OPEN = "open"
    CLOSING = "closing"


class Kind(Enum):
    """What a window was opened by; see step.py, [Note: two kinds of window]."""

    FULL = "the backward of a forward"
    FOLLOW_UP = "a backward without a forward since the last reduction"
