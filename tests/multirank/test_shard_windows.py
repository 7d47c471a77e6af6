"""When gradients of a sharded model are reduced: accumulation, several passes, unused and frozen parameters, hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import fully_shard
from lockstep.shard import exchange
from multirank.compare import assert_close
from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import CASES, GPT, MLP, shard
from multirank.shard_training import gradients, shard_by_blocks, train_and_compare, whole, whole_gradients

pytestmark = lockstep_only


def compiled(module: nn.Module, how: str) -> Any:
    if how == "eager":
        return module
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


MODES = ("eager", "compiled")
# Kinds of hooks, and whether make test tries them compiled, too: they are called alike.
HOOKS = {"allreduce": True, "bf16": False, "own_bf16": False, "int8": True, "users": False, "powersgd": True}


class Pair:
    """A sharded model and the same in one process, on the batches of all ranks."""

    def __init__(
        self, name: str = "gpt_tied", how: str = "eager", prepare: Callable[[nn.Module], Any] = shard_by_blocks
    ) -> None:
        self.case = CASES[name]
        self.module, self.reference = self.case.module(torch.float64), self.case.module(torch.float64)
        prepare(self.module)
        self.called = compiled(self.module, how)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def loss(self, step: int) -> torch.Tensor:
        return self.case.loss(self.called, shard(self.case.batch(step, torch.float64), self.rank, self.world))

    def reference_loss(self, step: int) -> torch.Tensor:
        return self.case.loss(self.reference, self.case.batch(step, torch.float64))

    def compare(self, what: str) -> None:
        assert_close(whole_gradients(self.module), gradients(self.reference), what)


def accumulate(how: str) -> None:
    pair = Pair(how=how)
    for _ in range(2):
        pair.module.zero_grad()
        pair.reference.zero_grad()
        with pair.module.no_sync():
            pair.loss(0).backward()
            assert all(
                p.grad is None for p in pair.module.parameters() if isinstance(p, torch.distributed.tensor.DTensor)
            )
            pair.loss(1).backward()
        pair.loss(2).backward()
        for step in range(3):
            pair.reference_loss(step).backward()
        pair.compare("accumulated without communication")
    pair.loss(3).backward()  # on top, with communication
    pair.reference_loss(3).backward()
    pair.compare("accumulated with communication")
    pair.module.set_requires_gradient_sync(False)
    pair.loss(4).backward()
    pair.module.set_requires_gradient_sync(True)
    pair.loss(5).backward()
    for step in (4, 5):
        pair.reference_loss(step).backward()
    pair.compare("by set_requires_gradient_sync")
    assert pair.module._lockstep_root.steps[0].num_windows == 4


@pytest.mark.parametrize("how", MODES)
def test_accumulation(how: str) -> None:
    run_ranks(2, accumulate, how)


def no_recompilation() -> int:
    pair = Pair(how="compiled")
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        with pair.module.no_sync():
            pair.loss(step).backward()
        pair.loss(step).backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_accumulation_needs_no_other_graph() -> None:
    assert run_ranks(2, no_recompilation)[0] == 1


def some_units_only() -> None:
    pair = Pair()
    first = pair.module.blocks[0]
    first.set_requires_gradient_sync(False)
    pair.loss(0).backward()
    assert all(p.grad is None for p in first.parameters())
    assert pair.module.blocks[1].up.weight.grad is not None
    first.set_requires_gradient_sync(True)
    pair.loss(1).backward()
    for step in (0, 1):
        pair.reference_loss(step).backward()
    pair.compare("a unit that was left out once")


def test_some_units_do_not_synchronise() -> None:
    run_ranks(2, some_units_only)


def several_passes(how: str) -> None:
    pair = Pair(how=how)
    losses = [pair.loss(0), pair.loss(1)]
    sum(losses).backward()
    (pair.reference_loss(0) + pair.reference_loss(1)).backward()
    pair.compare("two forwards, one backward")
    if how == "eager":
        loss = pair.loss(2)
        loss.backward(retain_graph=True)
        loss.backward()
        reference = pair.reference_loss(2)
        reference.backward(retain_graph=True)
        reference.backward()
        pair.compare("two backwards of one graph")
    first, second = pair.loss(3), pair.loss(4)
    first.backward()
    second.backward()
    for step in (3, 4):
        pair.reference_loss(step).backward()
    pair.compare("two forwards, then two backwards")


@pytest.mark.parametrize("how", MODES)
def test_several_passes(how: str) -> None:
    run_ranks(2, several_passes, how)


class Twice(nn.Module):
    """A block that runs twice, one that does not run, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](self.blocks[0](x * self.scale))
        return self.head(x)


