"""Numbers that differ by rank become inputs of a trace: one program for all, which computes what each rank did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.graph.compare import digest_of
from lockstep.program.constants import Constants

WORLD = 3
X = torch.arange(24.0).reshape(4, 6) / 7 - 1.5


def arithmetic(x: Tensor, rank: int) -> Tensor:
    y = x * (rank + 1) + rank / 2 - 1.5 * rank + x.mean() * (0.1 + rank)
    return (rank - y) / (2 + rank) + (y > rank) + y.mul_(rank).add_(0.5 * rank)


def filled(x: Tensor, rank: int) -> Tensor:
    made = torch.full((6,), 1.0 * rank) + torch.full_like(x, rank) + x.new_full((6,), rank, dtype=torch.int64)
    return x * made + torch.scalar_tensor(rank, dtype=torch.float64)


def rows(x: Tensor, rank: int) -> Tensor:
    return x[rank] * x[-1 - rank] * rank + x[:, rank].sum() + x[rank, rank + 1]


def parts(x: Tensor, rank: int) -> Tensor:
    part = x[:, 2 * rank : 2 * rank + 2] * x[:, rank::3] + x.chunk(WORLD, 1)[rank] + x.split([1, 2, 3], 1)[1]
    return part * torch.arange(5 * rank, 5 * rank + 2) + torch.arange(rank, rank + 4, 2)


def part_of_what_is_written_later(x: Tensor, rank: int) -> Tensor:
    part = x[rank] * 2
    x.add_(1)
    return part


def backward(x: Tensor, rank: int) -> Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = (leaf[rank] * leaf[:, rank : rank + 2].sum() * rank).sum() + leaf.chunk(2)[rank % 2].square().sum()
    return torch.autograd.grad(loss, leaf)[0]


def branch(x: Tensor, rank: int) -> Tensor:
    return x.sin() if rank else x * 2


def size(x: Tensor, rank: int) -> Tensor:
    return x[: rank + 1].sum() * x


def written_part(x: Tensor, rank: int) -> Tensor:
    x[rank].add_(1)
    return x * 2


def returned_part(x: Tensor, rank: int) -> Tensor:
    return x[rank]


def part_that_is_written_while_it_is_used(x: Tensor, rank: int) -> Tensor:
    part = x[rank]
    x.add_(1)
    return part * 2


Step = Callable[[Tensor, int], Tensor]


def traced(step: Step) -> list[tuple[torch.fx.GraphModule, list[Tensor]]]:
    """The program of each rank, and what it is given besides."""
    graphs = [torch_private.trace_program(lambda x, r=rank: step(x, r), [X.clone()]) for rank in range(WORLD)]
    constants = list(map(Constants, graphs))
    told = [found.told() for found in constants]
    return [(graph, found.take_out(told)) for graph, found in zip(graphs, constants, strict=True)]


@pytest.mark.parametrize("step", [arithmetic, filled, rows, parts, part_of_what_is_written_later, backward])
def test_all_ranks_have_one_program(step: Step) -> None:
    programs = traced(step)
    assert len({digest_of(graph) for graph, _ in programs}) == 1
    assert programs[0][1]
    for rank, (_, numbers) in enumerate(programs):
        given, own = X.clone(), X.clone()
        found, right = programs[0][0](given, *numbers), step(own, rank)  # the program of the first rank
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(given, own)


@pytest.mark.parametrize("step", [branch, size, written_part, returned_part, part_that_is_written_while_it_is_used])
def test_what_shapes_a_program_stays_in_it(step: Step) -> None:
    programs = traced(step)
    assert len({digest_of(graph) for graph, _ in programs}) == (2 if step is branch else WORLD)
    for rank, (graph, numbers) in enumerate(programs):
        assert numbers == []
        torch.testing.assert_close(graph(X.clone()), step(X.clone(), rank), rtol=0, atol=0)


def test_numbers_that_are_the_same_stay_numbers() -> None:
    assert all(numbers == [] for _, numbers in traced(lambda x, rank: x * 3 + x[1]))
