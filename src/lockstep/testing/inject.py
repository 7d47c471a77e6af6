"""Faults at a named moment: a process that is killed or stopped, an exception, a gradient that is no number.

with inject.fault(StepMoment.BACKWARD, inject.kill, step=5, rank=1):   # in a training step
    train()
with inject.fault(Moment.FILE_SYNCED, inject.disk_full):               # in a checkpoint
    lockstep.checkpoint.save(...)
with inject.fault(None, inject.kill, number=17, rank=2): ...           # whichever moment of a checkpoint is the 17th

The same from outside, for a program that stays as it is: see ``lockstep.testing.faults``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.moments import Moment, listeners
from lockstep.observe import moments
from lockstep.observe.moments import Reached, StepMoment

__all__ = [
    "Fault",
    "Fired",
    "Moment",
    "StepMoment",
    "counting",
    "delay",
    "disk_full",
    "fault",
    "freeze",
    "kill",
    "leave",
    "nan",
    "raises",
    "read_only",
    "stop",
]

# What an action gets: the file of a checkpoint, or the moment of a step.
Action = Callable[[Any], None]


class Fault(Exception):
    """What ``raises`` raises."""


class Fired(Enum):
    """Whether a fault has happened."""

    NOT_YET = "not yet"
    FIRED = "fired"


def kill(place: object) -> None:
    """End this process at once, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(place: object) -> None:
    """Stop this process, as ``kill -STOP`` does: it is there, and does nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(place: object) -> None:
    """Raise an exception that nobody expects."""
    where = f"{place.moment.value} of step {place.step}" if isinstance(place, Reached) else place
    raise Fault(f"injected at {where}")


def leave(status: int) -> Action:
    """End this process without an exception, as ``os._exit`` does."""

    def leave_now(place: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return leave_now


def delay(seconds: float) -> Action:
    """Sleep: once it is a rank that is late, at every ``LAUNCH`` a slow link."""

    def sleep(place: object) -> None:
        time.sleep(seconds)

    return sleep


def freeze(seconds: float) -> Action:
    """Sleep with the interpreter's lock held: no other thread of this process can run Python."""

    def hold(place: object) -> None:
        import ctypes

        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    return hold


def nan(place: Reached) -> None:
    """Make one gradient of a bucket that is about to leave not a number; at the moment ``PACKED``."""
    flat = getattr(place.subject, "flat", None)
    if flat is None or flat.layout.__str__() != "torch.strided" or not flat.is_floating_point():
        raise Fault(f"nan: no dense gradients at the moment {place.moment.value!r}; use moment packed")
    flat.view(-1)[:1].fill_(float("nan"))


def disk_full(place: Path) -> None:
    """Raise what the operating system raises when a disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))


def read_only(place: Path) -> None:
    """Raise what the operating system raises on a file system that cannot be written to."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))


class Injection:
    """A fault that waits for its moment; ``num_seen`` counts the moments that have come."""

    def __init__(self, action: Action, number: int, rank: int | None, *, again: bool = False) -> None:
        self._action, self._number, self._rank, self._again = action, number, rank, again
        self.num_seen = 0
        self.fired = Fired.NOT_YET

    def come(self, place: object) -> None:
        """A moment has come that this fault is for."""
        if self._rank is not None:
            _require_rank(self._rank)
            if self._rank != _this_rank():
                return
        self.num_seen += 1
        if self.num_seen == self._number or (self._again and self.num_seen > self._number):
            self.fired = Fired.FIRED
            self._action(place)


@contextlib.contextmanager
def fault(
    moment: Moment | StepMoment | None,
    action: Action,
    *,
    number: int = 1,
    rank: int | None = None,
    step: int | None = None,
    bucket: int | None = None,
    num_steps: int = 0,
) -> Iterator[Injection]:
    """Let a fault happen the ``number``-th time a moment comes, on one rank or on all.

    Args:
        moment: of a training step, or of a checkpoint; None is any moment of a checkpoint.
        action: what happens, such as ``kill``; it gets the moment of the step, or the file of the checkpoint.
        step: the first step in which it may happen, counted from 0 as checkpoints count; None for any.
        bucket: the bucket, for moments that have one; None for any.
        num_steps: let it happen at every such moment of this many steps, from ``step`` or the first one; 0 is once.
    """
    _require_rank(rank)
    injection = Injection(action, number, rank, again=num_steps > 0)
    if isinstance(moment, StepMoment):
        with _during(moments.listeners, _of_step(injection, moment, step, bucket, num_steps)):
            yield injection
    else:
        if step is not None or bucket is not None or num_steps:
            raise ValueError(f"step, bucket and num_steps are for moments of a step; moment is {moment!r}")
        with _during(listeners, _of_checkpoint(injection, moment)):
            yield injection


def _require_rank(rank: int | None) -> None:
    """Raise if there is no such rank, as far as the number of ranks is known: a fault on it would never happen."""
    if rank is None:
        return
    world = _world()
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"rank is {rank!r}; give a whole number from 0, or None for all ranks")
    if world is not None and rank >= world:
        raise ValueError(f"rank is {rank}, and there are {world} ranks, 0 to {world - 1}: it would never happen")


def _world() -> int | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def _this_rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def counting() -> Iterator[Injection]:
    """Count the moments of checkpoints that come, and let nothing happen."""
    with fault(None, kill, number=-1) as injection:
        yield injection


def _of_step(
    injection: Injection, moment: StepMoment, step: int | None, bucket: int | None, num_steps: int
) -> moments.Listener:
    first = step

    def listen(reached: Reached) -> None:
        nonlocal first
        if reached.moment is not moment or bucket not in (None, reached.bucket):
            return
        if first is None and num_steps:
            first = reached.step
        if first is not None and not first <= reached.step < first + max(1, num_steps):
            return
        injection.come(reached)

    return listen


def _of_checkpoint(injection: Injection, moment: Moment | None) -> Callable[[Moment, Path], None]:
    def listen(reached: Moment, path: Path) -> None:
        if moment in (None, reached):
            injection.come(path)

    return listen


@contextlib.contextmanager
def _during(those: list[Any], listener: Any) -> Iterator[None]:
    those.append(listener)
    try:
        yield
    finally:
        those.remove(listener)
