"""A unit's forward as a compiler sees it: gathers in the graph, and its modules run on what was gathered.

The compiler inlines this.  Parameters are set on the modules for as long as the forward is traced; whatever this
touches becomes a guard of the graph, so it touches tensors, and tuples of numbers and names, and no objects that differ
from block to block.

[Note: gathered again]  For a unit that is freed after its forward, the nodes of the gathering are marked as ones to
make again in the backward, instead of keeping what they made: the mark that activation checkpointing leaves in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from lockstep import torch_private
from lockstep.shard.graph_ops import known_units, views_of
from lockstep.shard.nest import cast_floats
from lockstep.shard.reads import note_reads_in_trace

Paths = tuple[tuple[tuple[str, ...], tuple[tuple[str, int, int], ...]], ...]
Place = tuple[nn.Module, Any]  # who had which parameters


def traced_call(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``call`` with the module's parameters gathered."""
    unit = module._lockstep_unit
    policy = unit.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floats(policy.param_dtype, args), cast_floats(policy.param_dtype, kwargs)
    torch_private.on_graph_so_far(_watch_for_reads)
    gathered = [_gather_store(store, unit.gathers_again) for store in unit.stores]
    places = torch_private.with_effects_in_trace(_put, module, unit, gathered)
    try:
        output = call(*args, **kwargs)
    finally:
        torch_private.with_effects_in_trace(_put_back, places)
    if policy.output_dtype is not None:
        output = cast_floats(policy.output_dtype, output)
    return output


def _gather_store(store: Any, again: bool) -> list[Tensor]:
    trains = torch.is_grad_enabled()
    num_elements, full_elements, dtype, sizes, ndims = store.graph_facts
    anchor = store.anchor if True in store.trains else store.key
    operators = torch.ops.lockstep
    if num_elements == 0:
        flat = operators.whole(store.home, store.key, full_elements, dtype, trains)
    else:
        buffer = operators.gather(store.home, store.key, num_elements, dtype, trains)
        flat = operators.gathered(buffer, store.key, full_elements)
    if not trains:
        return views_of(flat, sizes, ndims)
    parameters = operators.parameters(flat, anchor, sizes, ndims, again)
    if again:
        torch_private.on_graph_so_far(_mark_last_gather)
    return parameters


# ---------------------------------------------------------------- parameters for the time of a forward


def _put(module: Any, unit: Any, gathered: list[list[Tensor]]) -> list[Place]:
    """Let the modules have whole parameters; returns what they had.

    Each is given another dict of them, and its own back: the compiler guards on all of a DTensor that it meets.
    """
    places: list[Place] = []
    for path, own in module._lockstep_paths:
        owner = _at(module, path)
        before = owner._parameters
        mine = {}
        for name, number, position in own:
            tensor = gathered[number][position]
            mine[name] = tensor if unit.stores[number].trains[position] else tensor.detach()
        whole = {}
        for name in before:  # in the order in which a program goes through them
            whole[name] = mine[name] if name in mine else before[name]
        for name in mine:
            if name not in whole:
                whole[name] = mine[name]
        places.append((owner, before))
        object.__setattr__(owner, "_parameters", whole)
    return places


def _put_back(places: list[Place]) -> None:
    for owner, before in places:
        object.__setattr__(owner, "_parameters", before)


def _at(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module


# ---------------------------------------------------------------- while it is traced


def _watch_for_reads(context: Any) -> None:
    note_reads_in_trace(known_units)


def _mark_last_gather(context: Any) -> None:
    """See [Note: gathered again]."""
    operators = torch.ops.lockstep
    chain = (operators.parameters, operators.gathered, operators.gather, operators.whole)
    for node in reversed(context.graph().nodes):
        if node.target is operators.parameters:
            marked = [*node.users, node]
            while marked[-1].target in chain and (
                source := next((found for found in marked[-1].all_input_nodes if found.target in chain), None)
            ):
                marked.append(source)
            for found in marked:
                found.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            return
