"""The pace of a backward, read off the forward graph: in which order gradients become ready, and about when.

Floating point operations are counted per node of the graph that dynamo traced; the backward runs the nodes in reverse
and takes about twice as long for each.  A parameter's gradient is ready when the first node that uses it (in the order
of the forward) has run backward.  It is an estimate, for choosing bucket sizes before anything has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.plan.overlap import Pace

# How much of the speed of a large matrix product a model reaches, over all of its operations.
_EFFICIENCY = 0.5


def first_uses(gm: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> dict[str, int]:
    """For each parameter, given by its placeholder: the position of the first node that uses it."""
    positions: dict[str, int] = {}
    for position, node in enumerate(gm.graph.nodes):
        for argument in node.all_input_nodes:
            name = parameters.get(argument)
            if name is not None and node.op != "output":
                positions.setdefault(name, position)
    return positions


def pace_of(gm: fx.GraphModule, parameters: Mapping[fx.Node, str], flops_per_second: float) -> Pace:
    """When each parameter's gradient will be ready, in seconds from the start of the backward."""
    costs = [node_flops(gm, node) for node in gm.graph.nodes]
    total = sum(costs) or 1.0
    backward_seconds = 2 * total / (flops_per_second * _EFFICIENCY)
    # What lies at and behind each position, which is what the backward has done when it has passed it.
    done, passed = [0.0] * (len(costs) + 1), 0.0
    for position in range(len(costs) - 1, -1, -1):
        passed += costs[position]
        done[position] = passed
    ready = {name: backward_seconds * done[position] / total for name, position in first_uses(gm, parameters).items()}
    return Pace(ready, backward_seconds)


def ready_order(gm: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> list[str]:
    """The names in the order their gradients become ready."""
    uses = first_uses(gm, parameters)
    return sorted(uses, key=uses.__getitem__, reverse=True)


def node_flops(gm: fx.GraphModule, node: fx.Node) -> float:
    """Multiplications and additions of a node that is mostly those; 0 for others."""
    result = node.meta.get("example_value")
    inner = sum(_flops_of_body(gm, argument) for argument in node.all_input_nodes if argument.op == "get_attr")
    name = getattr(node.target, "__name__", str(node.target))
    tensors = [_value(argument) for argument in _flat(node.args) if isinstance(_value(argument), Tensor)]
    if not isinstance(result, Tensor) or len(tensors) < 2:
        return inner
    sizes = [[torch_private.size_hint(n) for n in t.shape] for t in tensors]
    out = float(prod(torch_private.size_hint(n) for n in result.shape))
    if "conv" in name and len(sizes[1]) > 2:
        return inner + 2 * out * prod(sizes[1][1:])
    if name == "linear":
        return inner + 2 * out * sizes[1][-1]
    if name in ("addmm", "baddbmm") and len(sizes) > 2:
        return inner + 2 * out * sizes[1][-1]
    if name in ("matmul", "mm", "bmm", "__matmul__", "einsum") and sizes[0]:
        return inner + 2 * out * sizes[0][-1]
    if "attention" in name and len(sizes) > 2 and len(sizes[1]) > 1:
        return inner + 4 * out * sizes[1][-2]
    return inner


def _flops_of_body(gm: fx.GraphModule, node: fx.Node) -> float:
    """Of the body of a higher-order operator (a checkpointed block, say)."""
    body = getattr(gm, str(node.target), None)
    if not isinstance(body, fx.GraphModule):
        return 0.0
    return sum(node_flops(body, inner) for inner in body.graph.nodes)


def _value(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def _flat(arguments: Iterable[Any]) -> Iterable[Any]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _flat(argument)
        else:
            yield argument


def measure_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """How fast this device multiplies matrices: a few tens of milliseconds of it."""
    size = 512 if device.type == "cpu" else 4096
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(4):
            _synchronize(device)
            begin = perf_counter()
            torch.mm(a, b)
            _synchronize(device)
            best = min(best, perf_counter() - begin)
    return 2.0 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
