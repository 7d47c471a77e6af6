"""The operators that compiled graphs call for a unit: they do what ``moments.py`` does where nothing is compiled.

    gather(home, key, ...) -> buffer                start gathering the shards of all ranks
    gathered(buffer, key, ...) -> flat              wait, and lay whole parameters one behind the other
    whole(home, key, ...) -> flat                   both, in a world of one
    parameters(flat, anchor, ...) -> parameters     its parts, in their shapes
    scatter(gradients, anchor) -> nothing much      the backward of the last one: the unit's gradients are there

All but ``parameters`` are opaque to the compiler, and what they do is decided when they run: whether this pass
synchronises, what the communication hook does, which process group it is.  So none of that needs another graph.

[Note: views in the graph]  ``parameters`` is there for autograd only, which must not add up a whole unit for every
parameter.  Below autograd it is plain views of one tensor, which cost nothing when the graph runs.

Its argument ``again`` changes nothing here.  It is the only trace in the graph of what traced.py marks to be gathered
again, and by which a cache can tell two graphs apart: marks are in no key, and a rank that found the other graph would
gather when its peers do not.

[Note: anchor]  Gradients do not go through autograd.  The parameters come from an operator of which autograd follows
only the anchor, a tensor of one element that each store has; its gradient is of no interest, but makes
autograd run ``scatter`` when the gradients of all parameters of the unit are there, and only in a backward that ends
in ``.grad``. The anchor also says which unit it is: one graph may serve all blocks of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.flight import Flight
from lockstep.engine.grads import accumulate
from lockstep.engine.states import Kind
from lockstep.observe.timeline import now
from lockstep.shard.ahead import Started
from lockstep.shard.layout import aligned
from lockstep.shard.own_gather import OwnStore
from lockstep.shard.root import Root, refuse_compiled_autograd, root_of
from lockstep.shard.store import FlatStore, spread_flat, start_gather
from lockstep.shard.unit import Unit

# A CUDA graph must not record what is decided anew in each step.
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)

_library = torch.library.Library("lockstep", "FRAGMENT")
_library.define(
    "gather(Tensor home, Tensor key, int num_elements, ScalarType dtype, bool trains) -> Tensor", tags=_TAGS
)
_library.define("gathered(Tensor buffer, Tensor key, int full_elements) -> Tensor", tags=_TAGS)
_library.define(
    "whole(Tensor home, Tensor key, int full_elements, ScalarType dtype, bool trains) -> Tensor", tags=_TAGS
)
_library.define("parameters(Tensor flat, Tensor anchor, int[] sizes, int[] ndims, bool again) -> Tensor[]", tags=_TAGS)
_library.define("scatter(Tensor?[] grads, Tensor anchor) -> Tensor", tags=_TAGS)

_stores: dict[int, tuple[weakref.ref[Unit], weakref.ref[FlatStore]]] = {}  # by the address of the anchor
_flights: dict[int, Flight] = {}  # by the address of the buffer


def make_known(unit: Unit) -> None:
    """Let the operators find the stores of a unit."""
    for address in [address for address, (_, store) in _stores.items() if store() is None]:
        del _stores[address]
    for store in unit.stores:
        if isinstance(store, OwnStore):
            continue  # such a unit is in no graph
        _stores[store.anchor.data_ptr()] = (weakref.ref(unit), weakref.ref(store))


def known_units() -> list[Unit]:
    """All units that graphs may gather."""
    units = [reference() for reference, _ in _stores.values()]
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def _find(anchor: Tensor) -> tuple[Unit, FlatStore]:
    found = _stores.get(anchor.data_ptr())
    unit, store = (None, None) if found is None else (found[0](), found[1]())
    if unit is None or store is None:
        raise RuntimeError("A compiled graph ran for a unit that is no longer there; compile the model again.")
    return unit, store


# ---------------------------------------------------------------- forward, and again in the backward


@torch.library.impl(_library, "gather", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _gather(home: Tensor, key: Tensor, num_elements: int, dtype: torch.dtype, trains: bool) -> Tensor:
    unit, store = _find(key)
    _note_forward(unit, store, trains)
    if store is unit.stores[0]:
        unit.gathers.note_in_graph()
    root = root_of(unit)
    order = root.orders.now(trains)
    begun = now()
    is_forward = trains and not torch_private.in_backward()
    started = order.take(store, unit.versions_of(store), partial(start_gathering, trains=is_forward))
    root.timeline.record("gather", begun, now(), unit.index)
    _flights[started.buffer.data_ptr()] = started.flight
    return started.buffer


def start_gathering(store: FlatStore, *, trains: bool) -> Started:
    """Start gathering a store; the one that a graph asked for, or the one after it."""
    unit, _ = _find(store.anchor)
    mine = store.shard().to(device=store.device, dtype=store.dtype, non_blocking=True)
    buffer = mine.new_empty(store.layout.num_elements)
    number = unit.stores.index(store)
    if unit.gather_log is not None:
        unit.gather_log.compare(unit, number, trains=trains)
    flight = start_gather(unit.links.gather, unit.gather_comm, buffer, mine, f"gather of {unit.name}")
    if unit.gather_log is not None:
        unit.gather_log.note(unit, number)
    return Started(buffer, flight, unit.versions_of(store), unit.links.gather.watch, unit.moment)


@torch.library.impl(_library, "gathered", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _gathered(buffer: Tensor, key: Tensor, full_elements: int) -> Tensor:
    unit, store = _find(key)
    flight = _flights.pop(buffer.data_ptr(), None)
    if flight is not None:
        begun = now()
        flight.land(unit.links.gather.watch, unit.moment)
        root_of(unit).timeline.record("gathered", begun, now(), unit.index)
    flat = buffer.new_empty(full_elements)
    spread_flat(store.layout, buffer, flat)
    return flat


@torch.library.impl(_library, "whole", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _whole(home: Tensor, key: Tensor, full_elements: int, dtype: torch.dtype, trains: bool) -> Tensor:
    unit, store = _find(key)
    _note_forward(unit, store, trains)
    if store is unit.stores[0]:
        unit.gathers.note_in_graph()
    return store.shard().to(device=store.device, dtype=dtype, copy=True)  # the graph may write to what it is given


def _note_forward(unit: Unit, store: FlatStore, trains: bool) -> None:
    root = root_of(unit)
    if trains and not torch_private.in_backward():
        _compare_with_graph(root, store)
        root.attendance.note_forward()
        store.deliveries.note_forward(root.attendance.is_idle)
        for step in root.steps:
            if not step.has_forward:
                root.follow_replaced()
                root.note_forward()
                break
    elif root.teams and unit is root.teams[0].units[0] and not torch_private.in_backward():
        root.follow_replaced()


def _compare_with_graph(root: Root, store: FlatStore) -> None:
    """A graph computes gradients for what trained when it was traced; say so if more does now, before it runs."""
    if store.flags() == store.trains:
        return
    more = []
    stores = [s for unit in root.units for s in unit.stores if isinstance(s, FlatStore)]
    for other in stores:  # one call more is enough for all of them
        flags = other.flags()
        pairs = zip(other.parameters, flags, other.trains, strict=True)
        more += [parameter.name for parameter, now, then in pairs if now and not then]
        other.trains = flags  # which the compiler guards on: it makes another graph the next time
    if more:
        raise RuntimeError(
            f"These parameters train now, and did not when the model was compiled: {', '.join(more)}. Call the model "
            "once more: it is compiled anew for them."
        )


@torch.library.register_fake("lockstep::gather", lib=_library)
def _fake_gather(home: Tensor, key: Tensor, num_elements: int, dtype: torch.dtype, trains: bool) -> Tensor:
    return torch.empty(num_elements, dtype=dtype, device=key.device)


@torch.library.register_fake("lockstep::gathered", lib=_library)
def _fake_gathered(buffer: Tensor, key: Tensor, full_elements: int) -> Tensor:
    return buffer.new_empty(full_elements)


@torch.library.register_fake("lockstep::whole", lib=_library)
def _fake_whole(home: Tensor, key: Tensor, full_elements: int, dtype: torch.dtype, trains: bool) -> Tensor:
    return torch.empty(full_elements, dtype=dtype, device=key.device)


# ---------------------------------------------------------------- parameters, and the backward


def views_of(flat: Tensor, sizes: Sequence[int], ndims: Sequence[int]) -> list[Tensor]:
    """The parameters in a flat buffer, whose shapes are written one behind the other."""
    views, start, offset = [], 0, 0
    for ndim in ndims:
        shape = list(sizes[start : start + ndim])
        num_elements = prod(shape)
        views.append(flat.narrow(0, offset, num_elements).view(shape))
        start += ndim
        offset += aligned(num_elements)
    return views


class _Parameters(torch.autograd.Function):
    """See [Note: views in the graph] and [Note: anchor]."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, anchor: Tensor, sizes: list[int], ndims: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)
        return tuple(views_of(flat, sizes, ndims))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        (anchor,) = ctx.saved_tensors
        # As they are packed; where that is a copy, it becomes part of the kernel that computes them.
        dense = [None if g is None else g.contiguous() for g in gradients]
        return None, torch.ops.lockstep.scatter(dense, anchor), None, None


