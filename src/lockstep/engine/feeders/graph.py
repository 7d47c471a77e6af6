"""Compiled graphs: a backward delivers gradients bucket by bucket, while it still runs.

    forward    Region.__call__    remembers the autograd node of this run: it will deliver when the backward comes to it
    backward   deliver(...)       the operator ``launch``: gradients go into the bucket, which leaves when it is whole
               withhold(...)      when the node has run: autograd is not given what was delivered

[Note: whole]  A bucket may leave inside the graph when all of its gradient is there.  How often a graph will deliver in
this backward is not guessed: every run of a compiled region in a forward has a node of autograd's graph, and the engine
says whether it comes to that node.  A run whose backward never comes, a recomputation inside a checkpoint, a second
forward: all are counted as what they are.

[Note: withheld]  Autograd is told that there is no gradient for a parameter whose gradient was delivered.  So what it
does put into ``.grad`` came from elsewhere (a use of the parameter outside of every graph), and is known as such: it
is folded in while the bucket is here, and reduced by itself when it has left (step.py, [Note: what comes late]).

[Note: handed on]  Where a gradient cannot be taken, it is handed to autograd like any other, and the hooks bring it:
in a pass that does not synchronise, under ``torch.autograd.grad``, for parameters with hooks of their own (which must
see the local gradient), and so on; ``_why_not`` has the list.  It only leaves later; what is sent is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot, in_memory_order
from lockstep.engine.registry import slot_of
from lockstep.engine.states import Kind
from lockstep.engine.step import SyncStep, will_accumulate

_parameter_of, _requires_grad = attrgetter("parameter"), attrgetter("parameter.requires_grad")
_accumulator_of = attrgetter("accumulator")
_RUN = "lockstep run"  # in the metadata of an autograd node


@dataclass(eq=False)
class Part:
    """Parameters of one bucket that one graph delivers together."""

    step: weakref.ref[SyncStep]
    bucket: LiveBucket
    slots: list[Slot]
    members: list[int]  # which of the group's gradients these are
    positions: list[int]  # where autograd would get them, among the node's results


class Run:
    """One run of a compiled region in a forward, with what its backward will deliver."""

    __slots__ = ("__weakref__", "delivered", "node", "parts")

    def __init__(self, node: Any, parts: list[list[Part]]) -> None:
        self.node = weakref.ref(node)
        self.parts = parts  # of each group
        self.delivered: list[int] = []


_runs: weakref.WeakKeyDictionary[SyncStep, weakref.WeakSet[Run]] = weakref.WeakKeyDictionary()


class Region:
    """A compiled graph that launches: what stands between the compiler and the graph it made."""

    def __init__(self, compiled: Callable[..., Any], groups: Sequence[Sequence[int]]) -> None:
        self._compiled = compiled
        self._groups = groups  # which of its inputs are parameters whose gradients it delivers together
        self._first = next((group[0] for group in groups if group), None)
        self._parts: dict[int, tuple[Slot, LiveBucket, list[list[Part]]]] = {}

    def __call__(self, *args: Any) -> Any:
        outputs = self._compiled(*args)
        if self._first is not None and torch.is_grad_enabled():
            self._note_run(args[self._first], args, outputs)
        return outputs

    def _note_run(self, first: Tensor, args: Sequence[Any], outputs: Any) -> None:
        node = _node_behind(outputs)
        if node is None:
            return
        key, cached = id(first), None
        found = slot_of(first)
        entry = self._parts.get(key)
        # A plan in another order has other buckets for the same slots.
        if entry is not None and found is not None and entry[0] is found[1] and entry[1] is found[1].bucket:
            cached = entry[2]
        if cached is None:
            cached = _resolve(self._groups, args, node)
            if found is not None:
                self._parts[key] = (found[1], found[1].bucket, cached)
        run = Run(node, cached)
        torch_private.node_metadata(node)[_RUN] = run
        node.register_hook(partial(_withhold, run))
        for step in {step for parts in cached for part in parts if (step := part.step()) is not None}:
            _runs.setdefault(step, weakref.WeakSet()).add(run)


def _node_behind(outputs: Any) -> Any:
    """The node of this run in autograd's graph: behind the outputs, and not an earlier run's."""
    for output in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
        node = output.grad_fn if isinstance(output, Tensor) else None
        while node is not None and not torch_private.is_compiled_node(node):
            following = [n for n, _ in node.next_functions if n is not None]
            node = following[0] if len(following) == 1 else None  # outputs that are views are made outside of it
        if node is not None and _RUN not in torch_private.node_metadata(node):
            return node
    return None


def _resolve(groups: Sequence[Sequence[int]], args: Sequence[Any], node: Any) -> list[list[Part]]:
    """Which buckets the groups of a graph belong to, for the parameters of this run.

    One graph serves all modules of the same kind, so its groups need not be whole buckets.
    """
    positions = torch_private.accumulation_positions(node)
    resolved: list[list[Part]] = []
    for group in groups:
        parts: dict[LiveBucket, Part] = {}
        for member, index in enumerate(group):
            found = slot_of(args[index])
            position = positions.get(id(args[index]))
            if found is None or position is None:
                parts.clear()
                break
            step, slot = found
            part = parts.setdefault(slot.bucket, Part(weakref.ref(step), slot.bucket, [], [], []))
            part.slots.append(slot)
            part.members.append(member)
            part.positions.append(position)
        resolved.append(list(parts.values()))
    return resolved


# ---------------------------------------------------------------- in the backward


def deliver(gradients: Sequence[Tensor], parameters: Sequence[Tensor], group: int) -> Tensor:
    """The operator ``launch``: take these gradients, or make one buffer of them for autograd; returns a buffer."""
    node = torch_private.current_node()
    run: Run | None = torch_private.node_metadata(node).get(_RUN) if node is not None else None
    parts = run.parts[group] if run is not None else ()
    if run is None or not parts:
        return pack(gradients, parameters)
    taken = [_deliver_part(part, gradients) for part in parts]
    for part, is_taken in zip(parts, taken, strict=True):
        if is_taken:
            run.delivered += part.positions
    if all(taken):
        return _placeholder(parts, parameters)
    flat = pack(gradients, parameters)
    for step in {step for part in parts if (step := part.step()) is not None}:
        step.intake.hand_on(flat)
    return flat


def _placeholder(parts: Sequence[Part], parameters: Sequence[Tensor]) -> Tensor:
    """Something of the size that the graph expects; nobody reads it, since autograd is not given its parts."""
    flat = parts[0].bucket.flat
    num_elements = sum(map(Tensor.numel, parameters))
    if flat is not None and flat.dtype is parameters[0].dtype and flat.numel() >= num_elements and not flat.is_sparse:
        return torch_private.alias(flat, (num_elements,), (1,), 0)
    return parameters[0].new_empty(num_elements)


def _deliver_part(part: Part, gradients: Sequence[Tensor]) -> bool:
    step = part.step()
    if step is None:
        return False
    with step.lane.lock:
        if not will_accumulate(part.slots[0]):
            return False  # torch.autograd.grad
        if not step.is_in_pass:
            step.lane.begin(step)
        if not step.syncs:
            return False
        step.intake.flush_deferred()
        _expect_all(step)
        mine = gradients if len(part.members) == len(gradients) else [gradients[member] for member in part.members]
        why = _why_not(step, part, mine)
        try:
            if why:
                step.intake.leave_delivery(part.bucket, part.slots, why)
                return False
            part.bucket.left_because = ""
            step.intake.take_delivery(part.bucket, part.slots, mine)
            return True
        except Exception as error:
            step.tell_peers(error)
            raise


def _expect_all(step: SyncStep) -> None:
    """Once per backward: count what the runs that it comes to will deliver; see [Note: whole]."""
    task = torch_private.graph_task_id()
    if task in step.intake.expected_tasks:
        return
    step.intake.expected_tasks.add(task)
    if step.kind is Kind.FOLLOW_UP:
        return
    current = torch_private.current_node()
    for run in _runs.get(step, ()):
        node = run.node()
        # The engine does not count the node it began with: a loss that the graph itself computes.
        if node is not None and (node is current or torch_private.engine_will_run(node)):
            for parts in run.parts:
                for part in parts:
                    if part.step() is step:
                        step.intake.expect_delivery(part.bucket, part.slots)


def _why_not(step: SyncStep, part: Part, gradients: Sequence[Tensor]) -> str:
    """Why these gradients are handed to autograd; empty if they are taken.  See [Note: handed on]."""
    bucket, memory = part.bucket, step.reducer.memory
    if bucket.has_left:
        return "it had left already when this gradient came"
    if step.kind is Kind.FOLLOW_UP:
        return "no forward ran since the last reduction"
    if memory.is_shared:
        return "another wrapper reduces it too"
    if memory.reduce_dtype is not None:
        return "native mixed precision reduces in another dtype"
    if step.closing.union.control is None and step.reducer.world > 1:
        return "ranks of this group cannot tell each other what comes late"
    if step.static.is_on and not step.static.fires_once(part.slots):
        return "static_graph=True is still learning, or it is used several times"
    if step.intake.context_gradients is not None or torch_private.current_dist_autograd_context() is not None:
        return "distributed autograd keeps gradients elsewhere"
    if not memory.can_fold(part.slots):
        return "what lies in .grad cannot be added to it"
    parameters = list(map(_parameter_of, part.slots))
    if not torch_private.only_hooks_are_ours(parameters):
        return "hooks of your own look at its gradient"
    if not _will_accumulate_all(part.slots):
        return "this backward leaves some of its parameters out"
    return ""


def _will_accumulate_all(slots: Sequence[Slot]) -> bool:
    """Whether this backward ends in ``.grad`` of all of them; not of those that were frozen since the forward."""
    if not all(map(_requires_grad, slots)):
        return False
    nodes = list(map(_accumulator_of, slots))
    return (None not in nodes and torch_private.will_run_all(nodes)) or all(map(will_accumulate, slots))


@torch_private.leave_to_python
def _withhold(run: Run, results: tuple[Any, ...], _: object) -> tuple[Any, ...] | None:
    """When the node has run: take out of its results what was delivered; see [Note: withheld]."""
    if torch.compiler.is_dynamo_compiling():
        return None  # compiled autograd runs the graph without its node: nothing is delivered there
    delivered, run.delivered = run.delivered, []
    if not delivered:
        return None
    kept = list(results)
    for position in delivered:
        kept[position] = None
    return tuple(kept)


def pack(gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """One flat buffer with each gradient in its parameter's memory order."""
    return torch.cat(
        [in_memory_order(g.to(p.dtype), p.shape, p.stride()) for g, p in zip(gradients, parameters, strict=True)]
    )
