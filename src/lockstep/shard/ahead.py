"""Gathers of compiled graphs that are started ahead: the next one travels while the graph computes with this one.

A graph starts a gather where it needs it.  Which one comes next is known from the step before; so the operator that
starts one also starts its successor, and finds it under way when the graph comes to it.  That needs no pass over the
graph, and holds for whatever the graph is cut into.  At most one is ahead.

Forward and backward have an order each.  A shard that was written to since (the optimizer) is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.agree.watch import Watch
from lockstep.engine.flight import Flight, Moment
from lockstep.shard.store import FlatStore


@dataclass
class Started:
    """A gather under way, and the state of the shards that it took."""

    buffer: Tensor
    flight: Flight | Any
    versions: list[int]


Start = Callable[[FlatStore], Started]


class GatherOrder:
    """The order in which one model's graphs gather, in one direction."""

    def __init__(self) -> None:
        self._successor: dict[FlatStore, FlatStore] = {}
        self._last: FlatStore | None = None
        self._ahead: dict[FlatStore, Started] = {}

    def take(self, store: FlatStore, versions: list[int], start: Start, watch: Watch, moment: Moment) -> Started:
        """The gather of ``store``, begun ahead or now; begins the one that will come after it."""
        started = self._ahead.pop(store, None)
        if started is not None and started.versions != versions:
            started.flight.land(watch, moment)
            started = None
        self.drop(watch, moment)  # begun for nothing: the order has changed
        if started is None:
            started = start(store)
        if self._last is not None:
            self._successor[self._last] = store
        self._last = store
        following = self._successor.get(store)
        if following is not None and following is not store:
            self._ahead[following] = start(following)
        return started

    def end(self) -> None:
        """What comes next begins anew."""
        self._last = None

    def drop(self, watch: Watch, moment: Moment) -> None:
        """Wait for what was begun and is not wanted."""
        for started in self._ahead.values():
            started.flight.land(watch, moment)
        self._ahead.clear()
