"""Nodes of traced graphs: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch
from tracing import joint_graph, traced

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_gradient_positions() -> None:
    graph = joint_graph(torch.nn.Linear(3, 2), torch.ones(1, 3))
    inputs, positions = private.plain_inputs(graph), private.gradient_positions(graph.output_node())
    shapes = {tuple(inputs[index].meta["val"].shape) for index in positions}
    assert shapes == {(2, 3), (2,)}
    results = graph.output_node().args[0]
    assert all(results[at].meta["val"].shape == inputs[index].meta["val"].shape for index, at in positions.items())


test_plain_inputs = test_gradient_positions


def test_inputs_changed() -> None:
    class Renormalises(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rest = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.detach().clamp_(0, 1)
            return (x @ self.table.t()).sum() + self.rest.sum()

    graph = joint_graph(Renormalises(), torch.ones(1, 3))
    inputs, changed = private.plain_inputs(graph), private.inputs_changed(graph.output_node())
    assert [tuple(inputs[index].meta["val"].shape) for index in changed] == [(4, 3)]
    assert not private.inputs_changed(joint_graph(torch.nn.Linear(3, 2), torch.ones(1, 3)).output_node())


def test_copy_node_origin() -> None:
    graph = torch.fx.Graph()
    one, two = graph.placeholder("one"), graph.placeholder("two")
    one.meta["seq_nr"] = 7
    private.copy_node_origin(one, two)
    assert two.meta["seq_nr"] == 7


def test_node_flops() -> None:
    graph = joint_graph(torch.nn.Linear(3, 2), torch.ones(5, 3))
    assert sum(private.node_flops(node) for node in graph.nodes) >= 2 * 5 * 3 * 2


def test_size_hint() -> None:
    assert private.size_hint(4) == 4
    seen = []

    def backend(gm, inputs):
        seen.extend(private.size_hint(i) for i in inputs if not isinstance(i, torch.Tensor))
        return gm

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(6))
    assert seen == [6]


def test_enters_autocast() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    targets = [node.target for node in traced(cast).nodes]
    assert sum(private.enters_autocast(target) for target in targets) == 1


def test_exits_autocast() -> None:
    assert private.exits_autocast(private.exit_autocast())
    assert not private.exits_autocast(torch.add)


def test_exit_autocast() -> None:
    entered = torch.autocast("cpu", torch.bfloat16)
    entered.__enter__()
    assert torch.is_autocast_enabled("cpu")
    private.exit_autocast()(entered)
    assert not torch.is_autocast_enabled("cpu")


def test_sets_grad_mode() -> None:
    def without(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + 1

    assert sum(private.sets_grad_mode(node.target) for node in traced(without).nodes) == 2


def test_graph_input_name() -> None:
    graph = traced(lambda rows: rows + 1)
    assert [private.graph_input_name(node) for node in graph.find_nodes(op="placeholder")] == ["rows"]


def test_new_graph_input() -> None:
    compiled = []

    def backend(gm, inputs):
        product = next(node for node in gm.graph.nodes if node.op == "call_function")
        node = private.new_graph_input(gm, "number", torch.tensor(3), like=product.meta["example_value"])
        product.update_arg(1, node)
        gm.recompile()
        run = private.aot_backend({"fw_compiler": lambda g, _: g})(gm, [*inputs, torch.tensor(3)])
        product.update_arg(1, 2)
        gm.graph.erase_node(node)
        gm.recompile()
        compiled.append(run)
        return lambda *args: run(*args, torch.tensor(3))

    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend=backend)
    assert double(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(compiled) == 1
