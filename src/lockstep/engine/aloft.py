"""Collectives that the host does not wait for (NCCL): a thread watches them as a wait on the host would.

``wait()`` of such a collective only lets a stream wait.  So an event is recorded behind it, and the watchdog asks the
events, which stops nobody, once a second.  One that does not come is looked at as on gloo (``agree/vigil.py``): who has
not arrived, who is gone; at the deadline the group is aborted, so that the host comes back from whatever it waits for,
and the error is raised by the model's next step, or by the optimizer before it uses anything.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

import torch

from lockstep.agree.vigil import Vigil
from lockstep.agree.watch import Watch
from lockstep.errors import LockstepError

logger = logging.getLogger("lockstep")

_PERIOD_SECONDS = 1.0
_STOPPING_SECONDS = 2.0
_MAX_ALOFT = 4096
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Event(Protocol):
    """What is asked of an event."""

    def query(self) -> bool: ...


class Aloft:
    """The collectives of one group that are under way on a device."""

    def __init__(self, watch: Watch, abort: Callable[[], None] | None = None) -> None:
        self._watch = watch
        self._abort = abort
        self._flights: deque[tuple[str, float, Event]] = deque(maxlen=_MAX_ALOFT)
        self._spare: deque[Any] = deque(maxlen=256)
        self._vigil: Vigil | None = None
        self._watched: Event | None = None
        self.has_given_up = False

    def note(self, moment: Callable[[], str]) -> None:
        """The current stream has been told to wait for a collective: remember where, and since when."""
        if torch.cuda.is_current_stream_capturing():
            return
        try:
            event = self._spare.popleft()
        except IndexError:
            event = torch.cuda.Event()
        event.record()
        self.add(moment(), event)

    def add(self, place: str, event: Event) -> None:
        """Watch an event, which stands for the collective of this name."""
        self._flights.append((place, monotonic(), event))
        _watchdog.see_to(self)

    def look(self) -> None:
        """Let go of what has come; look around for what has not."""
        while self._flights and self._flights[0][2].query():
            self._spare.append(self._flights.popleft()[2])
        if not self._flights or self.has_given_up:
            self._close()
            return
        place, since, event = self._flights[0]
        if monotonic() - since < _PERIOD_SECONDS:
            return
        if self._vigil is None or self._watched is not event:
            self._close()
            self._watched = event
            self._vigil = Vigil(self._watch, lambda: place, self._watch.limit_seconds)
        try:
            self._watch.raise_failed_peer(lambda: place)
            self._vigil.look()
        except LockstepError as error:
            self._give_up(error)

    def _close(self) -> None:
        if self._vigil is not None:
            self._vigil.close()
            self._vigil = None

    def _give_up(self, error: LockstepError) -> None:
        self.has_given_up = True
        self._watch.verdict = error
        logger.error("%s", error)
        if self._abort is not None:
            logger.error("The process group is aborted, so that this rank can say so itself.")
            self._abort()


class _Watchdog:
    """The one thread that looks at all of them."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Aloft] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the thread, at the end of the process: one that is inside torch then would abort it."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_STOPPING_SECONDS)

    def see_to(self, aloft: Aloft) -> None:
        """Look at this one too; starts the thread, or another one in its place if it has died."""
        if aloft in self._all and self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            self._all.add(aloft)
            if self._thread is None or not self._thread.is_alive():
                if self._thread is not None:
                    self._warn("has died, and was started again")
                if self._thread is None:
                    atexit.register(self.stop)
                self._thread = threading.Thread(target=self._run, name="lockstep watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        _tolerate_captures()
        idle_since = monotonic()
        while monotonic() - idle_since < 10.0:
            if self._stop.wait(_PERIOD_SECONDS):
                return
            with self._lock:
                targets = list(self._all)
            for aloft in targets:
                idle_since = monotonic()
                try:
                    aloft.look()
                except Exception as error:
                    self._warn(f"could not look: {type(error).__name__}: {error}")
            targets, aloft = [], None  # type: ignore[assignment]
        with self._lock:
            self._thread = None

    def _warn(self, what: str) -> None:
        """Training goes on without it; one warning is enough."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"The watchdog of collectives {what}; training goes on.", stacklevel=2)


def _tolerate_captures() -> None:
    """Let this thread ask events while another one captures a CUDA graph, which would otherwise be spoilt by it."""
    try:
        with open("/proc/self/maps") as maps:
            path = next((line.split()[-1] for line in maps if "libcudart" in line), None)
        if path is not None:
            ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError):
        logger.debug("no CUDA runtime was found to set the capture mode of the watchdog")


_watchdog = _Watchdog()
