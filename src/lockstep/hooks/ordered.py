"""Follow-up collectives in one order on all ranks, where futures finish in any order.

A hook of two phases wants to start its second collective when the first is done. On gloo that happens in a
worker thread, at a moment that differs between ranks; two ranks would start the same two collectives in
different orders, and gloo pairs collectives by order alone: wrong numbers, or a hang. So each hook call draws
a ticket, and second phases start in ticket order, on a group that nothing else uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lockstep import torch_private


class OrderedLaunches:
    """Starts launches in the order of their tickets (0, 1, 2, ...), whichever is ready first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_tickets = 0
        self._next = 0
        self._ready: dict[int, Callable[[], None]] = {}

    def ticket(self) -> int:
        with self._lock:
            self._num_tickets += 1
            return self._num_tickets - 1

    def ready(self, ticket: int, launch: Callable[[], None]) -> None:
        """``launch`` must only start work, never wait for it: it runs under the lock that keeps the order."""
        with self._lock:
            self._ready[ticket] = launch
            while self._next in self._ready:
                launch_now = self._ready.pop(self._next)
                self._next += 1
                launch_now()


def new_private_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A second group of the same ranks and backend. Every rank of ``group`` must call this at the same
    point.
    """
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    name = torch_private.default_group().group_name if group is None else group.group_name
    private = torch_private.new_group_of(ranks, f"twin of {name}", backend=dist.get_backend(group))
    assert isinstance(private, dist.ProcessGroup), "only a member of the group asks for its twin"
    return private