def train_twice(how: str) -> None:
    torch.manual_seed(3)
    module, reference = Twice().double(), Twice().double()
    reference.load_state_dict(module.state_dict())
    shard_by_blocks(module)
    called = compiled(module, how)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        batch = torch.randn(6 * world, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module.zero_grad()
        reference.zero_grad()
        called(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")
    assert module.blocks[2][0].weight.grad is None
    if how == "eager":
        loss = called(torch.randn(6, 8, dtype=torch.float64)).square().mean()
        assert [num_scatters(loss) for _ in range(3)] == [4, 4, 4]  # of one graph, whose nodes stay known


def num_scatters(loss: torch.Tensor) -> int:
    """How many there are in a backward that keeps its graph; what comes after its unit has left takes another."""
    with mock.patch.object(exchange, "ScatterFlight", wraps=exchange.ScatterFlight) as flights:
        loss.backward(retain_graph=True)
    return flights.call_count


@pytest.mark.parametrize("how", MODES)
def test_a_unit_that_runs_twice_and_one_that_does_not(how: str) -> None:
    run_ranks(2, train_twice, how)


def freeze_most(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name or "down" in name)


def train_frozen(how: str) -> None:
    pair = Pair(how=how, prepare=lambda m: (freeze_most(m), shard_by_blocks(m)))
    freeze_most(pair.reference)
    for step in range(2):
        pair.loss(step).backward()
        pair.reference_loss(step).backward()
        pair.compare(f"frozen, step {step}")
    if how == "eager":
        for side in (pair.module, pair.reference):
            side.zero_grad()
            for parameter in side.parameters():
                parameter.requires_grad_(True)
        pair.module.reshard()
        for block in pair.module.blocks:
            block.reshard()
        for parameter in pair.module.parameters():
            parameter.requires_grad_(True)
        pair.loss(3).backward()
        pair.reference_loss(3).backward()
        pair.compare("unfrozen")


@pytest.mark.parametrize("how", MODES)
def test_frozen_parameters(how: str) -> None:
    run_ranks(2, train_frozen, how)


def unfreeze_what_is_compiled() -> str:
    """In all units at once: one call says so, and the next one trains all of them."""
    pair = Pair(how="compiled", prepare=lambda m: (freeze_most(m), shard_by_blocks(m)))
    pair.loss(0).backward()
    for side in (pair.module, pair.reference):
        side.requires_grad_(True)
        side.zero_grad()
    with pytest.raises(RuntimeError, match="train now") as caught:
        pair.loss(1)
    pair.loss(2).backward()
    pair.reference_loss(2).backward()
    pair.compare("unfrozen")
    return str(caught.value)


def test_unfreezing_needs_another_graph() -> None:
    text = run_ranks(2, unfreeze_what_is_compiled)[0]
    assert "blocks.0.up.weight" in text
    assert "blocks.1.up.weight" in text


def train_with_hook(kind: str, how: str, prepare: Callable[[nn.Module], Any] = shard_by_blocks) -> None:
    pair = Pair("mlp", how, prepare)
    hook: Any = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "own_bf16": (lockstep.hooks.Bf16State(), lockstep.hooks.bf16_hook),
        "int8": (lockstep.hooks.Int8State(), lockstep.hooks.int8_hook),
        "users": ("sums", users_hook),
        "powersgd": (powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    }[kind]
    pair.module.register_comm_hook(*hook)
    for step in range(3):
        pair.module.zero_grad()
        pair.reference.zero_grad()
        pair.loss(step).backward()
        pair.reference_loss(step).backward()
        if kind in ("allreduce", "users"):
            pair.compare(f"hook, step {step}")
        for name, gradient in whole_gradients(pair.module).items():
            expected = gradients(pair.reference)[name]
            assert gradient is not None
            assert expected is not None
            assert gradient.shape == expected.shape
            if kind in ("bf16", "own_bf16", "int8"):
                assert (gradient - expected).abs().max() < 0.05 * expected.abs().max() + 1e-3
    if kind == "int8":
        repeat_until_errors_cancel(pair)


def users_hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A program's own: it looks at the gradients by parameter, and reduces by two collectives."""
    assert state == "sums"
    assert len(bucket.gradients()) == len(bucket.parameters())
    flat = bucket.buffer().div_(dist.get_world_size())
    half = flat.numel() // 2
    works = [dist.all_reduce(part, async_op=True) for part in (flat[:half], flat[half:])]

    def all_of_it(_: object) -> torch.Tensor:
        works[0].wait()
        return flat

    return works[1].get_future().then(all_of_it)


def repeat_until_errors_cancel(pair: Pair) -> None:
    """With error feedback, the mean of many roundings of one gradient is closer to it than one of them is."""
    pair.reference.zero_grad()
    pair.reference_loss(0).backward()
    single = total = 0.0
    mean: dict[str, torch.Tensor] = {}
    for step in range(12):
        pair.module.zero_grad()
        pair.loss(0).backward()
        for name, gradient in whole_gradients(pair.module).items():
            assert gradient is not None
            mean[name] = mean.get(name, 0.0) + gradient / 12
            if step == 0:
                single += (gradient - gradients(pair.reference)[name]).norm().item()
    for name, gradient in mean.items():
        total += (gradient - gradients(pair.reference)[name]).norm().item()
    assert total < 0.5 * single


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(pytest.param(kind, "eager") for kind in HOOKS),
        *(
            pytest.param(kind, "compiled", marks=[] if is_chosen else pytest.mark.soak)
            for kind, is_chosen in HOOKS.items()
        ),
    ],
)
def test_communication_hooks(kind: str, how: str) -> None:
    run_ranks(2, train_with_hook, kind, how)


