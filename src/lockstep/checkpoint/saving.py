"""``save``: a snapshot now, the writing beside the training, and a handle to wait on."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.agree.last_words import finish_before_end
from lockstep.checkpoint.collect import collect, require_folder
from lockstep.checkpoint.protocol import Save
from lockstep.checkpoint.ranks import Ranks, ranks_of
from lockstep.checkpoint.snapshot import Snapshot, take_snapshot
from lockstep.observe.moments import StepMoment, listeners, reached

logger = logging.getLogger("lockstep")

_QUIET_SECONDS = 5.0
_EXIT_SECONDS = 60.0
_GIB = 1 << 30
_LAST_STEP = (1 << 63) - 1


class State(Enum):
    """How far a save is."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


class Handle:
    """A checkpoint that is being saved."""

    def __init__(self, save: Save, step: int, on_error: str) -> None:
        self.step = step
        self.state = State.RUNNING
        self.path: Path | None = None
        self._save = save
        self._on_error = on_error
        self._error: BaseException | None = None
        self._told = False
        self._done = threading.Event()

    def done(self) -> bool:
        """Tell whether it has ended, well or not; never waits."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Path | None:
        """Wait until the checkpoint counts on all ranks and return its path, or raise why it does not.

        With ``on_error="warn"`` a failure is a warning in the log, and None is returned.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the checkpoint of step {self.step} is not complete after {timeout:g} s")
        if self._error is not None and not self._told:
            self._told = True
            if self._on_error == "raise" or not isinstance(self._error, Exception):
                raise self._error
            logger.warning("%s", self._error)
        return self.path

    def _run(self) -> None:
        try:
            self.path = self._save.run()
            self.state = State.COMPLETE
        except BaseException as error:
            self._error, self.state = error, State.FAILED
        finally:
            self._done.set()


_in_flight: Handle | None = None
_pid = 0  # of the process that the save under way belongs to


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = True,
    on_error: Literal["raise", "warn"] = "raise",
    check: bool = True,
    process_group: Any = None,
) -> Handle:
    """Save a checkpoint of a training run as a new directory in the folder ``path``; called on all ranks.

    The state is copied before this returns; it is written in the background.  A checkpoint counts when every rank has
    written its part: until then, and if anything fails, the one before it stays the latest.  A save that is still under
    way is waited for first, and its error, on whichever rank it happened, is raised here on all of them.

    Args:
        path: a folder for the checkpoints of one run, on a file system that all ranks share.
        model: plain, wrapped or compiled, in any order; names are the plain model's.  Parameters may be DTensors.
        optimizer: its state is kept by parameter name.
        step: optimizer steps done so far; it names the checkpoint.
        scheduler: anything with ``state_dict()``, as are ``scaler`` and ``data`` (a
            :class:`lockstep.data.ResumableSampler`); rank 0's counts.
        extra: more values, or objects with ``state_dict()``, of which rank 0's count.
        per_rank: the same, where each rank has its own; generators of random numbers, too.
        keep: how many checkpoints to keep; None removes nothing.
        asynchronous: False writes before it returns, without a copy in memory.
        on_error: ``"warn"`` lets training go on after a checkpoint that failed.
        check: compare checksums of parameters and optimizer state between ranks.
        process_group: the ranks that save; None for the default group, or for one process alone.
    """
    global _in_flight
    if not _is_whole(step) or not 0 <= step <= _LAST_STEP:
        raise ValueError(f"step is {step!r}; it must be a whole number from 0 to {_LAST_STEP}")
    if keep is not None and (not _is_whole(keep) or keep < 1):
        raise ValueError(f"keep is {keep!r}; keep at least 1, or None for all")
    if on_error not in ("raise", "warn"):
        raise ValueError(f'on_error is {on_error!r}; it must be "raise" or "warn"')
    folder = require_folder(path)
    if _in_flight is not None:
        before, _in_flight = _in_flight, None
        before.wait()
    if listeners:
        reached(StepMoment.SAVING, int(step))
    ranks = ranks_of(process_group)
    snapshot, failure = None, None
    try:
        collected = collect(
            model, optimizer, scheduler=scheduler, scaler=scaler, data=data, extra=extra, per_rank=per_rank
        )
        snapshot = take_snapshot(collected, int(step), ranks.rank, ranks.world, copies=asynchronous, compares=check)
    except Exception as error:
        failure = error
    num_kept = None if keep is None else int(keep)
    handle = _start(folder, snapshot, ranks, int(step), num_kept, on_error, failure, asynchronous)
    if failure is not None and on_error == "raise":  # the others hear of it in the verdict
        handle._told = True
        handle._done.wait()
        raise failure
    if not asynchronous:
        handle.wait()
    return handle


def _is_whole(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())


def _start(
    folder: Path,
    snapshot: Snapshot | None,
    ranks: Ranks,
    step: int,
    keep: int | None,
    on_error: str,
    failure: Exception | None,
    asynchronous: bool,
) -> Handle:
    global _in_flight, _pid
    progress = Progress(step, 0 if snapshot is None else snapshot.num_bytes, shows=ranks.rank == 0)
    handle = Handle(Save(folder, snapshot, ranks, keep=keep, failure=failure, on_bytes=progress.add), step, on_error)
    if asynchronous:
        # A daemon, so that a program that was interrupted can end; one that ends well waits in _finish.
        threading.Thread(target=handle._run, name=f"lockstep saves step {step}", daemon=True).start()
        _in_flight, _pid = handle, os.getpid()
    else:
        handle._run()
    return handle


def wait() -> None:
    """Wait for the save that is under way, if there is one, and raise its error."""
    global _in_flight
    if _in_flight is not None:
        handle, _in_flight = _in_flight, None
        handle.wait()


def _finish() -> None:
    """Let the last checkpoint of a program be written; say so if it could not be."""
    global _in_flight
    handle, _in_flight = _in_flight, None
    if handle is None or os.getpid() != _pid:  # in a forked child there is no thread that writes
        return
    if not handle._done.wait(_EXIT_SECONDS):
        print(f"lockstep: the checkpoint of step {handle.step} was not complete at exit", file=sys.stderr)
    elif handle._error is not None and not handle._told:
        print(f"lockstep: {handle._error}", file=sys.stderr)


# Ranks tell each other about a save, so it must end before their way to do so.
finish_before_end(_finish)


class Progress:
    """A line on rank 0 about a checkpoint that takes long."""

    def __init__(self, step: int, num_bytes: int, *, shows: bool) -> None:
        self._step, self._total, self._shows = step, num_bytes, shows
        self._done = 0
        self._began = time.monotonic()
        self._next = self._began + _QUIET_SECONDS

    def add(self, num_bytes: int) -> None:
        """Note bytes that were written."""
        self._done += num_bytes
        now = time.monotonic()
        if self._shows and now >= self._next:
            self._next = now + _QUIET_SECONDS
            rate = self._done / (now - self._began) / _GIB
            print(
                f"checkpoint of step {self._step}: {self._done / _GIB:.2f} of {self._total / _GIB:.2f} GiB of rank 0, "
                f"{rate:.2f} GiB/s",
                file=sys.stderr,
                flush=True,
            )
