"""The order and the moments of gradients, read off a forward graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lockstep.graph.pace import node_flops, pace_of, ready_order


class Backwards(nn.Module):
    """Declares its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 2), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def traced(module: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, dict[fx.Node, str]]:
    seen: list[tuple[fx.GraphModule, dict[fx.Node, str]]] = []
    names = {id(p): name for name, p in module.named_parameters()}

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        seen.append((gm, {n: names[id(g)] for n, g in zip(placeholders, given, strict=True) if id(g) in names}))
        return gm

    torch._dynamo.reset()
    torch.compile(module, backend=backend)(*inputs)
    return seen[0]


def test_order_is_that_of_use_not_of_declaration() -> None:
    gm, parameters = traced(Backwards(), torch.ones(3, 4))
    order = ready_order(gm, parameters)
    assert {"last.weight", "last.bias"} == set(order[:2])
    assert {"first.weight", "first.bias"} == set(order[2:])


def test_operations_are_counted_in_bodies_too() -> None:
    gm, _ = traced(Backwards(), torch.ones(3, 4))
    assert sum(node_flops(gm, node) for node in gm.graph.nodes) == 2 * 3 * 4 * 8 + 2 * 3 * 8 * 2


def test_moments_grow_to_the_end_of_the_backward() -> None:
    gm, parameters = traced(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4))
    pace = pace_of(gm, parameters, flops_per_second=1e3)
    assert pace.ready_seconds["1.weight"] == pace.backward_seconds / 2
    assert pace.ready_seconds["0.weight"] == pace.backward_seconds
    assert pace.backward_seconds > 0


def test_convolutions_and_attention() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x: Tensor, q: Tensor) -> Tensor:
            return self.conv(x).sum() + nn.functional.scaled_dot_product_attention(q, q, q).sum()

    gm, _ = traced(Both(), torch.ones(1, 2, 5, 5), torch.ones(1, 1, 6, 4))
    assert sum(node_flops(gm, node) for node in gm.graph.nodes) == 2 * 75 * 18 + 4 * 24 * 6
