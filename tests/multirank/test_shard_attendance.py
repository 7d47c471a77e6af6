"""What counts of a rank that has run out of data in ``join()`` of a sharded model, and by what it is divided."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

import lockstep
from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.shard_training import gradients, parameters, shard_by_blocks, whole_gradients, whole_parameters

pytestmark = lockstep_only
MODES = ("eager", "compiled")


class Layers(nn.Module):
    """A layer that runs twice, a loss that the module keeps, a branch that a batch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 3)
        self.kept: Tensor | float = 0.0

    def forward(self, x: Tensor, takes_first: bool = True) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        self.kept = x.square().mean()
        x = torch.tanh(self.layers[0](torch.tanh(self.layers[1](x))))
        return self.first(x) if takes_first else self.second(x)


class Sides:
    """A sharded model, and the same in one process that runs the batches of all ranks that have some."""

    def __init__(self, how: str, num_batches: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.module = Layers().double()
        self.reference = copy.deepcopy(self.module)
        shard_by_blocks(self.module)
        torch._dynamo.reset()
        self.called: Any = torch.compile(self.module, backend="aot_eager") if how == "compiled" else self.module
        self.num_batches = num_batches
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mine = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        self.theirs = torch.optim.SGD(self.reference.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    @staticmethod
    def batch(rank: int, number: int) -> Tensor:
        return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + number))

    def batches(self) -> Any:
        return (self.batch(self.rank, number) for number in range(self.num_batches[self.rank]))

    def reference_backward(self, number: int, loss: Any, by_all: bool = True) -> None:
        active = [rank for rank in range(self.world) if number < self.num_batches[rank]]
        for rank in active:
            (loss(self.reference, self.reference, rank, self.batch(rank, number)) / (
                self.world if by_all else len(active))).backward()  # fmt: skip

    def update_reference(self) -> None:
        self.theirs.step()
        self.theirs.zero_grad()

    def compare(self, what: str) -> None:
        assert_close(whole_parameters(self.module), parameters(self.reference), what, 1e-7)


def mean_square(called: Any, module: Any, rank: int, batch: Tensor) -> Tensor:
    return called(batch).square().mean()


def with_kept_loss(called: Any, module: Any, rank: int, batch: Tensor) -> Tensor:
    return called(batch).square().mean() + module.kept


def by_branch(called: Any, module: Any, rank: int, batch: Tensor) -> Tensor:
    return called(batch, rank == 1).square().mean()


def train(how: str, loss: Any, by_all: bool) -> None:
    sides = Sides(how, (3, 1))
    for number, batch in enumerate(sides.module.join(sides.batches(), divide_by_initial_world_size=by_all)):
        loss(sides.called, sides.module, sides.rank, batch).backward()
        if loss is by_branch and number:
            assert sides.module.first.weight.grad is None  # only a rank without data has come to it
        sides.mine.step()
        sides.mine.zero_grad()
        sides.reference_backward(number, loss, by_all)
        sides.update_reference()
    sides.compare(f"{loss.__name__}, {how}")


def accumulate(how: str, by_all: bool, hook: bool) -> None:
    """Each iteration is divided by the ranks that had data in it."""
    sides = Sides(how, (4, 1))
    if hook:
        sides.module.register_comm_hook(None, default_hooks.allreduce_hook)
    for number, batch in enumerate(sides.module.join(sides.batches(), divide_by_initial_world_size=by_all)):
        with sides.module.no_sync() if number % 2 == 0 else nullcontext():
            mean_square(sides.called, None, 0, batch).backward()
        sides.reference_backward(number, mean_square, by_all)
        if number % 2:
            sides.mine.step()
            sides.mine.zero_grad()
            sides.update_reference()
    sides.compare(f"accumulated, {how}")


def one_backward_for_two(how: str) -> None:
    """A backward of a forward with data and of one without."""
    sides = Sides(how, (4, 3))
    total: Any = 0.0
    for number, batch in enumerate(sides.module.join(sides.batches())):
        total = total + mean_square(sides.called, None, 0, batch)
        sides.reference_backward(number, mean_square)
        if number % 2:
            total.backward()
            sides.mine.step()
            sides.mine.zero_grad()
            sides.update_reference()
            total = 0.0
    sides.compare(f"one backward for two iterations, {how}")


def leave_and_begin_again(how: str) -> None:
    sides = Sides(how, (1, 3))
    left = sides.module.join(sides.batch(sides.rank, n) for n in range((3, 1)[sides.rank]))
    for number, batch in enumerate(left):
        mean_square(sides.called, None, 0, batch).backward()
        sides.module.zero_grad()
        if number == 1:
            break
    again = sides.module.join(sides.batches())
    next(again)
    batch = next(again)
    left.close()  # which says nothing about the loop that is running
    assert sides.module.has_data == (sides.rank == 1)
    mean_square(sides.called, None, 0, batch).backward()
    sides.reference_backward(1, mean_square)
    assert_close(whole_gradients(sides.module), gradients(sides.reference), "a loop after another that was left")
    again.close()
    assert sides.module.has_data


def attend(how: str) -> None:
    for loss in (with_kept_loss, by_branch):
        for by_all in (True, False):
            train(how, loss, by_all)
    accumulate(how, by_all=True, hook=False)
    accumulate(how, by_all=False, hook=False)
    accumulate(how, by_all=True, hook=True)
    one_backward_for_two(how)
    leave_and_begin_again(how)


@pytest.mark.parametrize("how", MODES)
def test_what_counts_of_a_rank_without_data(how: str) -> None:
    run_ranks(2, attend, how)


def torchs_join() -> list[str]:
    models = [shard_by_blocks(Layers()), lockstep.FullyShardedDataParallel(Layers())]
    said = []
    for model in models:
        with pytest.raises(lockstep.errors.LockstepError) as caught, Join([model]):
            pass
        said.append(str(caught.value))
    return said


def test_torchs_join_is_refused_with_a_reason() -> None:
    for said in run_ranks(2, torchs_join):
        assert len(said) == 2
        assert all("for batch in model.join(loader)" in text for text in said)
