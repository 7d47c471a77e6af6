"""Collectives whose own wait takes no time limit: a thread waits for them, and whoever needs them looks around.

gloo makes a reduce-scatter of another collective, and its wait ends when that one does, however short the limit that it
was given: a rank would see neither Ctrl-C nor a peer that failed.  The thread waits for one after the other, from the
moment when they are started.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from lockstep.agree.last_words import finish_before_end

_LAST_SECONDS = 0.5
_threads: list[tuple[SimpleQueue[PatientWork | None], threading.Thread]] = []
_queues: weakref.WeakKeyDictionary[Any, SimpleQueue[PatientWork | None]] = weakref.WeakKeyDictionary()


class PatientWork:
    """A collective under way, with a wait that keeps to its limit."""

    def __init__(self, process_group: Any, work: Any) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: Exception | None = None
        _queue_of(process_group).put(self)

    def wait(self, timeout: timedelta) -> None:
        """Wait for so long; raise if it is not done then, or has failed."""
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("not done within the slice")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def _finish(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        finally:
            self._work = None
            self._done.set()


def _queue_of(process_group: Any) -> SimpleQueue[PatientWork | None]:
    queue = _queues.get(process_group)
    if queue is None:
        queue = _queues[process_group] = SimpleQueue()
        weakref.finalize(process_group, queue.put, None).atexit = False
        thread = threading.Thread(target=_wait_for_all, args=(queue,), name="lockstep scatters", daemon=True)
        if not _threads:
            finish_before_end(_end_threads)
        _threads[:] = [(known, waiting) for known, waiting in _threads if waiting.is_alive()] + [(queue, thread)]
        thread.start()
    return queue


def _end_threads() -> None:
    """At the end of the process: one that comes back from a wait while Python ends would abort it."""
    for queue, _ in _threads:
        queue.put(None)
    for _, thread in _threads:
        thread.join(_LAST_SECONDS)
    _threads.clear()


def _wait_for_all(queue: SimpleQueue[PatientWork | None]) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        work._finish()
        del work  # its tensors go with it, while this waits for the next