class TwiceCheckpointed(nn.Module):
    """Blocks that reentrant checkpoints run, in two of them, and outside too: gradients come in three passes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._all, x, use_reentrant=True)
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        return self.head(self.blocks[0](x))


def train_checkpointed(hooks: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, hook in hooks.items():
        torch.manual_seed(0)
        module, reference = TwiceCheckpointed().double(), TwiceCheckpointed().double()
        reference.load_state_dict(module.state_dict())
        shard_by_blocks(module)
        module.register_comm_hook("sums" if hook is users_hook else None, hook)
        for step in range(3):  # another number of rows in each
            batches = [torch.randn(3 + step, 8, dtype=torch.float64) for _ in range(world)]
            module.zero_grad()
            reference.zero_grad()
            module(batches[rank].requires_grad_()).square().mean().backward()
            for batch in batches:
                (reference(batch.requires_grad_()).square().mean() / world).backward()
            assert_close(whole_gradients(module), gradients(reference), f"{name}, step {step}")


def test_nothing_comes_late_for_a_hook() -> None:
    hooks = {"one collective": default_hooks.allreduce_hook, "two": users_hook}
    run_ranks(2, train_checkpointed, hooks)


def shard_with_replicas(module: nn.Module) -> None:
    shard_by_blocks(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


@pytest.mark.parametrize("kind", ["allreduce", "int8"])
def test_communication_hooks_with_replicas(kind: str) -> None:
    run_ranks(4, train_with_hook, kind, "eager", shard_with_replicas)


def free_gradients(how: str) -> None:
    import lockstep

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for child in model:
        lockstep.fully_shard(child)
    lockstep.fully_shard(model)
    called = compiled(model, how)
    for _ in range(2):
        called(torch.ones(2, 4)).sum().backward()
        storages = [p.grad.to_local().untyped_storage() for p in model.parameters()]
        model.zero_grad()
        # This list is all that holds them.
        users = [torch._C._storage_Use_Count(storage._cdata) for storage in storages]
        assert len(users) == 4
        assert set(users) == {1}, users


@pytest.mark.parametrize(("world", "how"), [(1, "eager"), (2, "eager"), (2, "model")])
def test_gradients_that_are_dropped_leave_nothing_behind(world: int, how: str) -> None:
    """A forward must not find the memory of the gradients before it still in use."""
    run_ranks(world, free_gradients, how)


def late_use() -> None:
    """A penalty on a parameter outside of every unit's forward comes late, and is reduced by itself."""
    pair = Pair("mlp")
    pair.loss(0).backward()
    weight = pair.module.layers[0].weight
    penalty = (weight * weight).sum()  # on the shards
    assert whole(penalty).item() == pytest.approx((pair.reference.layers[0].weight ** 2).sum().item())


