"""What ranks compare of a graph: the same for the same program, whatever was compiled before; another for another."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lockstep import torch_private
from lockstep.agree.board import Board
from lockstep.graph import compare as comparing
from lockstep.graph.compare import Facts, compare, describe_graph, difference


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


def facts_of(module: nn.Module, *batches: Tensor, dynamic: bool | None = None, **told: Any) -> list[Facts]:
    """Of every compilation that running the module on these batches takes."""
    found: list[Facts] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        names = {index: str(index) for index, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
        found.append(describe_graph(gm, inputs, names, **{"backend": "probe", **told}))
        return gm

    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for batch in batches:
        compiled(batch)
    return found


def digest_of(facts: Facts) -> str:
    return facts["constants or the order of operations"]


def digest(module: nn.Module, rows: int = 3, **options: Any) -> str:
    (facts,) = facts_of(module, torch.ones(rows, 4), **options)
    return digest_of(facts)


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


def test_facts_are_readable() -> None:
    first, second = facts_of(Net(), torch.ones(3, 4), torch.ones(5, 4))
    assert first["input x"] == "[3, 4] float32"
    assert second["input x"] == "[5 (dynamic), 4] float32"
    assert first["operation linear"] == "2 times"
    assert [first.get(f"parameter {index}") for index in (0, 1, 3, 4)] == ["used"] * 4
    assert first["compiled again because"] == ""
    assert "expected 3, actual 5" in second["compiled again because"]


def test_device_ordinals_do_not_count() -> None:
    def on(device: str) -> str:
        graph = fx.Graph()
        x = graph.placeholder("x")
        moved = graph.call_method("to", (x, torch.device(device)))
        graph.output(graph.call_function(torch.zeros_like, (moved,), {"device": device}))
        return digest_of(describe_graph(fx.GraphModule(nn.Module(), graph), [torch.ones(1)], {}))

    assert on("cuda:0") == on("cuda:1")
    assert on("cuda:0") != on("cpu")


def test_constants_count_and_so_do_those_of_inner_graphs() -> None:
    class Inner(nn.Module):
        def __init__(self, constant: float) -> None:
            super().__init__()
            self.constant = constant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: y.sin() * self.constant, x, use_reentrant=False)

    found = []
    for constant in (2.0, 3.0):
        torch._dynamo.reset()
        found += facts_of(Inner(constant), torch.ones(3, 4))
    table = difference(dict(enumerate(found)))
    assert "numbers of the host at test_compare.py:" in table  # the line is named
    assert "mul(2.0)" in table
    assert digest_of(found[0]) != digest_of(found[1])


def test_small_tensors_that_a_program_holds_count() -> None:
    def traced(constant: float) -> Any:
        return torch_private.trace_program(lambda x: (x * torch.tensor(constant),), [torch.ones(3)])

    one, again, other = traced(1.0), traced(1.0), traced(2.0)
    assert comparing.digest_of(one) == comparing.digest_of(again) != comparing.digest_of(other)
    facts = [comparing.describe_program(graph, "") for graph in (one, other)]
    differing = [name for name in facts[0] if facts[0][name] != facts[1][name]]
    assert any("test_compare.py:" in name for name in differing)


def test_the_difference_names_rank_input_and_shape() -> None:
    (facts,) = facts_of(Net(), torch.ones(3, 4))
    assert difference({0: facts, 1: facts}) == ""
    other = {
        **facts,
        "input x": "[7, 4] float32",
        "constants or the order of operations": "graph other",
        "compiled again because": "tensor 'x' size mismatch at index 0. expected 3, actual 7",
    }
    table = difference({0: facts, 1: other, 2: facts})
    assert "input x:\n  rank 0, 2 | [3, 4] float32\n  rank 1    | [7, 4] float32" in table
    assert "rank 1 | tensor 'x' size mismatch" in table
    assert "order of operations" not in table


def test_the_difference_names_operations() -> None:
    one, other = (facts_of(Net(activation=name), torch.ones(3, 4))[0] for name in ("relu", "tanh"))
    table = difference({0: one, 1: other})
    assert "relu" in table
    assert "rank 1 | not there" in table


def test_a_long_table_is_cut_and_begins_with_inputs() -> None:
    one = {f"operation {index}": "1 times" for index in range(20)}
    one |= {"constants or the order of operations": "graph one", "compiled again because": ""}
    other = {"constants or the order of operations": "graph other", "compiled again because": "the size of x"}
    table = difference({0: one, 1: other})
    assert table.count("not there") == 8
    assert "... and 12 more differences\ncompiled again because:\n  rank 1 | the size of x" in table


def test_a_difference_is_told_once_with_rank_input_and_shape(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    store = dist.HashStore()
    boards = [Board(store, "test", rank, 3) for rank in range(3)]
    facts = {
        "input x": "[4, 6] float32",
        "constants or the order of operations": "graph a",
        "compiled again because": "",
    }
    other = {**facts, "input x": "[7, 6] float32", "constants or the order of operations": "graph b"}
    for _ in range(2):
        compare(boards[0], "GPT", facts)
        compare(boards[1], "GPT", other)
        compare(boards[2], "GPT", facts)
    table = "input x:\n  rank 0 | [4, 6] float32\n  rank 1 | [7, 6] float32"
    assert [table in record.message for record in caplog.records] == [True]
    compare(boards[0], "another region", facts)
    compare(boards[1], "another region", other)
    assert len(caplog.records) == 2


def test_compilations_are_compared_by_their_number(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that compiles a region for the second time is not compared with the first time of another."""
    store = dist.HashStore()
    first, second = (Board(store, "test", rank, 2) for rank in range(2))
    small, large = (facts_of(Net(), torch.ones(rows, 4))[0] for rows in (3, 5))
    for facts in (small, large):
        compare(first, "Net", facts)
    for facts in (small, large):
        compare(second, "Net", facts)
    assert "different graphs" not in caplog.text
