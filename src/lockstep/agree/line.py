"""The line to the store: one thread per process with a connection of its own, so that no call to the store blocks.

A store's calls have no deadline: when the process that hosts it is stopped or cut off, they come back when it does, or
never, and Ctrl-C is not noticed in them.  So they are made by a thread, and whoever needs an answer waits for the
thread, with a limit.  The thread takes turns: between what it is asked to do it lets ``on_turn`` post a sign of life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.agree.link import MAKE_SECONDS, Link, State
from lockstep.agree.sockets import hang_up, port_of
from lockstep.errors import StoreSilent

logger = logging.getLogger("lockstep")

T = TypeVar("T")
_MOST_ROUNDS = 3
_MOST_TRIES = 10
_LONGEST_SLEEP = 3600.0


class _Job:
    """Something to do with the store, and what came of it."""

    def __init__(self, function: Callable[[Any], Any], repeats: bool = True) -> None:
        self.function = function
        self.repeats = repeats
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self.is_dropped = False


class _Shared:
    """What the thread and its owner both hold; the thread does not hold the owner."""

    def __init__(self, store: Any) -> None:
        # This one keeps the server alive where this process hosts it; only a copy of it is ever called.
        self.store = store
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.link = Link(store)
        self.busy_since: float | None = None
        self.num_done = 0  # calls that came back


class Line:
    """A way to the store that always comes back.

    ``on_turn`` is called by the thread about every ``period`` seconds with the connection; it must hold nothing that
    holds this line, which ends when its last owner lets go of it; ``on_end`` is called then.
    """

    def __init__(
        self,
        store: Any,
        on_turn: Callable[[Any], None] | None = None,
        period: float = 1.0,
        on_end: Callable[[Any], None] | None = None,
    ) -> None:
        self._shared = _Shared(store)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_work, args=(self._shared, on_turn, period, on_end), name="lockstep line to the store", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._shared.jobs.put, None)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it, and not a forked child, which has no such thread."""
        return os.getpid() == self._pid

    @property
    def is_broken(self) -> bool:
        """Whether the store is gone; one that cannot be reached, and may be again, is only silent."""
        return self._shared.link.state is State.GONE

    @property
    def num_answers(self) -> int:
        """How often the store has answered: more of them show that it is there, however long one takes to be heard."""
        return self._shared.num_done

    @property
    def silence(self) -> float:
        """For how many seconds the store has not answered; infinite where it is gone."""
        if self.is_broken:
            return float("inf")
        link = self._shared.link
        since = link.since if link.state is State.CUT else self._shared.busy_since
        return 0.0 if since is None else monotonic() - since

    def ask(self, function: Callable[[Any], T], seconds: float, *, repeats: bool = True) -> T:
        """Return what ``function`` makes of the connection; raise StoreSilent if it takes longer than ``seconds``.

        ``repeats``: it may be called again, with another connection, when the first one broke meanwhile.
        """
        if not self.is_ours:
            raise StoreSilent("A forked child does not speak to the store of its parent.")
        if threading.current_thread() is self._thread:
            raise RuntimeError("the thread of the line cannot wait for itself")
        if not self._thread.is_alive():
            raise StoreSilent("The line to the store is closed.")
        job = _Job(function, repeats)
        self._shared.jobs.put(job)
        deadline = monotonic() + seconds
        while not job.done.wait(min(1.0, max(0.0, deadline - monotonic()))):
            if monotonic() >= deadline or not self._thread.is_alive():
                job.is_dropped = True
                raise StoreSilent(f"The store has not answered for {max(seconds, self.silence):.0f} s.")
        if isinstance(job.error, dist.DistNetworkError):
            raise StoreSilent(
                f"The store through which ranks find each other is gone: {job.error}. Its process has ended, or this "
                "rank is cut off from it."
            ) from job.error
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def close(self, seconds: float) -> None:
        """End the thread, at the end of the process: one that came back from the store after it would abort it."""
        if self.is_ours:
            self._shared.jobs.put(None)
            _end_thread(self._thread, self._shared, seconds)

    @property
    def is_wanted(self) -> bool:
        """Whether someone waits for the thread; what takes long in it should come to an end."""
        return not self._shared.jobs.empty()

    def tell(self, function: Callable[[Any], object]) -> None:
        """Let ``function`` be done some time, and wait for nothing."""
        if self.is_ours:
            self._shared.jobs.put(_Job(function))

    def take_turn(self) -> None:
        """Let ``on_turn`` be called now rather than at its time."""
        if self.is_ours:
            self._shared.jobs.put(_Job(_turn))