def test_a_penalty_on_shards() -> None:
    run_ranks(2, late_use)


def other_plan() -> None:
    module = MLP()
    if dist.get_rank() == 1:
        fully_shard(module.layers[0])
    fully_shard(module)
    module(torch.randn(2, 8))


def test_ranks_with_another_plan() -> None:
    errors = expect_errors(2, [0, 1], other_plan)
    for error in errors.values():
        assert error.type_name == "Disagreement"
        assert "Ranks shard different models" in error.text
        assert "units" in error.text


def one_rank_accumulates() -> None:
    module = shard_by_blocks(MLP())
    module.set_requires_gradient_sync(True)
    module(torch.randn(2, 8)).sum().backward()
    if dist.get_rank() == 1:
        module.layers[0].set_requires_gradient_sync(False)
    module(torch.randn(2, 8)).sum().backward()


def test_ranks_with_other_units_that_synchronise() -> None:
    """It is found before the unit is gathered, and so before any gradient."""
    outcomes = expect_errors(2, [0, 1], one_rank_accumulates, limit_s=300)
    for error in outcomes.values():
        assert error.type_name == "Disagreement"
        assert "gather layers.0 (which does not synchronise" in error.text


def fail_and_go_on() -> None:
    pair = Pair("mlp")
    pair.loss(0).backward()
    pair.module.zero_grad()
    handle = pair.module.layers[2].register_forward_pre_hook(_explode)
    for _ in range(2):
        with suppress(ValueError):
            pair.loss(1)
    handle.remove()
    pair.module.reset_iter_state()
    pair.loss(2).backward()
    pair.reference_loss(2).backward()
    pair.compare("after an error in the forward")


def _explode(*_: Any) -> None:
    raise ValueError("bad input")


def test_going_on_after_an_error() -> None:
    run_ranks(2, fail_and_go_on)


def train_uneven_unused() -> None:
    train_and_compare("branches")


def test_unused_on_some_ranks() -> None:
    run_ranks(3, train_uneven_unused)


