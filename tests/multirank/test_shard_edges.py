"""Sharded models at the edges: odd parameters, small groups, several meshes, errors in a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lockstep import errors, fully_shard
from multirank.compare import assert_close
from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import CASES, GPT, MLP, SEQUENCE, shard
from multirank.shard_training import gradients, shard_by_blocks, whole, whole_gradients, whole_parameters

pytestmark = lockstep_only
MODES = ("eager", "compiled")


def compiled(module: nn.Module, how: str) -> Any:
    if how == "eager":
        return module
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


class Odd(nn.Module):
    """One row, fewer rows than ranks, no rows, complex numbers, several dtypes, a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.few = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
        self.none = nn.Parameter(torch.randn(0, 3, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.randn(7, 5, dtype=torch.float32))
        self.deep = nn.Parameter(torch.randn(3, 1, 2, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.one + (x @ self.few.t()) @ self.few
        y = y + (x @ self.narrow.double().t()).sum(1, keepdim=True) + self.none.sum()
        y = y * self.deep.sum((0, 1, 2))
        return (y.to(torch.complex128) @ self.wave).abs().sum()


def train_odd(how: str) -> None:
    torch.manual_seed(2)
    module, reference = Odd(), Odd()
    reference.load_state_dict(module.state_dict())
    fully_shard(module)
    called = compiled(module, how)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.optim.SGD(module.parameters(), lr=0.01)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.01)
    for step in range(2):
        batch = torch.randn(2 * world, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine.zero_grad()
        theirs.zero_grad()
        called(batch.chunk(world)[rank]).backward()
        (reference(batch) / world).backward()
        assert_close(whole_gradients(module), gradients(reference), f"step {step}", 1e-5)
        mine.step()
        theirs.step()
    assert_close(whole_parameters(module), dict(reference.named_parameters()), "parameters", 1e-5)


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("world", [1, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_odd_parameters(world: int, how: str) -> None:
    run_ranks(world, train_odd, how)


def train_in_halves() -> None:
    """Two halves of the world train two models that know nothing of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    shard_by_blocks(module, mesh=mesh)
    half, rank = dist.get_rank() // 2, dist.get_rank() % 2
    for step in range(2):
        module.zero_grad()
        reference.zero_grad()
        batch = case.batch(10 * half + step, torch.float64)
        case.loss(module, shard(batch, rank, 2)).backward()
        case.loss(reference, batch).backward()
        assert_close(whole_gradients(module), gradients(reference), f"half {half}, step {step}")


def train_a_pipeline() -> None:
    """Two stages of torch's pipelining, each sharded over two ranks: it adds up micro-batches, and reduces by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    number, rank = mesh["stage"].get_local_rank(), mesh["shard"].get_local_rank()
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)]
    reference = copy.deepcopy(nn.Sequential(*blocks))
    mine = nn.Sequential(*blocks[2 * number : 2 * number + 2])
    theirs = nn.Sequential(*list(reference)[2 * number : 2 * number + 2])
    for block in mine:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(mine, mesh=mesh["shard"])
    stage = PipelineStage(mine, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        inputs, targets = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(step))
        if number == 0:
            schedule.step(inputs[rank])
        else:
            schedule.step(target=targets[rank])
        nn.functional.mse_loss(reference(inputs), targets).backward()
        assert_close(whole_gradients(mine), gradients(theirs), f"stage {number}, step {step}")
        optimizer.step()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.1 * parameter.grad
    assert not any(module._lockstep_unit.is_full for module in mine)


def train_apart() -> None:
    train_in_halves()
    train_a_pipeline()


def test_subgroups() -> None:
    run_ranks(4, train_apart)


def train_on_two_meshes() -> None:
    """One unit is sharded over two ranks and replicated over two, the rest over all four."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    fully_shard(module.layers[2], mesh=hybrid)
    fully_shard(module)
    assert module.layers[2].weight.to_local().shape[0] == 12
    assert module.layers[0].weight.to_local().shape[0] == 6
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        module.zero_grad()
        reference.zero_grad()
        case.loss(module, shard(case.batch(step, torch.float64), rank, world)).backward()
        case.loss(reference, case.batch(step, torch.float64)).backward()
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")


def test_several_meshes_in_one_model() -> None:
    run_ranks(4, train_on_two_meshes)


class Parallel(nn.Module):
    """Two linear layers for tensor parallelism, and a norm whose gradient is a part of a sum on every rank there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def train_with_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(4)
    module, reference = Parallel().double(), Parallel().double()
    reference.load_state_dict(module.state_dict())
    parallelize_module(
        module,
        mesh["tp"],
        {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()},
    )
    fully_shard(module, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    for step in range(2):
        batch = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module.zero_grad()
        reference.zero_grad()
        module(batch.chunk(2)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")


def test_tensor_parallelism() -> None:
    run_ranks(4, train_with_tensor_parallelism)


class Explodes(torch.autograd.Function):
    """The identity; its backward raises when told to."""

    is_armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Explodes.is_armed:
            raise ValueError("a bad gradient")
        return gradient


class Fragile(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2:](Explodes.apply(self.layers[:2](x)))


def fail_in_backward() -> list[str]:
    torch.manual_seed(0)
    module, reference = Fragile().double(), Fragile().double()
    reference.load_state_dict(module.state_dict())
    shard_by_blocks(module)
    x = torch.ones(2, 8, dtype=torch.float64)
    module(x).sum().backward()
    module.zero_grad()
    Explodes.is_armed = dist.get_rank() == 1
    said = ""
    try:
        module(x).sum().backward()
    except (ValueError, errors.LockstepError) as error:
        said = f"{type(error).__name__}: {error}"
    Explodes.is_armed = False
    module.reset_iter_state()
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
    module.zero_grad()
    module(x).sum().backward()
    reference(x).sum().backward()
    assert_close(whole_gradients(module), gradients(reference), "after the reset")
    return [said]


def test_an_error_in_the_backward_of_one_rank() -> None:
    values = run_ranks(2, fail_in_backward, limit_s=300)
    assert "a bad gradient" in values[1][0]
    assert "rank 1 | reset" in values[0][0]  # the other rank learns where that one is, instead of waiting


def run_under_autocast(how: str) -> None:
    module, reference = MLP(), MLP()
    reference.load_state_dict(module.state_dict())
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            theirs.copy_(mine)
            dist.broadcast(mine, 0)
            dist.broadcast(theirs, 0)
    shard_by_blocks(module)
    called = compiled(module, how)
    x = torch.ones(2, 8)
    for side in (called, reference):
        with torch.autocast("cpu", torch.bfloat16):
            loss = side(x).float().square().mean()
        loss.backward()
    for name, gradient in whole_gradients(module).items():
        expected = gradients(reference)[name]
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(gradient, expected, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("how", MODES)
def test_autocast(how: str) -> None:
    run_ranks(2, run_under_autocast, how)


def evaluate(how: str) -> None:
    case = CASES["gpt_tied"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    shard_by_blocks(module)
    called = compiled(module, how)
    batch = case.batch(0, torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(called(batch["tokens"]), reference(batch["tokens"]))
    case.loss(called, batch).backward()
    case.loss(reference, batch).backward()
    assert_close(whole_gradients(module), gradients(reference), "trained after it was evaluated")


@pytest.mark.parametrize("how", MODES)
def test_evaluation(how: str) -> None:
    run_ranks(2, evaluate, how)


def dynamic_shapes() -> int:
    torch._dynamo.utils.counters.clear()
    module = shard_by_blocks(MLP().double())
    called = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (2, 3, 5, 7):
        called(torch.randn(size, 8, dtype=torch.float64)).sum().backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_dynamic_shapes() -> None:
    assert run_ranks(2, dynamic_shapes)[0] == 1


def gradient_of_an_input() -> None:
    """``torch.autograd.grad`` of a compiled model must not count as a backward."""
    module = shard_by_blocks(MLP().double())
    called = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(called(x).sum(), x)
    assert gradient.shape == x.shape
    assert all(p.grad is None for p in module.parameters())
    called(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert whole(module.layers[0].weight.grad).isfinite().all()


def test_gradients_of_inputs_only() -> None:
    run_ranks(2, gradient_of_an_input)


def run_compiled_autograd(how: str) -> None:
    module = shard_by_blocks(MLP())
    called = compiled(module, how)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        called(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize("how", MODES)
def test_compiled_autograd_is_refused(how: str) -> None:
    for error in expect_errors(2, [0, 1], run_compiled_autograd, how).values():
        assert "Compiled autograd runs this backward" in error.text


class Reading(nn.Module):
    """Reads a weight of an inner unit, outside of that unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers[1].weight.dtype is x.dtype  # what there is to know of it may be asked
        return self.layers[0](x) @ self.layers[1].weight.T


def read_while_sharded(how: str) -> str:
    module = shard_by_blocks(Reading())
    torch._dynamo.reset()
    called: Any = module if how == "eager" else torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        called(torch.ones(2, 6))
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("how", MODES)
def test_a_parameter_that_is_read_while_it_is_sharded(how: str) -> None:
    for said in run_ranks(2, read_while_sharded, how):
        assert "layers.1.weight" in said
        assert "unshard()" in said
        assert how == "eager" or "layers.0.weight" not in said


# ---------------------------------------------------------------- whole tensors are loaded


def load_whole() -> None:
    """By torch's functions and directly, into a model that is gathered, is not, or is on no device yet."""
    torch.manual_seed(5)
    source = GPT(num_blocks=1)
    inputs = torch.arange(SEQUENCE)[None]
    moments: dict[str, Callable[[nn.Module], Any]] = {
        "at first": lambda module: None,
        "after a forward": lambda module: module(inputs),
        "gathered by hand": lambda module: [module.unshard(), module.blocks[0].unshard()],
    }
    by_torch = partial(StateDictOptions, full_state_dict=True)
    ways: dict[str, StateDictOptions | None] = {
        "all have it": by_torch(),
        "the first has it": by_torch(broadcast_from_rank0=True),
        "load_state_dict": None,
    }
    for moment, prepare in moments.items():
        for way, options in ways.items():
            torch.manual_seed(dist.get_rank())
            module = GPT(num_blocks=1)
            for part in (module.blocks[0], module):
                fully_shard(part, reshard_after_forward=False)
            prepare(module)
            if options is None:
                state = source.state_dict()
                before = dict(state)
                module.load_state_dict(state)
                assert all(state[name] is before[name] for name in before)
            else:
                has_it = dist.get_rank() == 0 or not options.broadcast_from_rank0
                set_model_state_dict(module, source.state_dict() if has_it else {}, options=options)
            assert_close(whole_parameters(module), dict(source.named_parameters()), f"{moment}, {way}")
            torch.testing.assert_close(module(inputs), source(inputs), msg=f"{moment}, {way}")
    with torch.device("meta"):
        module = GPT(num_blocks=1)
    shard_by_blocks(module)
    module.load_state_dict({name: value.double() for name, value in source.state_dict().items()}, assign=True)
    assert all(isinstance(p, DTensor) and p.dtype is torch.float64 for p in module.parameters())
    assert_close(whole_parameters(module), dict(source.double().named_parameters()), "assigned")
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**source.state_dict(), "head.weight": torch.zeros(2, 2)})


def test_whole_tensors_are_loaded() -> None:
    run_ranks(3, load_whole)