# The threads that are at work, with what they share: also of lines that nobody holds any more.
_at_work: dict[threading.Thread, _Shared] = {}


def end_threads(seconds: float) -> None:
    """End what is left of lines that nobody holds, at the end of the process."""
    for thread, shared in list(_at_work.items()):
        _end_thread(thread, shared, seconds)


def _end_thread(thread: threading.Thread, shared: _Shared, seconds: float) -> None:
    """Wait for a thread that was told to end; one that is inside a store that stands still is hung up on."""
    shared.link.is_closing = True
    for _ in range(_MOST_ROUNDS):  # on a busy machine a store that answers may take longer
        num_done = shared.num_done
        thread.join(seconds)
        if not thread.is_alive() or shared.num_done == num_done:
            break
    if thread.is_alive():
        hang_up(port_of(shared.store))
        thread.join(seconds)
    for _ in range(_MOST_TRIES):  # torch tries a few times to make a connection
        if thread.is_alive() and shared.link.is_making:
            hang_up(port_of(shared.store))
            thread.join(MAKE_SECONDS)


def _turn(_: Any) -> None:
    """Stands in the queue for a turn."""


def _work(
    shared: _Shared,
    on_turn: Callable[[Any], None] | None,
    period: float,
    on_end: Callable[[Any], None] | None,
) -> None:
    thread = threading.current_thread()
    _at_work[thread] = shared
    try:
        _take_jobs(shared, on_turn, period, on_end)
    finally:
        _at_work.pop(thread, None)


def _take_jobs(
    shared: _Shared,
    on_turn: Callable[[Any], None] | None,
    period: float,
    on_end: Callable[[Any], None] | None,
) -> None:
    link, backlog = shared.link, deque[_Job]()  # what waits for the link to be whole again, in its order
    next_turn = monotonic()
    has_warned = False
    while True:
        job = _next_job(shared, backlog, next_turn)
        if job is None:
            if on_end is not None and link.state is State.WHOLE:
                with contextlib.suppress(RuntimeError):
                    on_end(link.connection())
                    link.close()
            break
        if job.is_dropped:
            continue
        is_turn = job.function is _turn
        if is_turn:
            next_turn = monotonic() + period
        shared.busy_since = monotonic()
        try:
            job.result = _call(link, (on_turn or _turn) if is_turn else job.function, job.repeats)
        except dist.DistNetworkError as error:
            next_turn = link.next_try
            if link.state is State.CUT and job.repeats and not is_turn:
                backlog.appendleft(job)
                continue  # nobody has an answer yet
            job.error = error
        except Exception as error:
            job.error = error
            if is_turn and not has_warned:
                has_warned = True
                logger.warning("Signs of life cannot be given or read: %s: %s", type(error).__name__, error)
        else:
            shared.num_done += 1
        finally:
            shared.busy_since = None
        job.done.set()
        del job


def _next_job(shared: _Shared, backlog: deque[_Job], next_turn: float) -> _Job | None:
    """Take what is to be done next; while the store cannot be reached, only turns, in which that is tried again."""
    while True:
        is_cut = shared.link.state is State.CUT
        if backlog and not is_cut:
            return backlog.popleft()
        try:
            job = shared.jobs.get(timeout=max(0.0, min(next_turn - monotonic(), _LONGEST_SLEEP)))
        except Empty:
            if monotonic() < next_turn:
                continue
            return _Job(_turn)
        if job is None or not is_cut:
            return job
        if job.function is not _turn:
            kept = [waiting for waiting in backlog if not waiting.is_dropped]
            backlog.clear()
            backlog.extend([*kept, job])


def _call(link: Link, function: Callable[[Any], Any], repeats: bool) -> Any:
    """Call it with the connection; once more with another one, if that broke and another could be made."""
    connection = link.connection()
    try:
        return function(connection)
    except dist.DistNetworkError as error:
        link.lose(error)
        if not repeats or link.state is not State.CUT:
            raise
    connection = link.connection()
    try:
        return function(connection)
    except dist.DistNetworkError as error:
        link.lose(error)
        raise
