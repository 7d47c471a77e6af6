"""The moments of a training step, for whoever listens: a page that the launcher reads, and faults on purpose.

Nobody listens unless ``lockstep run`` started the process or a test asked for it; a moment then costs one look at an
empty list.  Steps are numbered as checkpoints number them: one that was loaded or saved says how many are done.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class StepMoment(Enum):
    """A point in a rank's life; what is about to happen, or, for words that say so, what just has."""

    STARTED = "started"
    JOINING = "joining"
    JOINED = "joined"
    FORWARD = "forward"
    BACKWARD = "backward"
    LAUNCH = "launch"
    PACKED = "packed"
    COLLECT = "collect"
    END = "end"
    LOADED = "loaded"
    SAVING = "saving"


class Reached(NamedTuple):
    """A moment that has come: in which step, and of which bucket (-1 and no names: of none).

    ``subject`` has ``slots``, the parameters that a fault may want to touch; None where there are none.
    """

    moment: StepMoment
    step: int
    bucket: int
    names: str
    subject: object


Listener = Callable[[Reached], None]
listeners: list[Listener] = []

_COUNTS_STEPS_DONE = (StepMoment.LOADED, StepMoment.SAVING)
_last_own = 0  # the number that the model's own count has now
_shift = 0  # what to add to it, for the number that checkpoints give a step


def reached(moment: StepMoment, step: int = -1, bucket: int = -1, names: str = "", subject: object = None) -> None:
    """Tell whoever listens; ``step`` is the model's own count, or -1 for the number it has now."""
    global _last_own, _shift
    if moment in _COUNTS_STEPS_DONE:
        _shift = step - _last_own
    elif step >= 0:
        _last_own = step
    now = Reached(moment, _last_own + _shift, bucket, names, subject)
    if moment is StepMoment.END:
        _last_own += 1  # so many are done now
    for listener in list(listeners):
        listener(now)
