"""The fingerprint of a graph: the same for the same program, whatever was compiled before; another for another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lockstep.graph.fingerprint import GraphFacts, InputFact, describe_graph, difference


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, width: int = 8, activation: str = "relu", first: str = "first") -> None:
        super().__init__()
        self.add_module(first, nn.Linear(4, width))
        self.last = nn.Linear(width, 2)
        self._first, self._activation = first, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(torch, self._activation)(getattr(self, self._first)(x)))


def facts_of(module: nn.Module, *batches: Tensor, dynamic: bool | None = None, **told: Any) -> list[GraphFacts]:
    """Of every compilation that running the module on these batches takes."""
    found: list[GraphFacts] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        names = {index: str(index) for index, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
        options = {"region": "Net", "number": len(found), "parameter_names": names, "backend": "probe", **told}
        found.append(describe_graph(gm, inputs, **options))
        return gm

    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for batch in batches:
        compiled(batch)
    return found


def digest(module: nn.Module, rows: int = 3, **options: Any) -> str:
    (facts,) = facts_of(module, torch.ones(rows, 4), **options)
    return facts.digest


def test_the_same_model_twice_gives_the_same_digest() -> None:
    first = digest(Net())
    torch._dynamo.reset()
    torch.manual_seed(1)
    assert digest(Net()) == first


def test_what_was_compiled_before_does_not_matter() -> None:
    alone = digest(Net(), dynamic=True)
    torch._dynamo.reset()
    facts_of(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.ones(5, 4), torch.ones(7, 4))
    assert digest(Net(), dynamic=True) == alone


@pytest.mark.parametrize(
    ("module", "rows"),
    [(Net(), 5), (Net(width=16), 3), (Net(activation="tanh"), 3), (Net(first="front"), 3)],
    ids=["another shape", "another parameter shape", "another operation", "another parameter name"],
)
def test_another_program_gives_another_digest(module: nn.Module, rows: int) -> None:
    first = digest(Net())
    torch._dynamo.reset()
    assert digest(module, rows) != first


def test_settings_and_backend_count() -> None:
    digests = set()
    for told in ({}, {"settings": "max_autotune"}, {"backend": "inductor"}):
        torch._dynamo.reset()
        digests.add(digest(Net(), **told))
    assert len(digests) == 3


def test_addresses_in_settings_do_not_count() -> None:
    digests = set()
    for address in ("0x7f01", "0x7f02"):
        torch._dynamo.reset()
        digests.add(digest(Net(), settings=f"pass <function keep at {address}>"))
    assert len(digests) == 1


def test_a_dynamic_size_is_one_graph_for_all_values() -> None:
    digests = set()
    for rows in (3, 5):
        torch._dynamo.reset()
        digests.add(digest(Net(), rows, dynamic=True))
    assert len(digests) == 1


def test_facts_are_readable_and_travel_as_json() -> None:
    first, second = facts_of(Net(), torch.ones(3, 4), torch.ones(5, 4))
    assert [str(i) for i in first.inputs] == ["[3, 4] float32"]
    assert [(i.name, str(i)) for i in second.inputs] == [("x", "[s0=5, 4] float32, dynamic dims [0]")]
    assert first.reason == ""
    assert "expected 3, actual 5" in second.reason
    assert (len(first.parameters), first.devices) == (4, ("cpu",))
    assert GraphFacts.from_json(second.to_json()) == second


def test_device_ordinals_do_not_count() -> None:
    def on(device: str) -> str:
        graph = fx.Graph()
        x = graph.placeholder("x")
        moved = graph.call_method("to", (x, torch.device(device)))
        graph.output(graph.call_function(torch.zeros_like, (moved,), {"device": device}))
        return describe_graph(fx.GraphModule(nn.Module(), graph), [torch.ones(1)], region="r").digest

    assert on("cuda:0") == on("cuda:1")
    assert on("cuda:0") != on("cpu")


def test_the_difference_names_rank_input_and_shape() -> None:
    (facts,) = facts_of(Net(), torch.ones(3, 4))
    assert difference({0: facts, 1: facts}) == ""
    other = replace(
        facts,
        digest="other",
        inputs=(InputFact("x", ("7", "4"), "float32"),),
        reason="tensor 'x' size mismatch at index 0. expected 3, actual 7",
    )
    table = difference({0: facts, 1: other, 2: facts})
    assert "input x:\n  rank 0, 2 | [3, 4] float32\n  rank 1    | [7, 4] float32" in table
    assert "rank 1 | tensor 'x' size mismatch" in table


def test_the_difference_names_operations() -> None:
    one, other = (facts_of(Net(activation=name), torch.ones(3, 4))[0] for name in ("relu", "tanh"))
    table = difference({0: one, 1: other})
    assert "relu" in table
    assert "rank 1 | not there" in table
