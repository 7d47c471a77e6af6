"""The one place that talks to CUDA's graphs, streams and events for captured programs.

``Machine`` is what ``captured.py`` needs of a device; tests have one without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

import torch
from torch import Tensor

_SYNC_WARNING = "synchronizing CUDA operation"
_DEBUG_WARNING = "Synchronization debug mode"  # of the debugging itself


class Recording(Protocol):
    """A program that was captured."""

    def replay(self) -> None: ...


class Mark(Protocol):
    """A moment in the device's queue, which the host may wait for as for a collective."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: Any) -> None: ...

    def seconds_since(self, earlier: Any) -> float: ...


class Machine(Protocol):
    """A device on which programs can be captured."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run a step on the stream on which programs are captured."""

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """Note where the host waits for the device, which a captured program cannot."""

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        """Capture what ``run`` does; nothing of it happens before a replay."""

    def inbox(self, tensors: Sequence[Tensor]) -> Inbox:
        """Memory for inputs like these."""

    def mark(self) -> Mark:
        """Now, in the device's queue."""

    def read_later(self, counter: Tensor) -> Callable[[], int]:
        """Copy a counter to the host without waiting; call the result once the queue has come that far."""


class Inbox(Protocol):
    """The memory that a program reads its inputs from."""

    tensors: list[Tensor]

    def put(self, tensors: Sequence[Tensor]) -> None: ...


class CudaMachine:
    """A CUDA device.  All programs of one step share a pool of memory, and the stream they are captured on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._copies = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """Sync debugging warns at each wait, with the place in the program that waits."""
        places: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if _SYNC_WARNING in str(warning.message):
                places.append(f"{Path(warning.filename).name}:{warning.lineno}")
            elif not str(warning.message).startswith(_DEBUG_WARNING):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        torch.clear_autocast_cache()  # copies of weights that were cast before are not the program's
        generator = torch.cuda.default_generators[self.device.index or 0]
        backup = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (a data loader, a watchdog of the backend) go on meanwhile with what is not for a graph.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        except BaseException:
            # A capture that broke leaves the generator waiting for its end.
            generator.graphsafe_set_state(backup)
            raise
        return graph, result

    def inbox(self, tensors: Sequence[Tensor]) -> Inbox:
        return CudaInbox(self.device, self._copies, tensors)

    def mark(self) -> Mark:
        return CudaMark(self.device)

    def read_later(self, counter: Tensor) -> Callable[[], int]:
        host = torch.empty(counter.shape, dtype=counter.dtype, device="cpu", pin_memory=True)
        host.copy_(counter, non_blocking=True)
        return lambda: int(host.item())


class CudaMark:
    """An event on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: Any) -> None:
        """Wait this long at most; an event has no wait with a limit of its own."""
        deadline, pause = monotonic() + timeout.total_seconds(), 2e-5
        while not self._event.query():
            if monotonic() > deadline:
                raise RuntimeError("not done within the slice")
            sleep(pause)
            pause = min(2 * pause, 1e-3)

    def seconds_since(self, earlier: Any) -> float:
        return earlier._event.elapsed_time(self._event) / 1e3


class _Turn:
    """One of two ways in for a tensor of the host: while one is read by the step before, the other is filled."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self.pinned: Tensor | None = None
        self.staging = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        self.arrived, self.consumed = torch.cuda.Event(), torch.cuda.Event()
        self.is_used = False


class CudaInbox:
    """Inputs on the device; what comes from the host travels on a stream of its own, beside the step before."""

    def __init__(self, device: torch.device, copies: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._copies = copies
        self._turns = [[_Turn(t, device) for _ in range(2)] if t.device.type == "cpu" else [] for t in tensors]
        self._num_puts = 0
        self.tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Copy a batch in; the copies are queued, and the host does not wait."""
        current = torch.cuda.current_stream(self._device)
        index = self._num_puts % 2
        self._num_puts += 1
        with torch.no_grad():
            for mine, given, turns in zip(self.tensors, tensors, self._turns, strict=True):
                if turns:
                    self._from_host(turns[index], given, current)
                    mine.copy_(turns[index].staging)
                    turns[index].consumed.record(current)
                else:
                    mine.copy_(given)

    def _from_host(self, turn: _Turn, given: Tensor, current: torch.cuda.Stream) -> None:
        source = given
        if not given.is_pinned():
            if turn.pinned is None:
                turn.pinned = torch.empty_strided(
                    given.shape, given.stride(), dtype=given.dtype, device="cpu", pin_memory=True
                )
            elif turn.is_used:
                turn.arrived.synchronize()  # of two steps ago: the memory is about to be written again
            source = turn.pinned.copy_(given)
        with torch.cuda.stream(self._copies):
            if turn.is_used:
                self._copies.wait_event(turn.consumed)
            else:
                self._copies.wait_stream(current)  # the staging memory is new
            turn.staging.copy_(source, non_blocking=True)
            turn.arrived.record(self._copies)
        turn.is_used = True
        current.wait_event(turn.arrived)