@torch.library.impl(_library, "parameters", "Autograd")
def _parameters(flat: Tensor, anchor: Tensor, sizes: list[int], ndims: list[int], again: bool) -> list[Tensor]:
    if torch.is_grad_enabled() and anchor.requires_grad:
        return list(_Parameters.apply(flat, anchor, sizes, ndims))
    return views_of(flat, sizes, ndims)


@torch.library.impl(_library, "parameters", "CompositeExplicitAutograd")
def _parameters_without_autograd(
    flat: Tensor, anchor: Tensor, sizes: list[int], ndims: list[int], again: bool
) -> list[Tensor]:
    return [view.clone() for view in views_of(flat, sizes, ndims)]  # an operator must not return views


@torch.library.register_fake("lockstep::scatter", lib=_library)
def _fake_scatter(grads: list[Tensor | None], anchor: Tensor) -> Tensor:
    return torch.empty_like(anchor)


@torch.library.impl(_library, "scatter", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _scatter(grads: list[Tensor | None], anchor: Tensor) -> Tensor:
    refuse_compiled_autograd()
    unit, store = _find(anchor)
    root = root_of(unit)
    accumulator = store.accumulator()
    if accumulator is not None and torch_private.engine_will_run(accumulator):  # not torch.autograd.grad
        _deliver(root, unit, store, grads)
    return torch.zeros_like(anchor)


def _deliver(root: Root, unit: Unit, store: FlatStore, gradients: Sequence[Tensor | None]) -> None:
    team = root.team_of(unit)
    step = team.step
    with step.lane.lock:
        root.note_backward()
        slots, coming, all_slots = team.delivered_by(store, gradients)
        if not slots:
            return
        if not step.is_in_pass:
            step.lane.begin(step)
        bucket = slots[0].bucket
        num_due, is_idle = store.deliveries.come(root.attendance.is_idle)
        if is_idle:  # see uneven.py, [Note: zeros]
            coming = [torch.zeros_like(gradient) for gradient in coming]
        if not step.syncs or bucket.has_left or step.kind is Kind.FOLLOW_UP:
            for slot, gradient in zip(slots, coming, strict=True):
                accumulate(slot, gradient)
                step.intake.deliver(slot)
            return
        step.intake.flush_deferred()
        try:
            if num_due == 1 and step.intake.take_whole(bucket, slots, coming):
                return
            if bucket.num_due == 0:
                for _ in range(num_due):
                    # All of its parameters: see calls.py, [Note: a unit leaves with its backward].
                    step.intake.expect_delivery(bucket, all_slots)
            step.intake.take_delivery(bucket, slots, coming)
        except Exception as error:
            step.tell_peers(error)
            raise


for _name, _function in (("gather", _gather), ("gathered", _gathered), ("whole", _whole), ("scatter", _scatter)):
    torch_private.call_directly(getattr(torch.ops.lockstep, _name).default, _function)
