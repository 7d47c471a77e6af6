"""What programs do to a sharded model between the parts of a step: evaluate, drop gradients, replace weights."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lockstep
from lockstep import torch_private
from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.models import CASES, MLP, shard
from multirank.shard_training import gradients, parameters, shard_by_blocks, whole, whole_gradients, whole_parameters

pytestmark = lockstep_only
MODES = ("eager", "compiled")


def compiled(module: nn.Module, how: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager") if how == "compiled" else module


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


class Sides:
    """A sharded model, and the same in one process on the batches of all ranks."""

    def __init__(self, module: nn.Module, how: str, **options: Any) -> None:
        self.module, self.reference = module, copy.deepcopy(module)
        self.called = compiled(shard_by_blocks(module, **options), how)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def backward(self, step: int, *args: Any, both: bool = True) -> None:
        self.called(batch(self.rank, step), *args).square().mean().backward()
        if both:
            self.reference_backward(step, *args)

    def reference_backward(self, step: int, *args: Any) -> None:
        for rank in range(self.world):
            (self.reference(batch(rank, step), *args).square().mean() / self.world).backward()

    def zero(self) -> None:
        self.module.zero_grad()
        self.reference.zero_grad()

    def compare(self, what: str, tolerance: float | None = None) -> None:
        assert_close(whole_gradients(self.module), gradients(self.reference), what, tolerance)


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().double()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- evaluations, dropped gradients


def evaluate_anywhere(how: str) -> None:
    """Under inference_mode before anything else, and between all parts of a step."""
    case = CASES["gpt_tied"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    called = compiled(shard_by_blocks(module), how)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)

    def part(step: int) -> Any:
        return shard(case.batch(step, torch.float64), rank, world)

    def evaluate(step: int) -> None:
        with torch.inference_mode() if step % 2 == 0 else torch.no_grad():
            torch.testing.assert_close(case.loss(called, part(step)), case.loss(reference, part(step)))

    evaluate(0)
    for step in range(3):
        loss = case.loss(called, part(step))
        evaluate(step)
        module.zero_grad()  # the root is whole now: what it drops are the shards' gradients all the same
        reference.zero_grad()
        loss.backward()
        case.loss(reference, case.batch(step, torch.float64)).backward()
        evaluate(step + 1)
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")
        mine.step()
        theirs.step()
        evaluate(step)
    with module.no_sync():
        case.loss(called, part(5)).backward()
    module.zero_grad()  # also what was to be reduced later
    reference.zero_grad()
    case.loss(called, part(6)).backward()
    case.loss(reference, case.batch(6, torch.float64)).backward()
    assert_close(whole_gradients(module), gradients(reference), "without what was dropped")


@pytest.mark.parametrize("how", MODES)
def test_evaluations_and_dropped_gradients(how: str) -> None:
    run_ranks(2, evaluate_anywhere, how)


# ---------------------------------------------------------------- weights that are replaced


def replace_weights(how: str) -> str:
    sides = Sides(seeded(MLP), how)
    whole = {name: parameter.full_tensor().detach() for name, parameter in sides.module.named_parameters()}
    with pytest.raises(RuntimeError, match="was replaced"):  # by no more than the first call of all
        torch.func.functional_call(sides.module, whole, (batch(0, 0),))
    sides.backward(0)
    layer = sides.module.layers[2]
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    with torch.no_grad():
        sides.reference.layers[2].weight.mul_(0.5)
    sides.zero()
    sides.backward(1)
    sides.compare("another shard in its place")
    layer.weight = nn.Parameter(torch.zeros(24, 24, dtype=torch.float64))
    for context in (torch.no_grad(), contextlib.nullcontext()):
        with (
            context,
            pytest.raises(RuntimeError, match=r"'layers\.2\.weight' of a sharded model was replaced") as caught,
        ):
            sides.called(batch(0, 2))
    del layer.weight
    with pytest.raises(RuntimeError, match=r"'layers\.2\.weight' of a sharded model is no longer there"):
        sides.called(batch(0, 2))
    return str(caught.value)


@pytest.mark.parametrize("how", MODES)
def test_weights_that_are_replaced(how: str) -> None:
    for said in run_ranks(2, replace_weights, how):
        assert "write into it" in said


class GivesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class TakesIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GivesItself()])
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layers[0](x), self.bias)


def return_a_parameter() -> None:
    module = shard_by_blocks(TakesIt())
    with pytest.raises(RuntimeError, match=r"layers\.0 returns a parameter of its own"):
        module(torch.ones(2, 8))
    sides = Sides(seeded(TakesIt), "eager", reshard_after_forward=False)
    sides.backward(0)
    sides.compare("a unit that stays whole")


def test_a_unit_that_returns_its_parameter() -> None:
    run_ranks(2, return_a_parameter)


# ---------------------------------------------------------------- second derivatives


def penalise() -> None:
    sides = Sides(seeded(MLP), "eager")

    def loss(called: Any, rank: int, step: int) -> Tensor:
        x = batch(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(called(x).square().sum(), x, create_graph=True)
        return slope.norm() + called(batch(rank, step + 1)).square().mean()  # type: ignore[no-any-return]

    for step in range(2):
        sides.zero()
        loss(sides.called, sides.rank, step).backward()
        for rank in range(sides.world):
            (loss(sides.reference, rank, step) / sides.world).backward()
        sides.compare(f"a gradient penalty, step {step}")
        assert all(isinstance(parameter, DTensor) for parameter in sides.module.parameters())


def test_second_derivatives() -> None:
    run_ranks(2, penalise)


# ---------------------------------------------------------------- units of two dtypes


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class TwoKinds(nn.Module):
    """Each layer has parameters of two dtypes, and runs twice."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float64, torch.float32)
        self.layers = nn.ModuleList(
            nn.Sequential(*(part for kind in kinds for part in (Cast(kind), nn.Linear(8, 8, dtype=kind))))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(layer(x)))
        return x


