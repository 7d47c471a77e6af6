"""A sharded model in programs of the whole step: what their operators do when a program runs.

    program_gather(shards, after, store, again) -> flat, token    the whole parameters of a store, in one tensor
    program_launch, program_collect                               gradients out, shards of the means back (deliver.py)
    program_sum(value, after) -> sum                              one number of each rank, added up over all shards

All are opaque to the compiler.  They use the links, the order of gathers, the step and the watch that the loop uses, so
that a rank that is late is named with the unit or the bucket that the others wait for.

[Note: one order]  Collectives of one group are paired by the order in which ranks issue them, and a compiler may order
independent operators as it likes; where shards are uneven, not alike on all ranks.  A rank that gathers first and one
that scatters first could wait for each other.  So each of these operators takes a token of the one before it.

[Note: shards that share memory]  All shards of a store lie in one buffer.  A program is traced and compiled for tensors
that share none: they do not overlap, and the compiler need not know.

[Note: uneven parts]  What ``program_collect`` gives is one buffer for each bucket, of which a program takes the parts.
Where they have other sizes on other ranks it gives them one by one, copied: so all ranks make the same program.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.step import SyncStep
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import now
from lockstep.program.deliver import THE_SHARDS, Delivery, let_in
from lockstep.program.shard_reasons import why_not_now
from lockstep.shard.graph_ops import start_gathering
from lockstep.shard.root import Root, root_of
from lockstep.shard.store import FlatStore, spread_flat
from lockstep.shard.team import Team
from lockstep.shard.unit import Unit

_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
_library = torch.library.Library("lockstep", "FRAGMENT")
_library.define(
    "program_gather(Tensor[] shards, Tensor[] after, int store, bool again) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define("program_sum(Tensor value, Tensor[] after) -> Tensor", tags=_TAGS)

# The model of the step that runs: a program may have been made by another process, and names none.
_running: list[weakref.ref[Shards]] = []


class Shards:
    """The sharded model of one train step, as its programs know it."""

    serial = THE_SHARDS

    def __init__(self, module: Any) -> None:
        self._unit: Unit = module._lockstep_unit
        self._delivery: Delivery | None = None
        self._stores: list[tuple[Unit, FlatStore]] = []  # of the program that runs
        self._wholes: dict[int, Any] = {}  # parameters, by ``id`` of their shards; since the step began

    @property
    def root(self) -> Root:
        return root_of(self._unit)

    @property
    def team(self) -> Team:
        return self.root.teams[0]

    @property
    def step(self) -> SyncStep:
        return self.team.step

    @property
    def is_needed(self) -> bool:
        """Whether anything is to be sent: not by a rank that is alone."""
        return not self._unit.mesh.is_alone

    @property
    def stores(self) -> list[tuple[Unit, FlatStore]]:
        """By the number that they have in programs."""
        return [(unit, store) for unit in self.root.units for store in unit.stores if isinstance(store, FlatStore)]

    def key(self) -> Hashable:
        """What a program was made for, and does not ask again; not what ``plan`` says."""
        return tuple([(unit.gathers_again, unit.frees_after_forward, unit.divisor) for unit in self.root.units])

    @property
    def plan(self) -> Any:
        return self.step.reducer.plan

    # ---------------------------------------------------------------- before a program, or the loop

    def prepare(self) -> str:
        """Let the plan and the memory be those of the step to come; returns why it cannot be a program, if so."""
        root = self.root
        self._wholes = {}
        for unit in root.units:
            unit.reshard()
        for _, store in self.stores:
            store.follow()
        root.note_forward()
        return why_not_now(root)

    def whole_of(self, sharded: Tensor) -> Tensor:
        """The whole parameter of a shard, as an object: its memory comes and goes."""
        if not self._wholes:
            self._wholes = {id(p.sharded): p.full for unit in self.root.units for p in unit.parameters}
        whole = self._wholes.get(id(sharded))
        return sharded if whole is None else whole  # one that is not sharded adds up in itself

    def dropped(self) -> set[int]:
        """Parameters (by ``id``) of which nothing waits for a reduction any more: ``zero_grad()`` was called."""
        return {id(slot.leaf) for slot in self.step.reducer.slots if not slot.dirty}

    @property
    def is_whole(self) -> bool:
        """Whether a unit has its whole parameters in the place of shards just now."""
        return any(unit.is_full for unit in self.root.units)

    @property
    def is_joining(self) -> bool:
        """Whether ranks may run out of data: inside ``join()``."""
        return self.root.attendance.is_joining

    def note_local(self, parameters: set[int]) -> None:
        """Gradients of these (by ``id``) lie with the whole parameters now, for the loop to reduce."""
        for slot in self.step.reducer.slots:
            slot.dirty = slot.dirty or id(slot.leaf) in parameters

    def enter(self) -> None:
        """Before a program is made or run: its operators come here."""
        if self._delivery is None or self._delivery.step is not self.step:
            self._delivery = Delivery(self.step)
        self._stores = self.stores
        let_in(self.serial, self)
        _running[:] = [weakref.ref(self)]

    def begin(self) -> None:
        """A program is about to run."""
        if listeners:
            reached(StepMoment.FORWARD, self.root.timeline.step, subject=self.step.reducer)

    def end(self) -> None:
        """A program has run: the shards have been written to, whatever their tensors count."""
        self.root.orders.forget()
        self.step.num_writes += 1

    # ---------------------------------------------------------------- while it runs

    def gather(self, number: int, *, again: bool) -> Tensor:
        """The whole parameters of a store, one behind the other; the gather after this one begins with it."""
        unit, store = self._stores[number]
        if store is unit.stores[0]:
            unit.gathers.note_in_program(again=again)
        root, watch = self.root, unit.links.gather.watch
        begun = now()
        order = root.orders.now(True, is_backward=again)
        started = order.take(store, unit.versions_of(store), partial(start_gathering, trains=not again))
        root.timeline.record("gather", begun, now(), unit.index)
        begun = now()
        started.flight.land(watch, unit.moment)
        root.timeline.record("gathered", begun, now(), unit.index)
        flat = self.empty_flat(number)
        with torch.no_grad():
            spread_flat(store.layout, started.buffer, flat)
        return flat

    def empty_flat(self, number: int) -> Tensor:
        """What ``program_gather`` returns, without content."""
        _, store = self._stores[number]
        return torch.empty(store.layout.full_elements, dtype=store.dtype, device=store.device)

    def launch(self, index: int, gradients: Sequence[Tensor]) -> None:
        """Take the whole gradients of a bucket; it leaves when those before it have."""
        assert self._delivery is not None
        self._delivery.launch(index, gradients)

    def collect(self) -> list[Tensor]:
        """End the window; this rank's shards of the mean gradients.  See [Note: uneven parts]."""
        assert self._delivery is not None
        flats = self._delivery.collect()
        pairs = zip(flats, self.team.memory.loads, strict=True)
        rank = self._unit.mesh.rank
        parts = [(flat, cut.shard(rank)) for flat, load in pairs for cut in load.layout.cuts if not cut.is_even]
        return [*flats, *(torch_private.alias(flat, *place).clone() for flat, place in parts)]

    def empty_flats(self) -> list[Tensor]:
        """What ``program_collect`` returns, without content."""
        reducer, rank = self.step.reducer, self._unit.mesh.rank
        pairs = list(zip(reducer.buckets, self.team.memory.loads, strict=True))
        flats = [
            torch.empty(load.layout.shard_elements, dtype=reducer.memory.travel_dtype(bucket), device=load.unit.device)
            for bucket, load in pairs
        ]
        cuts = [(flat, cut) for flat, (_, load) in zip(flats, pairs, strict=True) for cut in load.layout.cuts]
        return [*flats, *(flat.new_empty(cut.shard_shape(rank)) for flat, cut in cuts if not cut.is_even)]

    def parts_of(self, collected: Sequence[Tensor]) -> dict[int, Tensor]:
        """In a trace: the gradients in what ``program_collect`` gave, by ``id`` of their parameter."""
        buckets, loads, found = self.step.reducer.buckets, self.team.memory.loads, {}
        one_by_one = iter(collected[len(buckets) :])
        for bucket, load, flat in zip(buckets, loads, collected[: len(buckets)], strict=True):
            for slot, cut in zip(bucket.slots, load.layout.cuts, strict=True):
                part = flat.as_strided(*cut.shard(self._unit.mesh.rank)) if cut.is_even else next(one_by_one)
                found[id(slot.leaf)] = part.to(slot.leaf.dtype)
        return found

    def sum(self, value: Tensor) -> Tensor:
        """Add a number up over the ranks that have one shard each."""
        transport, total = self.team.units[0].links.scatter, value.clone()
        flight = transport.start_all_reduce(total, mean=False, name="norm of gradients")
        transport.land(flight, f"the norm of all gradients in step {self.step.num_windows - 1}")
        return total


