"""Where launches stand in a program."""

from __future__ import annotations

import torch
from torch import fx

from lockstep.program.deliver import launch_early
from lockstep.program.products import _product_of


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


def test_a_gradient_that_others_read_is_not_made_in_its_bucket() -> None:
    """A product is moved into the buffer only if it is nothing but a gradient."""
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    products = [graph.call_function(torch.ops.aten.mm.default, (left, right)) for _ in range(4)]
    turned = graph.call_function(torch.ops.aten.t.default, (products[2],))
    twice = graph.call_function(
        torch.ops.aten.t.default, (graph.call_function(torch.ops.aten.t.default, (products[3],)),)
    )
    given = [products[0], products[1], turned, twice]
    launch = graph.call_function(torch.ops.lockstep.program_launch.default, (given, [], 0, 0))
    other = graph.call_function(torch.ops.aten.neg.default, (products[1],))
    graph.output([launch, other])
    assert [_product_of(node, launch) for node in given] == [products[0], None, None, products[3]]
