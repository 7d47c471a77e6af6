"""Graphs as the compiler and its passes see them."""

from __future__ import annotations

import torch

from lockstep import torch_private as private


def joint_graph(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.fx.Graph:
    """The graph of forward and backward, as passes get it."""
    seen: list[torch.fx.Graph] = []
    parts = private.aot_backend_parts(torch._dynamo.lookup_backend("aot_eager"))
    assert parts is not None
    partition = parts["partition_fn"]

    def look(module, *args, **kwargs):
        seen.append(module.graph)
        return partition(module, *args, **kwargs)

    torch.compile(model, backend=private.aot_backend({**parts, "partition_fn": look}))(*inputs).sum().backward()
    return seen[0]


def traced(function: object) -> torch.fx.Graph:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph.graph)
        return graph

    torch.compile(function, backend=backend)(torch.ones(2, 2))
    return graphs[0]
