"""TrainStep on several ranks: the loop has the bits of a loop by hand, a program is close to it, ranks may differ."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._functorch.aot_autograd")
ONE_EACH = 1e-5  # so that every parameter has a bucket of its own
NAMES = ("accumulate", "clip_norm", "scaler that skips", "cnn, accumulate", "everything")


def uncompiled() -> None:
    """Run programs as they were traced: what is tested is the program, not the compiler."""
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph


def wrap(module: Any) -> Any:
    import lockstep

    return lockstep.DDP(module, bucket_cap_mb=ONE_EACH)


def train(names: tuple[str, ...], mode: str, compiles: bool = False) -> list[str]:
    from program.loops import CASES, assert_close, assert_same, by_hand, by_step, make_step, set_up

    if not compiles:
        uncompiled()
    rank, digests = dist.get_rank(), []
    for name in names:
        case = CASES[name]
        right = by_hand(case, set_up(case, wrap), rank)
        setup = set_up(case, wrap)
        step = make_step(case, setup, mode)
        found = by_step(case, setup, step, rank)
        (assert_same if mode in ("loop", "auto") else assert_close)(right, found)
        assert setup.model.step.num_windows == 20
        assert setup.model.step.num_updates == 20
        if mode == "graph":
            assert not step.explain().reasons
            assert step.explain().num_program_calls >= 18 * case.accumulate
            digests += [program.digest for program in step._runner.programs]
        parameters = torch.cat([p.detach().flatten() for p in setup.module.parameters()])
        everyones = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, parameters)
        assert all(torch.equal(parameters, other) for other in everyones)
    return digests


@pytest.mark.parametrize("world", [3])
def test_the_loop_has_the_bits_of_a_loop_by_hand(world: int) -> None:
    run_ranks(world, train, NAMES, "loop")


@pytest.mark.parametrize("world", [3])
def test_a_program_is_close_to_the_loop_and_the_same_on_all_ranks(world: int) -> None:
    digests = run_ranks(world, train, NAMES, "graph", preload=PRELOAD)
    assert all(mine == digests[0] for mine in digests)


def test_a_compiled_program_on_two_ranks() -> None:
    run_ranks(2, train, ("everything",), "graph", True, preload=PRELOAD)


def test_auto_says_that_gloo_is_not_captured() -> None:
    run_ranks(2, train, ("mlp",), "auto")


# ---------------------------------------------------------------- ranks that differ


def read_the_rank() -> str:
    import lockstep
    from program.loops import CASES, batch_of, loss_of, set_up

    uncompiled()
    setup = set_up(CASES["mlp"], wrap)

    def loss(model: Any, batch: Any) -> Any:
        loss = loss_of(model, batch)[0]
        return loss * 2 if dist.get_rank() else loss.abs()

    step = lockstep.TrainStep(setup.model, setup.optimizers, loss, mode="graph")
    for index in range(3):
        step(batch_of(index))
    dist.barrier()
    return str(step.explain())


def test_a_rank_that_is_baked_into_a_program_is_named() -> None:
    for text in run_ranks(3, read_the_rank, preload=PRELOAD):
        assert text.count("rank is baked in at test_program_steps.py:") == 1


def fall_back_on_one_rank() -> None:
    """One rank cannot make a program (its batches are of ever new shapes): all of them walk, and have the same bits."""
    from program.loops import CASES, assert_close, batch_of, make_step, set_up

    uncompiled()
    rank, case, ends = dist.get_rank(), CASES["accumulate"], []
    for mode in ("loop", "graph"):
        setup = set_up(case, wrap)
        step = make_step(case, setup, mode, max_programs=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for index in range(32):
                step(batch_of(index, rank, size=2 + index % 7 if rank == 1 else 5))
        ends.append(setup.tensors())
    calls = step.explain()
    assert rank == 1 or "because rank 1 had no program for them" in str(calls)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (calls.num_loop_calls, calls.num_program_calls, ends[1]))
    assert len({counts[:2] for counts in everyones}) == 1
    assert calls.num_loop_calls > 20
    assert calls.num_program_calls > 0
    for _, _, tensors in everyones:
        assert all(torch.equal(tensors[name], ends[1][name]) for name in tensors if "loss" not in name)
    assert_close(*ends)


def test_a_rank_that_falls_back_stays_in_step() -> None:
    run_ranks(3, fall_back_on_one_rank, preload=PRELOAD)


def train_unevenly(mode: str, num_batches: list[int]) -> None:
    """One rank has fewer batches, or none at all."""
    from program.loops import CASES, assert_same, batch_of, loss_of, make_step, set_up

    uncompiled()
    rank, case, ends = dist.get_rank(), CASES["mlp"], []
    for by_hand in (True, False):
        setup = set_up(case, wrap)
        step = make_step(case, setup, mode)
        with setup.model.join():
            for index in range(num_batches[rank]):
                if by_hand:
                    setup.optimizers[0].zero_grad()
                    loss_of(setup.model, batch_of(index, rank))[0].backward()
                    setup.optimizers[0].step()
                else:
                    step(batch_of(index, rank))
        ends.append(setup.tensors())
    if num_batches[rank] and mode != "loop":
        assert "join()" in step.explain().reasons[0]
    assert_same(*ends)


@pytest.mark.parametrize("mode", ["loop", "graph", "auto"])
def test_ranks_that_run_out_of_data(mode: str) -> None:
    run_ranks(2, train_unevenly, mode, [4, 0])


def make_differently(what: str) -> None:
    from program.loops import CASES, batch_of, make_step, set_up

    case = CASES["mlp"]
    setup = set_up(case, wrap)
    if what == "mode":
        step = make_step(case, setup, "graph" if dist.get_rank() == 1 else "loop")
    else:
        step = make_step(CASES["accumulate"] if dist.get_rank() == 1 else case, setup, "loop")
    step(batch_of(0))


@pytest.mark.parametrize(("what", "values"), [("mode", ("graph", "loop")), ("accumulate", ("1", "4"))])
def test_a_step_that_was_made_differently_is_an_error_on_all_ranks(what: str, values: tuple[str, str]) -> None:
    errors = expect_errors(2, [0, 1], make_differently, what)
    for error in errors.values():
        assert error.type_name == "Disagreement"
        assert f"another {what}" in error.text
        assert all(value in error.text for value in values)


def run_by_hand_on_one_rank() -> None:
    from program.loops import CASES, batch_of, loss_of, make_step, set_up

    case = CASES["mlp"]
    setup = set_up(case, wrap)
    if dist.get_rank() == 0:
        make_step(case, setup, "loop")(batch_of(0))
    else:
        loss_of(setup.model, batch_of(0))[0].backward()


def test_a_rank_that_runs_no_step_is_told() -> None:
    errors = expect_errors(2, [0, 1], run_by_hand_on_one_rank)
    assert all("TrainStep" in error.text for error in errors.values())


# ---------------------------------------------------------------- captured, on a machine that stands in for a GPU


def capture_on_a_stand_in(sizes: dict[int, list[int]]) -> tuple[int, int]:
    """Ranks that see other shapes capture at other times; all have the loop's result, and none waits for ever."""
    from program.fakes import captured_on_a_stand_in
    from program.loops import CASES, assert_same, batch_of, make_step, set_up

    rank, case, ends = dist.get_rank(), CASES["accumulate"], []
    machine: Any = None
    for is_captured in (False, True):
        setup = set_up(case, wrap, "fused")
        step = make_step(case, setup, "captured" if is_captured else "loop")
        if is_captured:
            machine = captured_on_a_stand_in(step, setup)
        for index in range(48):
            step(batch_of(index, rank, size=sizes[rank][index % len(sizes[rank])]))
        ends.append(setup.tensors())
        assert setup.model.step.num_windows == setup.model.step.num_updates == 12
    assert_same(*ends)
    return machine.num_records, machine.num_replays