def keep_order(graph: Any) -> None:
    """Let these operators follow each other as they do in the graph; see [Note: one order]."""
    operators = torch.ops.lockstep
    gather, launch = operators.program_gather.default, operators.program_launch.default
    collect, add_up = operators.program_collect.default, operators.program_sum.default
    token: Any = None
    for node in list(graph.graph.nodes):
        if node.target not in (gather, launch, collect, add_up):
            continue
        if token is not None:
            place = 0 if node.target is collect else 1  # where it takes what it must follow
            taken = [*node.args[place], token] if token not in node.args[place] else node.args[place]
            node.args = (*node.args[:place], taken, *node.args[place + 1 :])
        if node.target is gather:
            with graph.graph.inserting_after(node):
                token = graph.graph.call_function(operator.getitem, (node, 1))
        elif node.target is not collect:  # what follows that one needs its results
            token = node
    graph.recompile()


def _current() -> Shards:
    found = _running[0]() if _running else None
    if found is None:
        raise RuntimeError("A program of a sharded model ran without the step that it belongs to.")
    return found


@torch.library.impl(_library, "program_gather", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _gather(shards: list[Tensor], after: list[Tensor], store: int, again: bool) -> tuple[Tensor, Tensor]:
    flat = _current().gather(store, again=again)
    return flat, flat.new_empty(0)


@torch.library.impl(_library, "program_sum", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _sum(value: Tensor, after: list[Tensor]) -> Tensor:
    return _current().sum(value)


@torch.library.register_fake("lockstep::program_gather", lib=_library)
def _fake_gather(shards: list[Tensor], after: list[Tensor], store: int, again: bool) -> tuple[Tensor, Tensor]:
    flat = _current().empty_flat(store)
    return flat, flat.new_empty(0)


@torch.library.register_fake("lockstep::program_sum", lib=_library)
def _fake_sum(value: Tensor, after: list[Tensor]) -> Tensor:
    return torch.empty_like(value)
