"""Gathers of compiled graphs that are started ahead: the next one travels while the graph computes with this one.

A graph starts a gather where it needs it.  Which one comes next is known from the step before; so the operator that
starts one also starts its successor, and finds it under way when the graph comes to it.  That needs no pass over the
graph, and holds for whatever the graph is cut into.  At most one is ahead.

Forwards, backwards and evaluations have an order each: what comes after the last unit of an evaluation is the first
one of the next, which is of no use to a step.  A shard that was written to since (the optimizer) is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.flight import Flight, Moment
from lockstep.shard.store import FlatStore


@dataclass
class Started:
    """A gather under way, and the state of the shards that it took."""

    buffer: Tensor
    flight: Flight | Any
    versions: list[int]
    watch: Watch
    moment: Moment

    def land(self) -> None:
        """Wait for it, where nobody wants it."""
        self.flight.land(self.watch, self.moment)


Start = Callable[[FlatStore], Started]


class GatherOrder:
    """The order in which one model's graphs gather, in one direction."""

    def __init__(self) -> None:
        self._successor: dict[FlatStore, FlatStore] = {}
        self._last: FlatStore | None = None
        self._ahead: dict[FlatStore, Started] = {}

    def take(self, store: FlatStore, versions: list[int], start: Start) -> Started:
        """The gather of ``store``, begun ahead or now; begins the one that will come after it."""
        started = self._ahead.pop(store, None)
        if started is not None and started.versions != versions:
            started.land()
            started = None
        self.drop()  # begun for nothing: the order has changed
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

    def unlearn(self) -> None:
        """Know no successor: those of this rank may not be those of the others."""
        self._successor.clear()

    def drop(self) -> None:
        """Wait for what was begun and is not wanted."""
        for started in self._ahead.values():
            started.land()
        self._ahead.clear()


class GatherOrders:
    """The orders of one model: in forwards of steps, in their backwards, in evaluations."""

    def __init__(self) -> None:
        self._forward, self._backward, self._evaluation = GatherOrder(), GatherOrder(), GatherOrder()

    def now(self, trains: bool, *, is_backward: bool | None = None) -> GatherOrder:
        """The order for the graph that is running (autograd knows which it is); another one has come to its end."""
        if torch_private.in_backward() if is_backward is None else is_backward:
            self._forward.end()
            return self._backward
        self._backward.end()
        if not trains:
            return self._evaluation
        self._evaluation.end()
        self._evaluation.drop()
        return self._forward

    def end(self) -> None:
        """A backward is over."""
        self._forward.end()
        self._backward.end()

    def forget(self) -> None:
        """Nothing is under way any more."""
        for order in (self._forward, self._backward, self._evaluation):
            order.drop()
            order.end()

    def begin_anew(self) -> None:
        """After an error, which ranks may have met at different places: all of them learn the orders again."""
        self.forget()
        for order in (self._forward, self._backward, self._evaluation):
            order.unlearn()