def update_in_backward(how: str) -> None:
    """What a graph delivers late is added before the hooks on shards run, which run once."""
    sides = Sides(seeded(Twice), how)
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in sides.module.parameters()}
    theirs = torch.optim.AdamW(sides.reference.parameters(), lr=0.01)

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        sides.backward(step)
        theirs.step()
        theirs.zero_grad()
    assert_close(whole_parameters(sides.module), parameters(sides.reference), "updated in the backward", 1e-7)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x


def two_kinds(how: str) -> None:
    update_in_backward(how)
    torch.manual_seed(0)
    sides = Sides(TwoKinds(), how)
    sides.module.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        sides.zero()
        sides.backward(step)
        sides.compare(f"step {step}", 1e-4)


@pytest.mark.parametrize("how", MODES)
def test_units_of_two_dtypes_that_run_twice(how: str) -> None:
    run_ranks(2, two_kinds, how)


# ---------------------------------------------------------------- reduced over the shards only


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, takes_first: bool) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        return self.first(x) if takes_first else self.second(x)


def replicas_later(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    sides = Sides(seeded(Chooses), how, mesh=mesh)
    for step in range(2):
        sides.zero()
        sides.module.set_requires_all_reduce(False)
        sides.backward(step, True)
        sides.module.set_requires_all_reduce(True)
        sides.backward(step + 10, False)  # what this one does not use was used before
        sides.compare(f"used in another window, step {step}")
    sides.zero()
    sides.module.set_requires_all_reduce(False)
    sides.backward(4, True)
    sides.module.set_requires_all_reduce(True)
    for side in (sides.module, sides.reference):
        side.layers[0].bias.requires_grad_(False)
    sides.backward(5, True)
    sides.compare("frozen in between")


def test_units_that_replicas_reduce_later() -> None:
    run_ranks(2, replicas_later, "eager")


# ---------------------------------------------------------------- what ranks say about what is frozen


def freeze_differently_while_accumulating() -> str:
    sides = Sides(seeded(MLP), "eager")
    sides.backward(0)
    sides.zero()
    names = dict(sides.module.named_parameters())
    with sides.module.no_sync():
        sides.backward(1, both=False)
    names["layers.0.weight" if sides.rank == 0 else "layers.2.bias"].requires_grad_(False)
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        sides.backward(2, both=False)
    sides.module.reset_sync_window()
    for parameter in names.values():
        parameter.requires_grad_(True)
    sides.zero()
    sides.backward(3)
    sides.compare("after it was mended")
    return str(caught.value)


def test_ranks_that_freeze_different_parameters_while_they_accumulate() -> None:
    for said in run_ranks(2, freeze_differently_while_accumulating):
        assert "1 of 6 parameters are frozen: layers.0.weight" in said
        assert "1 of 6 parameters are frozen: layers.2.bias" in said
        assert "0 of 6" not in said


def compare_after_training(how: str) -> None:
    """A loop in which everything above meets: accumulation, an evaluation, clipping, dropped gradients."""
    sides = Sides(seeded(MLP), how)
    mine = torch.optim.AdamW(sides.module.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(sides.reference.parameters(), lr=0.01)
    for step in range(3):
        with sides.module.no_sync():
            sides.backward(step)
        sides.backward(step + 10)
        with torch.inference_mode():
            sides.called(batch(0, step))
        for side in (sides.module, sides.reference):
            nn.utils.clip_grad_norm_(side.parameters(), 0.1)
        mine.step()
        theirs.step()
        sides.zero()
    assert_close(whole_parameters(sides.module), parameters(sides.reference), "after training", 1e-7)


@pytest.mark.parametrize("how", MODES)
def test_a_loop_with_all_of_it(how: str) -> None:
    run_ranks(2, compare_after_training, how)


class Shallow(nn.Module):
    """May leave its last layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.depth = 4

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = torch.tanh(layer(x))
        return x


def stop_early(how: str) -> None:
    """A layer that was gathered ahead, and then not run, is not used after an update as it was before."""
    torch.manual_seed(0)
    module = Shallow().double()
    reference = copy.deepcopy(module)
    called = compiled(shard_by_blocks(module), how)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, reference))
    x = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for model, subject in ((module, called), (reference, reference)):
            model.depth = 4
            subject(x).square().mean().backward()
            model.depth = 2
            with torch.no_grad():
                subject(x)
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")
        for layer in module.layers if how == "eager" else ():
            store = layer._lockstep_unit.stores[0]  # type: ignore[union-attr]
            assert store._buffer.untyped_storage().nbytes() == 0  # type: ignore[union-attr]
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole_parameters(module), parameters(reference), how)


@pytest.mark.parametrize("how", MODES)
def test_an_evaluation_that_ends_early(how: str) -> None:
    run_ranks(2, stop_early, how)


def copy_state() -> None:
    module = shard_by_blocks(Shallow())
    module(torch.ones(2, 6)).sum().backward()
    copied = copy.deepcopy(module.state_dict())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    before = whole_parameters(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    for name, value in before.items():
        assert value is not None
        assert torch.equal(whole(copied[name]), value)
        assert torch.equal(whole(saved[name]), value)
    module.load_state_dict(copied)
    assert_close(whole_parameters(module), before, "loaded")


@pytest.mark.parametrize("world", [1, 3])
def test_a_state_dict_is_copied_and_saved(world: int) -> None:
    run_ranks(world, copy_state)


class Fallible(nn.Module):
    """Its first block may fail, and then it goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.fails = self.catches = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        try:
            x = self.layers[1](x if not self.fails else x[:, :3])
        except RuntimeError:
            if not self.catches:
                raise
        return self.head(self.layers[2](x))  # type: ignore[no-any-return]


def fail_and_go_on(frees: bool) -> None:
    torch.manual_seed(0)
    sides = Sides(Fallible().double(), "eager", reshard_after_forward=frees)
    module, reference = sides.module, sides.reference
    sides.backward(0)
    sides.compare("before")
    module.fails = reference.fails = True
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sides.backward(1)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    module.catches = reference.catches = True
    sides.zero()
    sides.backward(2)
    sides.compare("without the block that failed")
    module.fails = reference.fails = False
    sides.zero()
    sides.backward(3)
    sides.compare("with all blocks again")
    module(batch(0, 4))  # what was gathered stays whole where it is not freed
    for model in (module, reference):
        model.zero_grad()
        for layer in (model.layers[0], model.head):
            layer.weight.requires_grad_(False)
    sides.backward(5)
    sides.compare("frozen while it was whole")
    assert not any(layer.weight.requires_grad for layer in (module.layers[0], module.head))


@pytest.mark.parametrize("frees", [True, False])
def test_failing_and_freezing_while_units_are_whole(frees: bool) -> None:
    run_ranks(2, fail_and_go_on, frees)


# ---------------------------------------------------------------- what is left behind


def leave_nothing() -> None:
    """Frozen and unfrozen in every step, and forwards with gradients whose backward ends in no ``.grad``."""
    store = torch_private.default_store()
    sides = Sides(seeded(MLP), "eager")
    keys = []
    for step in range(24):
        sides.module.layers.requires_grad_(step % 2 == 0)
        sides.module.layers[0].requires_grad_(True)
        sides.backward(step, both=False)
        sides.module.zero_grad()
        inputs = batch(sides.rank, step).requires_grad_()
        torch.autograd.grad(sides.called(inputs).sum(), inputs)
        sides.called(batch(sides.rank, step))  # no backward at all
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    assert keys[-1] <= keys[8] + 4, keys  # some are those of signs of life


def test_steps_leave_nothing_at_the_store() -> None:
    run_ranks(2, leave_nothing)
