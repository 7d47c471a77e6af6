"""Where launches stand in a program."""

from __future__ import annotations

import torch
from torch import fx

from lockstep.program.deliver import launch_early


def test_a_bucket_is_launched_where_its_last_gradient_is_made() -> None:
    """Not where the trace detaches all gradients, when the backward is over."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    early = graph.call_function(torch.ops.aten.neg.default, (given,))
    late = graph.call_function(torch.ops.aten.exp.default, (early,))
    detached = [graph.call_function(torch.ops.aten.detach.default, (node,)) for node in (early, late)]
    launches = [
        graph.call_function(torch.ops.lockstep.program_launch.default, ([node], [], 0, index))
        for index, node in enumerate(detached)
    ]
    graph.output(launches)
    module = fx.GraphModule({}, graph)
    launch_early(module)
    order = [node for node in module.graph.nodes if node.op == "call_function"]
    assert order[:4] == [early, launches[0], late, launches[1]]
    assert launches[0].args[0] == [early]
