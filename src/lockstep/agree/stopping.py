"""``lockstep.stopping()``: all ranks learn at the same step that the job is being stopped.

A signal reaches ranks at different moments of different steps.  So each call starts telling the other ranks whether one
has come, and answers with what was told at the call before: the same on every rank, and the link is busy meanwhile with
something else than our waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep import settings, torch_private
from lockstep.agree.board import open_board
from lockstep.agree.watch import Watch


class Stopping:
    """This process's part in the question; one per process group that was made."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._handles_signal = False
        self._group: Any = None
        self._watch: Watch | None = None
        self._world_group: Any = None
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._is_stopping = False

    def ask(self) -> bool:
        """Whether a rank had been told to stop before the last call; see :func:`stopping`."""
        self._handle_signal()
        if self._is_stopping:
            return True
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            self._is_stopping = self._asked.is_set()
            if self._is_stopping:
                _tell_launcher(settings.stop_mark)
            return self._is_stopping
        self._follow_world()
        told = self._collect()
        if told:
            self._is_stopping = True
            if self._asked.is_set():
                _tell_launcher(settings.stop_mark)
            return True
        flag = torch.tensor([int(self._asked.is_set())], dtype=torch.int32)
        self._under_way = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return False

    def _handle_signal(self) -> None:
        if self._handles_signal or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            if self._asked.is_set() and before in (signal.SIG_DFL, None):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # asked twice: no more patience
                signal.raise_signal(signal.SIGTERM)
            self._asked.set()
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, note)
        self._handles_signal = True
        _tell_launcher(settings.signal_mark)

    def _follow_world(self) -> None:
        """Have a group of our own on the host, for the ranks that there are now."""
        world = torch_private.default_group()
        if self._world_group is not world:
            self._world_group, self._under_way = world, None
            self._group = dist.new_group(backend="gloo")
            seconds = torch_private.group_timeout(self._group).total_seconds()
            self._watch = Watch(open_board(world, "stopping"), dist.get_rank(), group_seconds=seconds)

    def _collect(self) -> bool:
        if self._under_way is None:
            return False
        work, flag = self._under_way
        self._under_way = None
        assert self._watch is not None
        self._watch.wait_work(work, lambda: "lockstep.stopping(), which all ranks call equally often")
        return bool(flag.item())


def _tell_launcher(mark: Callable[[Path, int], Path]) -> None:
    """Leave word for the launcher, where there is one."""
    folder = settings.run_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            mark(folder, int(os.environ["RANK"])).touch()


_stopping = Stopping()


def stopping() -> bool:
    """Tell whether the job is being stopped (SIGTERM), with the same answer on all ranks; call it once per step.

    The first call takes the signal, which from then on asks for an end instead of making one.  True comes one call
    after a rank was told, at the same call on every rank: save a checkpoint then, and leave the loop.  The launcher's
    status is 143 then, also where only one rank was told.
    """
    return _stopping.ask()
