"""TrainStep of a sharded model: the bits of a loop by hand; programs close to it; a reason where it is no program."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
NAMES = ("mlp", "accumulate", "clip_norm", "clip_value", "scaler that skips", "average", "schedule")
# What a program is made of; in a world of three a parameter of 4 rows has none on the last rank.
PROGRAMS = (
    *("mlp", "mlp, sgd", "mlp, two optimizers", "clip_norm", "clip_value", "schedule", "average", "scaler"),
    *("scaler that skips", "cnn", "gpt", "accumulate", "cnn, accumulate", "everything"),
)


def shard(module: Any) -> Any:
    import lockstep

    parts = (module.attention, module.network) if hasattr(module, "attention") else module.children()
    for child in parts:
        lockstep.fully_shard(child)
    return lockstep.fully_shard(module)


def run_uncompiled() -> None:
    """Run programs as they were traced, in this process: what is tested is the program, not the compiler."""
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph


def train(names: tuple[str, ...], mode: str) -> None:
    from program.loops import CASES, assert_close, assert_same, by_hand, by_step, make_step, set_up

    rank = dist.get_rank()
    for name in names:
        case = CASES[name]
        right = by_hand(case, set_up(case, shard), rank)
        setup = set_up(case, shard)
        step = make_step(case, setup, mode)
        found = by_step(case, setup, step, rank)
        (assert_same if mode in ("loop", "auto") else assert_close)(right, found)
        explained = step.explain()
        if mode == "auto":
            assert explained.num_program_calls == 0
            assert explained.runs == "the plain loop"
        if mode == "graph":
            assert not explained.reasons, (name, explained.reasons)
            assert explained.num_program_calls >= 19 * case.accumulate - 2
            if not name.startswith("scaler"):
                assert_windows(setup.model, 20)
            assert len({tuple(p) for p in gathered([line.rsplit(" ")[-1] for line in explained.programs])}) == 1


def gathered(mine: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def assert_windows(model: Any, num: int) -> None:
    """Windows and updates are counted as the loop counts them."""
    (step,) = model._lockstep_root.steps
    assert (step.num_windows, step.num_updates) == (num, num), (step.num_windows, step.num_updates)


@pytest.mark.parametrize("world", [2, 3])
def test_the_loop_has_the_bits_of_a_loop_by_hand(world: int) -> None:
    run_ranks(world, train, NAMES, "loop")


def test_where_it_is_no_program_the_loop_runs() -> None:
    run_ranks(2, train, ("accumulate",), "auto")


def compile_eagerly() -> None:
    compiled = torch.compile
    torch.compile = lambda *args, **kwargs: compiled(*args, **{**kwargs, "backend": "aot_eager"})  # type: ignore[assignment]
    train(("mlp", "accumulate"), "compiled")


def test_compiled_is_close_to_the_loop() -> None:
    run_ranks(2, compile_eagerly, preload=("torch._dynamo", "torch._functorch.aot_autograd"))


# ---------------------------------------------------------------- programs


def train_uncompiled(names: tuple[str, ...]) -> None:
    run_uncompiled()
    train(names, "graph")


@pytest.mark.parametrize(("world", "names"), [(2, PROGRAMS), (3, ("mlp", "clip_norm", "everything"))])
def test_a_program_is_close_to_the_loop(world: int, names: tuple[str, ...]) -> None:
    run_ranks(world, train_uncompiled, names)


@pytest.mark.parametrize(("world", "name"), [(2, "gpt"), (3, "clip_norm")])
def test_a_compiled_program_is_close_to_the_loop(world: int, name: str) -> None:
    """In a world of three ranks compile different kernels, since their shards have other sizes."""
    run_ranks(world, train, (name,), "graph")


# ---------------------------------------------------------------- captured, on a machine that stands in for a GPU


def capture_on_a_stand_in(names: tuple[str, ...], fails_on: int | None = None) -> list[tuple[int, int]]:
    from program.fakes import captured_on_a_stand_in
    from program.loops import CASES, assert_same, by_hand, by_step, make_step, set_up

    rank, counts = dist.get_rank(), []
    for name in names:
        case = CASES[name]
        right = by_hand(case, set_up(case, shard, "fused"), rank)
        setup = set_up(case, shard, "fused")
        step = make_step(case, setup, "captured")
        machine = captured_on_a_stand_in(step, setup)
        if rank == fails_on:
            machine.refusal = RuntimeError("this one cannot")
        assert_same(right, by_step(case, setup, step, rank))
        assert_windows(setup.model, 20)
        counts.append((machine.num_records, machine.num_replays))
        assert not any(team.gather_log.is_silent for team in setup.model._lockstep_root.teams)
    return counts


@pytest.mark.parametrize("world", [1, 3])
def test_replays_have_the_bits_of_the_loop(world: int) -> None:
    names = ("mlp", "gpt", "clip_value", "schedule", "average")
    for counts in run_ranks(world, capture_on_a_stand_in, names):
        assert all(records == 1 and replays > 12 for records, replays in counts), counts


def test_a_capture_that_fails_on_one_rank_leaves_all_in_step() -> None:
    counts = run_ranks(2, capture_on_a_stand_in, ("mlp",), 1)
    assert counts == [[(1, 1)], [(1, 0)]]  # the others replay that step, and walk through the loop from then on


def replay_around_evaluations() -> None:
    """What an evaluation has gathered is gathered anew after a replay has updated the shards."""
    import lockstep
    from program.fakes import captured_on_a_stand_in
    from program.loops import CASES, Setup, batch_of, loss_of

    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    ends = []
    for is_captured in (False, True):
        module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        module.load_state_dict(plain.state_dict())
        model = shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode="captured" if is_captured else "loop")
        if is_captured:
            machine = captured_on_a_stand_in(step, Setup(module, model, [optimizer], [], None))
        for index in range(10):
            step(batch_of(index, dist.get_rank()))
            with torch.no_grad():
                ends.append(model(batch_of(100)["x"]).clone())
    assert machine.num_replays > 5, CASES
    for right, found in zip(ends[:10], ends[10:], strict=True):
        assert torch.equal(right, found)


def test_an_evaluation_after_a_replay_sees_the_updated_weights() -> None:
    run_ranks(2, replay_around_evaluations)


def change_the_divisor() -> tuple[int, int]:
    """A setting of a unit that a program was made with: another value means another program."""
    import lockstep
    from program.fakes import captured_on_a_stand_in
    from program.loops import Setup, batch_of, loss_of

    ends = []
    for is_captured in (False, True):
        torch.manual_seed(3)
        module = nn.Linear(6, 4)
        model = lockstep.fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode="captured" if is_captured else "loop")
        if is_captured:
            machine = captured_on_a_stand_in(step, Setup(module, model, [optimizer], [], None))
        for index in range(16):
            if index == 6:
                model.set_gradient_divide_factor(4.0)
            step(batch_of(index, dist.get_rank()))
        ends.append(model.weight.full_tensor())
    assert torch.equal(*ends)
    return machine.num_records, machine.num_replays


def test_another_setting_of_a_unit_means_another_program() -> None:
    assert all(records == 2 and replays > 6 for records, replays in run_ranks(2, change_the_divisor))


def say_why_not_captured() -> list[str]:
    import lockstep
    from program.fakes import captured_on_a_stand_in
    from program.loops import Setup, batch_of, loss_of

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def keep_storage(model: Any) -> None:
        model.set_keep_unsharded_storage(True)

    def gather_by_hand(model: Any) -> None:
        from program.fakes import SilentGather

        model.set_custom_all_gather(SilentGather())

    found = []
    for module, change in (
        (Partly(), lambda m: None),
        (nn.Linear(6, 4), keep_storage),
        (nn.Linear(6, 4), gather_by_hand),
    ):
        model = lockstep.fully_shard(module)
        change(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode="captured")
        machine = captured_on_a_stand_in(step, Setup(module, model, [optimizer], [], None))
        for index in range(6):
            step(batch_of(index, dist.get_rank()))
        assert machine.num_replays == machine.num_records == 0
        found += step.explain().reasons
    return found


def test_what_cannot_be_captured_says_why() -> None:
    for found in run_ranks(2, say_why_not_captured):
        assert any("unused.weight" in reason for reason in found), found
        assert any("set_keep_unsharded_storage()" in reason for reason in found), found
        assert any("can_be_captured" in reason for reason in found), found


class Uneven(nn.Module):
    """Dimensions that no number of ranks divides, a parameter with fewer rows than ranks, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(3))
        self.last = nn.Linear(7, 1)
        self.blocks[0][0].weight.requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if index == 1 else block(x))
        return self.last(x)


