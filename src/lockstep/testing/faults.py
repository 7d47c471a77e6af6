"""Faults written as text, for programs that stay as they are.

lockstep run --inject kill:rank=1,step=5,moment=backward train.py
LOCKSTEP_INJECT='sleep:rank=0,step=3,seconds=20;nan:rank=2,step=7' lockstep run train.py
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

from lockstep import settings
from lockstep.observe.moments import StepMoment

_FOREVER = 1 << 60

# Each action, the moment it happens at unless another is named, and whether it goes on.
ACTIONS = {
    "kill": (StepMoment.BACKWARD, False),
    "stop": (StepMoment.BACKWARD, False),
    "raise": (StepMoment.BACKWARD, False),
    "exit": (StepMoment.BACKWARD, False),
    "sleep": (StepMoment.FORWARD, False),
    "freeze": (StepMoment.FORWARD, False),
    "nan": (StepMoment.PACKED, False),
    "slow": (StepMoment.LAUNCH, True),
}
_LAST_STATUS = 255
KEYS = ("rank", "step", "moment", "bucket", "seconds", "status", "steps", "attempt")
_NEEDS_SECONDS = ("sleep", "freeze", "slow")
_WITHOUT_STEP = (StepMoment.STARTED, StepMoment.JOINING, StepMoment.JOINED)
_WITH_BUCKET = (StepMoment.LAUNCH, StepMoment.PACKED, StepMoment.COLLECT)
_ONLY_FOR = {
    "seconds": _NEEDS_SECONDS,
    "status": ("exit",),
    "steps": ("stop", "raise", "sleep", "freeze", "nan", "slow"),
}


class BadFault(ValueError):
    """The text of a fault cannot be understood; the message says what is wrong with it."""


@dataclass(frozen=True)
class StepFault:
    """One fault: what happens, on which rank, in which step, at which moment, and in which attempt of the launcher."""

    action: str
    rank: int | None
    step: int | None
    moment: StepMoment
    bucket: int | None
    seconds: float
    status: int
    num_steps: int
    attempt: int | None


def read_faults(text: str) -> list[StepFault]:
    """Read ``action:key=value,...`` separated by semicolons; :class:`BadFault` says what is wrong."""
    return [_read(part.strip()) for part in text.split(";") if part.strip()]


def require_rank(fault: StepFault, world: int) -> None:
    """Raise :class:`BadFault` if there is no such rank: the fault would never happen."""
    if fault.rank is not None and fault.rank >= world:
        raise BadFault(f"rank is {fault.rank}, and there are {world} ranks, 0 to {world - 1}")


def inject_from_environment() -> None:
    """Let the faults of LOCKSTEP_INJECT happen in this process."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for fault in read_faults(settings.inject()):
        if fault.attempt in (None, attempt):
            _inject(fault)


def _inject(fault: StepFault) -> None:
    from lockstep.testing import inject  # loads what checkpoints need; only where there is a fault

    actions: dict[str, Callable[[], inject.Action]] = {
        "kill": lambda: inject.kill,
        "stop": lambda: inject.stop,
        "raise": lambda: inject.raises,
        "exit": lambda: inject.leave(fault.status),
        "sleep": lambda: inject.delay(fault.seconds),
        "freeze": lambda: inject.freeze(fault.seconds),
        "nan": lambda: inject.nan,
        "slow": lambda: inject.delay(fault.seconds),
    }
    forever = contextlib.ExitStack()
    forever.enter_context(
        inject.fault(
            fault.moment,
            actions[fault.action](),
            rank=fault.rank,
            step=fault.step,
            bucket=fault.bucket,
            num_steps=fault.num_steps,
        )
    )
    _kept.append(forever.pop_all())


_kept: list[contextlib.ExitStack] = []  # faults from outside last as long as the process


def _read(text: str) -> StepFault:
    action, _, rest = text.partition(":")
    if action not in ACTIONS:
        raise BadFault(f"there is no fault {action!r}; there are {', '.join(ACTIONS)}")
    values: dict[str, str] = {}
    for pair in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, value = pair.partition("=")
        if key not in KEYS or not equals or not value:
            raise BadFault(f"{pair!r} is not one of {', '.join(f'{key}=...' for key in KEYS)}")
        if key in values:
            raise BadFault(f"{key} is given twice")
        values[key] = value
    moment, goes_on = ACTIONS[action]
    if "moment" in values:
        moment = _moment(values["moment"])
    if action in _NEEDS_SECONDS and "seconds" not in values:
        raise BadFault(f"{action} needs seconds=...")
    for key, actions in _ONLY_FOR.items():
        if key in values and action not in actions:
            raise BadFault(f"{action} has no {key}; {' and '.join(actions)} {'has' if len(actions) == 1 else 'have'}")
    if "bucket" in values and moment not in _WITH_BUCKET:
        those = ", ".join(m.value for m in _WITH_BUCKET)
        raise BadFault(f"there is no bucket at the moment {moment.value!r}; there is one at {those}")
    if values.get("steps") == "0":
        raise BadFault("steps is '0'; give a whole number from 1")
    if moment in _WITHOUT_STEP and "step" in values:
        raise BadFault(f"there is no step yet at the moment {moment.value!r}")
    if action == "nan" and moment is not StepMoment.PACKED:
        raise BadFault("nan happens to a bucket that is packed; leave the moment out")
    step = _whole(values, "step")
    default_steps = _FOREVER if goes_on else 0
    return StepFault(
        action=action,
        rank=_whole(values, "rank"),
        step=0 if goes_on and step is None else step,
        moment=moment,
        bucket=_whole(values, "bucket"),
        seconds=_seconds(values),
        status=_whole(values, "status", 3),
        num_steps=_whole(values, "steps", default_steps),
        attempt=None if values.get("attempt") == "any" else _whole(values, "attempt", 0),
    )


def _moment(text: str) -> StepMoment:
    try:
        return StepMoment(text)
    except ValueError:
        raise BadFault(f"there is no moment {text!r}; there are {', '.join(m.value for m in StepMoment)}")


@overload
def _whole(values: dict[str, str], key: str) -> int | None: ...
@overload
def _whole(values: dict[str, str], key: str, default: int) -> int: ...
def _whole(values: dict[str, str], key: str, default: int | None = None) -> int | None:
    if key not in values:
        return default
    if not values[key].isdecimal():
        raise BadFault(f"{key} is {values[key]!r}; give a whole number from 0")
    number = int(values[key])
    if key == "status" and number > _LAST_STATUS:
        raise BadFault(f"status is {number}; a process ends with one from 0 to {_LAST_STATUS}")
    return number


def _seconds(values: dict[str, str]) -> float:
    try:
        seconds = float(values.get("seconds", "0"))
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise BadFault(f"seconds is {values['seconds']!r}; give a number, 0 or more")
    return seconds
