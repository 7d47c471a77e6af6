"""The lane: wrapped models that share a process group, and the order in which they send.

Collectives of one group are paired by the order in which ranks issue them.  When one backward reaches several wrapped
models, the order in which their gradients become ready depends on how a rank computes (compiled, eager, with hooks); so
it must not decide.  The rule: the model that was wrapped last sends all of its buckets first.  That is the order in
which a backward usually comes to them, since models are mostly wrapped in the order in which they run; where it is not,
a model's buckets wait for those of another.

A lane also owns the end of a backward: one callback for all models that took part, so that they finish in the same
order too.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from lockstep import torch_private


class Member(Protocol):
    """What a lane needs of a step."""

    def takes_part(self) -> bool: ...

    def begin_pass(self) -> None: ...

    def has_sent_all(self) -> bool: ...

    def send_complete(self) -> None: ...

    def settle_pass(self, *, is_inner: bool) -> None: ...

    def end_pass(self, *, is_inner: bool) -> None: ...

    def forget_pass(self) -> None: ...


class Lane:
    """The steps of one process group that are alive, in the order of wrapping."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._members: list[weakref.ref[Any]] = []
        self._running: list[Member] = []
        self._callback_queued = self._outermost_queued = False
        self._is_compiled = False  # the pass is one graph, whose own end is told (feeders/compiled_autograd.py)

    def enter(self, member: Member) -> None:
        self.leave(member)
        self._members.append(weakref.ref(member))

    def leave(self, member: Member) -> None:
        self._members = [m for m in self._members if m() not in (None, member)]

    def begin(self, first: Member) -> None:
        """The first gradient of a pass has come, for ``first``: find all who take part, and let them begin."""
        coming: list[Member] = [first]
        if len(self._members) > 1:
            alive = [m for m in (reference() for reference in self._members) if m is not None]
            coming = [m for m in reversed(alive) if m is first or (m not in self._running and m.takes_part())]
        self.queue_end()
        self._running += coming
        for member in coming:
            member.begin_pass()

    def queue_end(self) -> None:
        """See to it that the end of the pass that is running now is noticed."""
        if not self._callback_queued:
            self._callback_queued = True
            if torch_private.in_compiled_backward():
                self._is_compiled = True
            else:
                torch_private.queue_backward_callback(self._end)

    def queue_end_of_outermost(self) -> None:
        """As above, from a place that is known to be in the outermost pass."""
        if not self._outermost_queued:
            self._callback_queued = self._outermost_queued = True
            torch_private.queue_backward_callback(self._end)

    def may_send(self, member: Member) -> bool:
        """Whether all who come before ``member`` in this pass have sent everything."""
        running = self._running
        if len(running) < 2:
            return True
        for other in running:
            if other is member:
                return True
            if not other.has_sent_all():
                return False
        return True

    def sent_all(self, member: Member) -> None:
        """Let those behind ``member`` send what they have."""
        if len(self._running) < 2 or member not in self._running:
            return
        for other in self._running[self._running.index(member) + 1 :]:
            other.send_complete()

    @torch_private.leave_to_python
    def _end(self) -> None:
        with self.lock:
            running, self._running, self._callback_queued, self._is_compiled = self._running, [], False, False
            is_inner = torch_private.in_nested_backward()
            self._outermost_queued = self._outermost_queued and is_inner
            # Those who settle still have to keep to the order.
            self._running = running
            try:
                for member in running:
                    member.settle_pass(is_inner=is_inner)
                for member in running:
                    member.end_pass(is_inner=is_inner)
            finally:
                self._running = []
                for member in running:
                    member.forget_pass()

    def forget_broken_pass(self) -> None:
        """Before a forward: a backward that raised has left its marks, because the engine skips its callbacks then."""
        if not torch_private.in_backward() and (self._running or self._callback_queued or self._outermost_queued):
            for member in self._running:
                member.forget_pass()
            self._running, self._callback_queued, self._outermost_queued = [], False, False
            self._is_compiled = False


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()


def lane_of(process_group: Any) -> Lane:
    """The lane of a process group."""
    lane = _lanes.get(process_group)
    if lane is None:
        lane = _lanes[process_group] = Lane()
    return lane


def end_compiled_passes() -> None:
    """The graph that is a whole backward has come to its end."""
    for lane in list(_lanes.values()):
        if lane._is_compiled:
            lane._end()
