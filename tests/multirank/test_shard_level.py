"""Going on after an error that ranks have met at different places: their gathers are paired up again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

import lockstep
from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.shard_training import gradients, shard_by_blocks, whole_gradients

pytestmark = lockstep_only


class Mine(torch.autograd.Function):
    """The identity; its backward raises where it is armed."""

    is_armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Mine.is_armed:
            raise ValueError("a bad gradient")
        return gradient


class Fragile(nn.Module):
    """Equal layers, so that gathers of different ones would be paired up without anybody noticing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.fails_at = self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.skipped:
                continue
            _fail(self, number)
            x = torch.tanh(layer(x))
            if number == 1:
                x = Mine.apply(x)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]


@torch._dynamo.disable
def _fail(module: Fragile, number: int) -> None:
    if module.fails_at == number:
        raise KeyError("bad input")


def two_collectives(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Half of the buffer, and when that is there, the other half."""
    flat = bucket.buffer().div_(dist.get_world_size())
    first, second = flat.tensor_split(2)

    def go_on(_: Any) -> Any:
        dist.all_reduce(second)
        return flat

    return dist.all_reduce(first, async_op=True).get_future().then(go_on)  # type: ignore[union-attr]


class Run:
    def __init__(self, how: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = Fragile().double()
        self.reference = copy.deepcopy(self.module)
        shard_by_blocks(self.module, **options)
        torch._dynamo.reset()
        self.called: Any = torch.compile(self.module, backend="aot_eager") if how == "compiled" else self.module
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @staticmethod
    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))

    def backward(self, step: int) -> None:
        self.called(self.batch(self.rank, step)).square().mean().backward()

    def compare(self, step: int) -> None:
        self.module.zero_grad()
        self.reference.zero_grad()
        self.backward(step)
        for rank in range(self.world):
            (self.reference(self.batch(rank, step)).square().mean() / self.world).backward()
        assert_close(whole_gradients(self.module), gradients(self.reference), f"step {step}")


def fail_at_once(how: str) -> None:
    """Nothing is foreseen yet: in the first step, and in the one after a reset."""
    run = Run(how)
    for step in range(2):
        is_bad = run.rank == 1
        run.module.fails_at = 1 if is_bad else -1
        with pytest.raises(KeyError if is_bad else lockstep.errors.LockstepError):
            run.backward(step)
        run.module.fails_at = -1
        run.module.reset_sync_window()
    run.compare(2)
    run.compare(3)


def test_an_error_on_one_rank_in_the_first_step() -> None:
    run_ranks(2, fail_at_once, "eager", limit_s=300)


def fail_on_one(how: str, replicas: int = 1, keepers: int = 0, hook: str = "") -> None:
    options: dict[str, Any] = {"reshard_after_forward": keepers} if keepers else {}
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    run = Run(how, **options)
    if hook:
        run.module.register_comm_hook(None, allreduce_hook if hook == "one collective" else two_collectives)
    run.compare(0)
    run.compare(1)
    for step, place in enumerate((0, 2, "backward"), 2):
        is_bad = run.rank == 1
        if place == "backward":
            Mine.is_armed = is_bad
        elif is_bad:
            run.module.fails_at = int(place)
        with pytest.raises((KeyError, ValueError) if is_bad else lockstep.errors.LockstepError):
            run.backward(step)
        run.module.fails_at, Mine.is_armed = -1, False
        run.module.reset_sync_window()
        run.compare(step)
        run.compare(step + 10)
    # A unit that one rank leaves out may be gathered ahead there, and is then missed a step later, or not at all.
    run.module.skipped = 1 if run.rank == 1 else -1
    with suppress(lockstep.errors.LockstepError):
        run.backward(20)
    run.module.skipped = -1
    run.module.reset_sync_window()
    run.compare(20)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_an_error_on_one_rank(how: str) -> None:
    run_ranks(2, fail_on_one, how, limit_s=300)


def test_an_error_on_one_rank_of_replicas() -> None:
    run_ranks(2, fail_on_one, "eager", 2, limit_s=300)


def test_an_error_on_one_rank_where_some_ranks_keep_the_whole() -> None:
    run_ranks(4, fail_on_one, "eager", 1, 2, limit_s=300)


@pytest.mark.parametrize("hook", ["one collective", "two"])
def test_an_error_on_one_rank_with_a_hook(hook: str) -> None:
    run_ranks(2, fail_on_one, "eager", 1, 0, hook, limit_s=300)


def run_models_in_another_order(how: str) -> str:
    """Two models on the same ranks, which one rank runs the other way round."""
    torch.manual_seed(0)
    modules = [Shuffled().double(), Shuffled().double()]
    reference = copy.deepcopy(modules)
    called: list[Any] = [shard_by_blocks(module) for module in modules]
    if how == "compiled":
        called = [torch.compile(module, backend="aot_eager") for module in called]
    x = Run.batch(0, 0)

    def run(order: Sequence[int]) -> None:
        for number in order:
            modules[number].zero_grad()
            called[number](x).sum().backward()

    run((0, 1))
    run((0, 1))
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        run((1, 0) if dist.get_rank() == 1 else (0, 1))
    for module in modules:
        module.reset_sync_window()
    run((1, 0))
    run((0, 1))
    for module, plain in zip(modules, reference, strict=True):
        plain(x).sum().backward()
        assert_close(whole_gradients(module), gradients(plain), "after models in another order")
    return str(caught.value)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_models_in_another_order_on_one_rank(how: str) -> None:
    for said in run_ranks(2, run_models_in_another_order, how):
        assert "rank 1" in said
        assert "gathers of sharded units so far" in said


class Uneven(nn.Module):
    """Units of different sizes: a gather that is paired with another one's ends the process in gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 4), nn.Linear(4, 32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def one_more(how: str, what: str, replicas: int) -> str:
    torch.manual_seed(0)
    module = Uneven().double()
    reference = copy.deepcopy(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    shard_by_blocks(module, mesh=mesh)
    called: Any = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    x = Run.batch(0, 0)
    for number in range(3):
        called(x).sum().backward()
        module.zero_grad()
        for _ in range(number):  # an evaluation of all ranks is nobody's fault
            with torch.inference_mode():
                module(x)

    def do_more() -> None:
        if rank == 1 and what == "unshard":
            module.layers[2].unshard()  # type: ignore[operator]
        elif rank == 1:
            with torch.set_grad_enabled(what == "forward"):
                called(x)
        called(x).sum().backward()

    with pytest.raises(lockstep.errors.Disagreement) as caught:
        do_more()
    module.reset_sync_window()
    module.zero_grad()
    called(x).sum().backward()
    reference(x).sum().backward()
    assert_close(whole_gradients(module), gradients(reference), "after one more")
    return str(caught.value)


def differ_in_one_thing() -> dict[str, str]:
    """One rank does one thing else; all hear of it within seconds, and go on."""
    torch.manual_seed(0)
    module = Uneven().double()
    reference = copy.deepcopy(module)
    shard_by_blocks(module, reshard_after_forward=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x, is_other = Run.batch(0, 0), dist.get_rank() == 1

    def step(what: str = "") -> None:
        optimizer.zero_grad()
        loss = module(x).sum()
        if what != "no backward":
            loss.backward()
        optimizer.step()

    undo: dict[str, Callable[[], Any]] = {
        "a unit that is freed": lambda: module.layers[1].set_reshard_after_forward(False),
        "buffers": lambda: module.set_sync_buffers(False),
        "a divisor": lambda: setattr(module.layers[1]._lockstep_unit, "divisor", None),
        "one group": lambda: module.set_separate_reduce_scatter_group(True),
    }
    do: dict[str, Callable[[], Any]] = {
        "a unit that is freed": lambda: module.layers[1].set_reshard_after_forward(True),
        "buffers": lambda: module.set_sync_buffers(),
        "a divisor": lambda: module.layers[1].set_gradient_divide_factor(1.0),
        "one group": lambda: module.set_separate_reduce_scatter_group(False),
        "a hook": lambda: module.register_comm_hook(None, allreduce_hook),
    }

    def differ(what: str) -> None:
        if is_other and what in do:
            do[what]()
        for _ in range(2):
            step(what if is_other else "")

    said = {}
    for what in ("no backward", *do):
        for _ in range(2):
            step()
        with pytest.raises(lockstep.errors.Disagreement) as caught:
            differ(what)
        said[what] = str(caught.value)
        if is_other and what in undo:
            undo[what]()
        module.reset_sync_window(weights_are_equal=True)
    optimizer.zero_grad()
    module(x).sum().backward()
    reference(x).sum().backward()
    assert_close(whole_gradients(module), gradients(reference), "after all of it")
    return said


def test_one_rank_that_differs_in_one_thing() -> None:
    for said in run_ranks(2, differ_in_one_thing):
        for what, words in {
            "no backward": "rank 1 | is about to gather layers.0",
            "a unit that is freed": "rank 1 | is about to gather layers.1",
            "buffers": "buffers are synchronised",
            "a divisor": "layers.1 by 1",
            "one group": "which is scattered on the group that gathers",
            "a hook": "register_comm_hook(allreduce_hook)",
        }.items():
            assert words in said[what], (what, said[what])


@pytest.mark.parametrize(
    ("how", "what", "replicas"),
    [
        ("eager", "forward", 1),
        ("eager", "evaluation", 1),
        ("eager", "evaluation", 2),
        ("eager", "unshard", 1),
        ("compiled", "evaluation", 1),
    ],
)
def test_one_more_on_one_rank(how: str, what: str, replicas: int) -> None:
    for said in run_ranks(2 * replicas, one_more, how, what, replicas, limit_s=300):
        assert "rank 1" in said
        assert "gathers of sharded units so far" in said


def break_all(syncs: bool) -> str:
    """A backward that raised on all ranks, without reset_sync_window(): nothing is mixed up in silence."""
    run = Run("eager")
    run.compare(0)
    Mine.is_armed = True
    run.module.set_requires_gradient_sync(syncs)
    with pytest.raises(ValueError, match="a bad gradient"):
        run.backward(1)
    run.module.set_requires_gradient_sync(True)
    Mine.is_armed = False
    if not syncs:
        run.compare(2)
        return ""
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        run.backward(2)
    run.module.reset_sync_window()
    run.compare(3)
    return str(caught.value)


@pytest.mark.parametrize("syncs", [True, False])
def test_a_broken_backward_that_is_ignored(syncs: bool) -> None:
    for said in run_ranks(2, break_all, syncs, limit_s=300):
        assert ("layers.0.weight" in said) == syncs


class Shuffled(Fragile):
    """Layers of equal size, in an order of its own on each rank once it is told so."""

    is_shuffled = False

    def forward(self, x: Tensor) -> Tensor:
        order = (1, 0, 2, 3) if self.is_shuffled else (0, 1, 2, 3)
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return self.head(x)  # type: ignore[no-any-return]


def run_in_another_order() -> str:
    """Gathers of different layers are paired up, and nothing but the comparison of ranks can tell."""
    torch.manual_seed(0)
    module = Shuffled().double()
    shard_by_blocks(module)
    x = Run.batch(0, 0)
    module(x).sum().backward()
    module.is_shuffled = dist.get_rank() == 1
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        module(x).sum().backward()
    return str(caught.value)


def test_units_in_another_order_on_one_rank() -> None:
    for said in run_ranks(2, run_in_another_order, limit_s=300):
        assert "gathers of sharded units so far" in said