@pytest.mark.parametrize("world", [3])
def test_captured_ranks_have_the_bits_of_the_loop(world: int) -> None:
    counts = run_ranks(world, capture_on_a_stand_in, {rank: [5] for rank in range(world)})
    assert all(records == 3 and replays > 20 for records, replays in counts)


def test_ranks_with_other_shapes_replay_together_or_not_at_all() -> None:
    counts = run_ranks(3, capture_on_a_stand_in, {0: [5], 1: [5, 3], 2: [5, 5, 4]})
    assert len({replays for _, replays in counts}) == 1
    assert counts[0][1] > 0
    assert counts[1][0] > counts[0][0]


def fail_to_capture_on_one_rank() -> tuple[int, int]:
    from program.fakes import captured_on_a_stand_in
    from program.loops import CASES, assert_same, by_hand, by_step, make_step, set_up

    rank, case = dist.get_rank(), CASES["mlp"]
    right = by_hand(case, set_up(case, wrap, "fused"), rank)
    setup = set_up(case, wrap, "fused")
    step = make_step(case, setup, "captured")
    machine = captured_on_a_stand_in(step, setup)
    if rank == 1:
        machine.refusal = RuntimeError("this one cannot")
    assert_same(right, by_step(case, setup, step, rank))
    assert setup.model.step.num_windows == 20
    return machine.num_records, machine.num_replays


def test_a_capture_that_fails_on_one_rank_leaves_all_in_step() -> None:
    counts = run_ranks(2, fail_to_capture_on_one_rank)
    assert counts == [(1, 1), (1, 0)]  # the others replay that step, and walk through the loop from then on


def drift_apart() -> None:
    from program.fakes import captured_on_a_stand_in
    from program.loops import CASES, batch_of, make_step, set_up

    case = CASES["mlp"]
    setup = set_up(case, wrap, "fused")
    step = make_step(case, setup, "captured")
    captured_on_a_stand_in(step, setup)
    for index in range(8):
        step(batch_of(index))
    if dist.get_rank() == 1:
        setup.model.step.num_updates += 1  # as if this rank had made an update of its own
    step(batch_of(9))


def test_replays_of_ranks_that_drifted_apart_are_stopped() -> None:
    errors = expect_errors(2, [0, 1], drift_apart)
    for error in errors.values():
        assert error.type_name == "Disagreement"
        assert "optimizer steps so far" in error.text


# ---------------------------------------------------------------- several steps in one process


def train_two_in_turn() -> None:
    """Programs name no wrapper of their process, so each run must reach the one that runs."""
    from program.loops import CASES, assert_same, batch_of, make_step, set_up

    uncompiled()
    rank, names = dist.get_rank(), ("clip_norm", "cnn")

    def train(both: list[Any], steps: list[Any], order: list[int]) -> list[Any]:
        for index in range(6):
            for which in order:
                steps[which](batch_of(index, rank))
        return [setup.tensors() for setup in both]

    setups = [set_up(CASES[name], wrap) for name in names]
    steps = [make_step(CASES[name], setup, "graph") for name, setup in zip(names, setups, strict=True)]
    in_turn = train(setups, steps, [0, 1])
    for which, name in enumerate(names):
        setup = set_up(CASES[name], wrap)
        (alone,) = train([setup], [make_step(CASES[name], setup, "graph")], [0])
        assert_same(alone, in_turn[which])
    digests = [[program.digest for program in step._runner.programs] for step in steps]
    assert all(digests)


def test_two_steps_in_one_process() -> None:
    run_ranks(2, train_two_in_turn, preload=PRELOAD)