def hooks_after_accumulation() -> None:
    pair = Pair("mlp")
    seen: list[torch.Size] = []
    weight = pair.module.layers[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    pair.loss(0).backward()
    assert seen == [weight.shape]
    assert isinstance(pair.module, FSDPModule)


def test_hooks_on_shards() -> None:
    run_ranks(2, hooks_after_accumulation)


def nothing_is_kept() -> None:
    import gc
    import weakref

    module = shard_by_blocks(GPT().double())
    case = CASES["gpt_tied"]
    case.loss(module, case.batch(0, torch.float64)).backward()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_model_that_is_dropped_is_freed() -> None:
    run_ranks(2, nothing_is_kept)


def gathers_ahead() -> list[str]:
    """What is begun, and what is waited for, in the third step of a compiled model."""
    from lockstep.shard import graph_ops

    pair = Pair(how="compiled")
    for step in range(3):
        pair.loss(step).backward()
        pair.module.zero_grad()
    said: list[str] = []
    start = graph_ops.start_gathering

    def noted(store: Any, **options: Any) -> Any:
        said.append(f"begin {graph_ops._find(store.anchor)[0].name}")
        return start(store, **options)

    graph_ops.start_gathering = noted
    pair.loss(3).backward()
    graph_ops.start_gathering = start
    return said


def test_compiled_gathers_are_begun_ahead() -> None:
    """Each is begun once in each direction, in the order of the graph."""
    said = run_ranks(2, gathers_ahead)[0]
    assert said == [
        *("begin GPT", "begin blocks.0", "begin blocks.1"),
        *("begin blocks.1", "begin blocks.0"),
    ]


def observe(how: str) -> tuple[set[str], dict[str, float], Any]:
    pair = Pair(how=how)
    before = str(lockstep.explain(pair.module))
    assert before == "3 sharded unit(s); no step has ended yet"
    for step in range(2):
        pair.loss(step).backward()
    names = {interval.name for interval in pair.module.timeline.steps[-1].intervals}
    return names, pair.module.metrics(), lockstep.explain(pair.called)


@pytest.mark.parametrize("how", MODES)
def test_timeline(how: str) -> None:
    names, metrics, explained = run_ranks(2, observe, how)[0]
    assert {"gather", "gathered", "launch", "travel", "collect", "backward"} <= names
    assert ("forward" in names) == (how == "eager")
    assert metrics["lockstep/buckets"] == 3
    assert metrics["lockstep/launched_in_graph"] == (3 if how == "compiled" else 0)
    assert metrics["lockstep/exposed_ms"] >= metrics["lockstep/gathered_ms"] > 0
    root, first, last = explained.units
    assert (root.name, first.name, last.name) == ("GPT", "blocks.0", "blocks.1")
    assert [unit.reduced_in_graph for unit in explained.units] == [how == "compiled"] * 3
    assert first.gathers == 2
    assert first.gathers_in_graph == (2 if how == "compiled" else 0)
    assert first.backward_gathers_in_graph == (1 if how == "compiled" else 0)
    assert root.gathers == 1
    assert explained.exposed_gather_seconds == pytest.approx(metrics["lockstep/gathered_ms"] / 1e3)
    said = str(explained)
    assert ("gathered in compiled graphs: 1 forward, 1 backward" in said) == (how == "compiled")
    assert ("reduced by the hooks" in said) == (how == "eager")


def freeze_while_accumulating(how: str) -> None:
    """What a parameter had accumulated is reduced with the rest, though it is frozen in the last pass."""
    pair = Pair("mlp", how)
    with pair.module.no_sync():
        pair.loss(0).backward()
        pair.loss(1).backward()
    for step in (0, 1):
        pair.reference_loss(step).backward()
    for module in (pair.module, pair.reference):
        for name, parameter in module.named_parameters():
            if name == "layers.2.bias":
                parameter.requires_grad_(False)
    pair.module.layers[2]._lockstep_unit.parameters[1].sharded.requires_grad_(False)
    pair.loss(2).backward()
    pair.reference_loss(2).backward()
    pair.compare("accumulated before one was frozen")
    for step in (3, 4):
        pair.module.zero_grad()
        pair.reference.zero_grad()
        pair.loss(step).backward()
        pair.reference_loss(step).backward()
        pair.compare(f"after it was frozen, step {step}")
    assert dict(pair.module.named_parameters())["layers.2.bias"].grad is None


@pytest.mark.parametrize("how", MODES)
def test_freezing_while_gradients_accumulate(how: str) -> None:
    run_ranks(2, freeze_while_accumulating, how)


def freeze_differently(when: str) -> str:
    """Ranks that train different parameters would scatter buffers of different sizes."""
    pair = Pair("mlp", prepare=fully_shard)
    names = dict(pair.module.named_parameters())
    mine = names["layers.0.weight"] if dist.get_rank() == 0 else names["layers.2.bias"]
    if when == "at first":
        mine.requires_grad_(False)
    else:
        pair.loss(0).backward()
        if when == "each another" or dist.get_rank() == 0:
            mine.requires_grad_(False)
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        pair.loss(1).backward()
    pair.module.reset_sync_window()  # where one has begun a gather by then, the others join it now
    for parameter in names.values():
        parameter.requires_grad_(True)
    pair.module.zero_grad()
    pair.loss(2).backward()
    pair.reference_loss(2).backward()
    pair.compare("after it was mended")
    return str(caught.value)


@pytest.mark.parametrize("when", ["at first", "each another", "one rank only"])
def test_ranks_that_train_different_parameters(when: str) -> None:
    for text in run_ranks(2, freeze_differently, when):
        assert "layers.0.weight" in text
        assert ("layers.2.bias" in text) == (when != "one rank only")


def evaluate_before_looking_at_gradients(how: str) -> None:
    """After an evaluation ``parameters()`` are the shards: what walks through them finds their gradients."""
    pair = Pair("gpt_tied", how)
    for step in range(3):
        pair.module.zero_grad()
        pair.reference.zero_grad()
        pair.loss(step).backward()
        pair.reference_loss(step).backward()
        with torch.no_grad():
            pair.loss(step + 10)
        norm = nn.utils.clip_grad_norm_(pair.module.parameters(), 1e-3)
        expected = nn.utils.clip_grad_norm_(pair.reference.parameters(), 1e-3)
        torch.testing.assert_close(norm.full_tensor(), expected)
        pair.compare(f"step {step}")
        with torch.no_grad():
            pair.loss(step + 20)


@pytest.mark.parametrize("how", MODES)
def test_an_evaluation_before_gradients_are_clipped_or_dropped(how: str) -> None:
    run_ranks(2, evaluate_before_looking_at_gradients, how)