def uneven_loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def uneven_batch(index: int, rank: int, size: int = 4) -> Tensor:
    return torch.randn(size, 7, generator=torch.Generator().manual_seed(10 * index + rank))


def make_uneven(**options: Any) -> tuple[Any, Any]:
    import lockstep

    torch.manual_seed(0)
    model = lockstep.fully_shard(Uneven(), units="auto", **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def whole_parameters(model: Any) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def assert_all_close(right: dict[str, Tensor], found: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert set(right) == set(found)
    for name, value in right.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_uneven(**options: Any) -> None:
    """Against one process that has the batches of all ranks; and how often each unit was gathered."""
    import lockstep

    run_uncompiled()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Uneven()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = make_uneven(**options)
    step = lockstep.TrainStep(model, optimizer, uneven_loss, mode="graph", clip_norm=0.3)
    for index in range(20):
        step(uneven_batch(index, rank))
        theirs.zero_grad()
        uneven_loss(alone, torch.cat([uneven_batch(index, r) for r in range(world)])).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        theirs.step()
    assert not step.explain().reasons, step.explain()
    assert step.explain().num_program_calls == 19, str(step.explain())
    torch.testing.assert_close(step.grad_norm, norm, rtol=1e-4, atol=1e-5)
    assert_all_close({name: p.detach() for name, p in alone.named_parameters()}, whole_parameters(model))
    counts = {
        unit.name: (unit.last_gathers.total, unit.last_gathers.in_graph_backward) for unit in model._lockstep_root.units
    }
    frees = options.get("reshard_after_forward") is not False
    assert all(counts[f"blocks.{index}"] == ((2, 1) if frees else (1, 0)) for index in range(3)), counts
    assert len(set(map(str, gathered(step.explain().programs)))) == 1
    assert_order(step._runner.programs[0].graph, gathers_again=frees)


def assert_order(graph: Any, *, gathers_again: bool) -> None:
    """The first unit's gradients leave before the last one's backward begins; collectives have one order."""
    operators = torch.ops.lockstep
    kinds = {operators.program_gather.default: "gather", operators.program_launch.default: "launch"}
    nodes = [node for node in graph.graph.nodes if node.target in kinds]
    order = [kinds[node.target] for node in nodes]
    if gathers_again:
        assert order.index("launch") < len(order) - 1 - order[::-1].index("gather"), order
    for before, after in itertools.pairwise(nodes):
        assert any(source is before or before in source.args for source in after.all_input_nodes), (before, after)


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_and_frozen_parameters_against_one_process(world: int) -> None:
    run_ranks(world, train_uneven)


def test_units_that_stay_whole_are_gathered_once() -> None:
    run_ranks(2, train_uneven, reshard_after_forward=False)


def train_with_everything_around() -> None:
    """Evaluations, a checkpoint, another shape of batch, freezing and hand-made steps come between programs."""
    import lockstep

    run_uncompiled()
    rank = dist.get_rank()
    ends = []
    for mode in ("loop", "graph"):
        model, optimizer = make_uneven()
        step = lockstep.TrainStep(model, optimizer, uneven_loss, mode=mode, clip_value=0.05)
        seen = []
        saved: Any = None
        for index in range(24):
            if index == 12:
                saved = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
            if index == 16:
                parts = [(model.get_parameter(name), value) for name, value in saved.items()]
                with torch.no_grad():
                    for parameter, value in parts:
                        shares = value.chunk(dist.get_world_size())
                        parameter.to_local().copy_(shares[rank] if rank < len(shares) else value[:0])
            if index == 18:
                model.blocks[0][0].weight.requires_grad_(True)
            seen.append(step(uneven_batch(index, rank, size=3 if index in (5, 6, 7, 13) else 4)))
            if index % 3 == 0:
                with torch.no_grad():
                    model.eval()
                    seen.append(model(uneven_batch(100, rank)).sum())
                    model.train()
            if index == 9:
                optimizer.zero_grad()
                model(uneven_batch(200, rank)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(({f"value {i}": value for i, value in enumerate(seen)}, whole_parameters(model)))
        explained = step.explain()
    assert not explained.reasons, explained
    assert explained.num_program_calls >= 18, explained
    for right, found in zip(*ends, strict=True):
        assert_all_close(right, found)


@pytest.mark.parametrize("world", [3])
def test_what_comes_between_programs(world: int) -> None:
    run_ranks(world, train_with_everything_around)


# Sizes of the micro-batches of each window: every mix of what has a program by then and what has none.
WINDOWS = ((4, 4, 4), (4, 4, 4), (4, 4, 4), (3, 4, 4), (4, 2, 4), (4, 4, 2), (2, 2, 4), (4, 3, 3), (5, 4, 5), (4, 4, 4))


def train_in_mixed_windows() -> None:
    """Programs and the loop add to the same sums; a parameter is frozen within a window, and trains again later."""
    import lockstep

    run_uncompiled()
    rank = dist.get_rank()
    ends = []
    for mode in ("loop", "graph"):
        model, optimizer = make_uneven()
        step = lockstep.TrainStep(model, optimizer, uneven_loss, mode=mode, accumulate=3, clip_norm=0.3)
        losses = {}
        for window, sizes in enumerate(WINDOWS):
            for index, size in enumerate(sizes):
                model.last.weight.requires_grad_(not (window == 7 and index > 0))
                losses[f"{window} {index}"] = step(uneven_batch(10 * window + index, rank, size))
        ends.append((losses, whole_parameters(model)))
        assert_windows(model, len(WINDOWS))
    explained = step.explain()
    assert not explained.reasons, explained
    assert explained.num_program_calls > 8, explained
    assert explained.num_loop_calls > 8, explained
    for right, found in zip(*ends, strict=True):
        assert_all_close(right, found)


@pytest.mark.parametrize("world", [3])
def test_programs_and_the_loop_in_one_window(world: int) -> None:
    run_ranks(world, train_in_mixed_windows)


def train_in_half(reduce: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import lockstep

    run_uncompiled()
    rank = dist.get_rank()
    ends = []
    for mode in ("loop", "graph"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        model, optimizer = make_uneven(mp_policy=policy)
        step = lockstep.TrainStep(model, optimizer, uneven_loss, mode=mode)
        for index in range(10):
            step(uneven_batch(index, rank))
        ends.append(whole_parameters(model))
    assert step.explain().num_program_calls == 9, step.explain()
    assert_all_close(*ends, tolerance=1e-2)


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduced in float32", "reduced in bfloat16"])
def test_mixed_precision(reduce: Any) -> None:
    run_ranks(2, train_in_half, reduce)


# ---------------------------------------------------------------- no programs


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def penalised_loss(model: Any, batch: Tensor) -> Tensor:
    """Reads a parameter of a unit that is not gathered then."""
    return model(batch).square().mean() * (1 + model.inner.weight.detach().full_tensor().mean())


class OfMatrices(torch.optim.SGD):
    pass


def refuse() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    import lockstep

    run_uncompiled()
    rank = dist.get_rank()

    def steps(model: Any, optimizer: Any, loss: Any = uneven_loss, num: int = 4, **options: Any) -> Any:
        step = lockstep.TrainStep(model, optimizer, loss, mode="graph", **options)
        for index in range(num):
            step(uneven_batch(index, rank))
        return step.explain()

    def sharded(kind: Any = Penalised) -> Any:
        torch.manual_seed(0)
        module = kind()
        lockstep.fully_shard(module.inner)
        return lockstep.fully_shard(module)

    # What is only a part of itself there is never taken for a constant.
    model = sharded()
    found = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), penalised_loss)
    assert found.num_program_calls == 0
    assert "inner.weight is read outside of the forward of its unit" in found.reasons[0], found
    # Optimizers that may look at whole matrices.
    model = sharded()
    found = steps(model, OfMatrices(model.parameters(), lr=0.01))
    assert found.num_program_calls == 0
    assert "OfMatrices is not known to look at each element by itself" in found.reasons[0], found
    # One rank alone cannot: all walk through the loop.
    model = sharded()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), uneven_loss, mode="graph")
    for index in range(6):
        step(uneven_batch(index, rank, size=4 + (index % 2 if rank else 0)))
    counts = gathered((step.explain().num_program_calls, step.explain().num_loop_calls))
    assert len(set(counts)) == 1
    # Settings of the moment.
    for change, words in (
        (lambda m: m.set_nonfinite("skip"), "nonfinite='skip'"),
        (lambda m: m.set_sync_buffers(), "set_sync_buffers()"),
        (lambda m: m.set_reshard_after_backward(False), "set_reshard_after_backward(False)"),
        (lambda m: m.register_comm_hook(None, allreduce_hook), "a communication hook"),
    ):
        model = sharded()
        change(model)
        found = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert found.num_program_calls == 0
        assert words in found.reasons[0], found
    # What a model is.
    for options, words in (
        ({"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))}, "replicas (a 2D mesh)"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "offloaded"),
        ({"ignored_params": "last.bias"}, "not sharded with the rest: last.bias"),
    ):
        module = Penalised()
        if "ignored_params" in options:
            options["ignored_params"] = {module.get_parameter(options["ignored_params"])}
        model = lockstep.fully_shard(module, **options)
        found = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert found.num_program_calls == 0
        assert any(words in reason for reason in found.reasons), found


def test_what_is_refused_runs_the_loop() -> None:
    run_ranks(2, refuse)
