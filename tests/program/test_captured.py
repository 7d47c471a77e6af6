"""Captured programs without a GPU: a machine that captures by running and undoing, and replays by running.

What a GPU does is checked by ``benchmarks/gpu.py --only program``; here it is when to capture, what to refuse, what is
counted, and that the result is the loop's whatever is replayed, captured or walked through.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.observe import moments
from lockstep.program import captured as captured_file
from lockstep.program.captured import WARMUP_CALLS
from lockstep.program.guards import Surroundings
from lockstep.program.options import Mode
from program.fakes import FakeMachine, captured_on_a_stand_in
from program.loops import (
    CASES,
    Case,
    Mlp,
    Setup,
    assert_same,
    batch_of,
    by_hand,
    by_step,
    make_step,
    set_up,
)

pytestmark = pytest.mark.usefixtures("world_of_one")


def captured(case: Case, setup: Setup, **more: Any) -> tuple[Any, FakeMachine]:
    """A step that runs as if the CPU could capture."""
    step = make_step(case, setup, "captured", **more)
    machine = captured_on_a_stand_in(step, setup)
    return step, machine


# Of torch's optimizers those that can hold a rate in a tensor on a CPU.
FUSED = {name: "two fused" if case.optimizer != "adamw" else "fused" for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_result_of_the_loop(name: str) -> None:
    case = CASES[name]
    right = by_hand(case, set_up(case, lockstep.DDP, FUSED[name]))
    setup = set_up(case, lockstep.DDP, FUSED[name])
    step, machine = captured(case, setup)
    found = by_step(case, setup, step)
    assert_same(right, found)
    kinds = {1: 1, 2: 2}.get(case.accumulate, 3)
    assert machine.num_records == kinds == len(step._runner.programs)
    assert machine.num_replays > 8
    explanation = step.explain()
    assert explanation.num_program_calls == machine.num_replays
    assert explanation.num_loop_calls + machine.num_replays == 20 * case.accumulate
    assert not explanation.reasons


def test_windows_and_updates_are_counted_as_by_the_loop() -> None:
    case = CASES["accumulate"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    by_step(case, setup, step)
    assert machine.num_replays
    assert setup.model.step.num_windows == 20
    assert setup.model.step.num_updates == 20
    assert step._runner._num_counted == int(step._runner._counter)
    assert any(i.name == "replay" for record in setup.model.timeline.steps for i in record.intervals)


def test_whoever_listens_hears_of_each_replay() -> None:
    """The launcher knows by it how far a rank is, and faults on purpose have a moment to come at."""
    case = CASES["accumulate"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    heard: list[tuple[str, int]] = []
    replay, is_inside = machine.around_replay, []

    def silently(run: Callable[[], Any]) -> Any:
        is_inside.append(True)  # a replay on a GPU runs no Python
        try:
            return replay(run)
        finally:
            is_inside.pop()

    machine.around_replay = silently
    moments.listeners.append(lambda r: None if is_inside else heard.append((r.moment.value, r.step)))
    try:
        by_step(case, setup, step)
        before, num_replays = len(heard), machine.num_replays
        for index in range(2 * case.accumulate):
            step(batch_of(index))
    finally:
        moments.listeners.pop()
    assert machine.num_replays == num_replays + 2 * case.accumulate
    told = heard[before:]
    assert [moment for moment, _ in told] == ([*["forward"] * case.accumulate, "end"]) * 2
    assert told == sorted(told, key=lambda one: one[1])


def test_results_of_earlier_replays_stay_what_they_were() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, _ = captured(case, setup)
    results = [step(batch_of(index))[0] for index in range(10)]
    assert len({float(loss) for loss in results}) == 10


def test_a_schedule_needs_no_new_capture_and_rates_stay_numbers() -> None:
    case = CASES["schedule"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    by_step(case, setup, step)
    assert machine.num_records == 1
    assert all(isinstance(group["lr"], float) for group in setup.optimizers[0].param_groups)


def test_a_rate_that_is_set_by_hand_is_used() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    for index in range(6):
        step(batch_of(index))
    assert machine.num_replays
    before = setup.module.first.weight.clone()
    setup.optimizers[0].param_groups[0]["lr"] = 0.0
    step(batch_of(7))
    assert torch.equal(before, setup.module.first.weight)
    assert machine.num_records == 1


def test_every_shape_gets_a_program_after_its_own_warm_up() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    for index in range(4):
        step(batch_of(index, size=5))
        step(batch_of(index, size=3))
    assert machine.num_records == 2
    assert machine.num_replays == 2
    assert [p.shown for p in step._runner.programs] == [
        "[5, 6] float32, [5, 4] float32",
        "[3, 6] float32, [3, 4] float32",
    ]


def test_beyond_the_bound_the_loop_runs_and_a_warning_names_the_shapes() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup, max_programs=1)
    for index in range(WARMUP_CALLS + 1):
        step(batch_of(index, size=5))
    for index in range(WARMUP_CALLS):
        step(batch_of(index, size=3))
    with pytest.warns(UserWarning, match=r"max_programs=1.*\[5, 6\] float32.*the loop runs batches of \[3, 6\]"):
        step(batch_of(9, size=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch_of(10, size=3))  # it is said once
    assert machine.num_records == 1


def test_batches_of_several_shapes_in_one_window_add_up() -> None:
    """Whatever is replayed, captured or walked through adds to the same gradients."""
    case = CASES["accumulate"]
    sizes = [5, 3, 5, 5, 3, 5, 5, 3] * 8

    def train(step: Callable[[Any], Any]) -> None:
        for index, size in enumerate(sizes):
            step(batch_of(index, size=size))

    plain = set_up(case, lockstep.DDP, "fused")
    train(make_step(case, plain, "loop"))
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup, max_programs=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(step)
    assert machine.num_replays
    assert step.explain().num_loop_calls > WARMUP_CALLS
    assert_same(plain.tensors(), setup.tensors())


@pytest.mark.parametrize("places", [(9,), (10,), (11,), (9, 14, 19)], ids=str)
def test_a_program_and_the_loop_in_one_window(places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["accumulate"]
    right = by_hand(case, set_up(case, lockstep.DDP, "fused"))
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    num_calls = 0

    def call(batch: Any) -> Any:
        nonlocal num_calls
        if num_calls in places:
            monkeypatch.setenv("LOCKSTEP_TEST_WINDOW", str(num_calls))  # another environment: another program
        num_calls += 1
        return step(batch)

    found = {f"loss {index}": call(batch_of(index, 0))[0] for index in range(20 * case.accumulate)}
    assert_same({name: right[name] for name in found}, found)
    assert machine.num_records > 3


def test_what_a_program_adds_up_is_known_to_the_step_until_it_is_reduced() -> None:
    """If the loop ends the window, it reduces what was added up of a parameter that is frozen by then, too."""
    case = CASES["accumulate"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    slots = setup.model.step.reducer.slots
    for index in range(8 * case.accumulate):
        replayed = machine.num_replays
        step(batch_of(index))
        if machine.num_replays > replayed:
            is_last = (index + 1) % case.accumulate == 0
            assert all(slot.dirty is not is_last for slot in slots), index
    assert machine.num_replays > 8


@pytest.mark.parametrize("place", [21, 22, 23])
def test_what_is_frozen_within_a_window_keeps_what_it_had(place: int) -> None:
    case = CASES["accumulate"]

    def parameter_of(setup: Setup) -> nn.Parameter:
        return next(iter(setup.module.parameters()))

    def values(call: Callable[[int], Any], setup: Setup) -> list[torch.Tensor]:
        for index in range(10 * case.accumulate):
            if index in (place, 32):
                parameter_of(setup).requires_grad_(index == 32)
            call(index)
        return [p.detach() for p in setup.module.parameters()]

    one, other = (set_up(case, lockstep.DDP, "fused") for _ in range(2))
    loop = make_step(case, one, "loop")
    right = values(lambda index: loop(batch_of(index)), one)
    step, machine = captured(case, other)
    found = values(lambda index: step(batch_of(index)), other)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert machine.num_replays > 8


def test_gradients_can_be_looked_at_after_a_replay() -> None:
    case = CASES["mlp"]
    seen = []
    for make in (lambda s: make_step(case, s, "loop"), lambda s: captured(case, s)[0]):
        setup = set_up(case, lockstep.DDP, "fused")
        step = make(setup)
        for index in range(8):
            step(batch_of(index, size=5 - 2 * (index % 2)))
        seen.append([p.grad.clone() for p in setup.module.parameters()])
    for right, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, right)


# ---------------------------------------------------------------- falling back


def reasons_after(case: Case, setup: Setup, prepare: Callable[[Any, FakeMachine], None], num_calls: int = 8) -> str:
    """Run with something in the way of capture, and compare with the loop."""
    plain = set_up(case, lockstep.DDP, "fused")
    expected = by_step(case, plain, make_step(case, plain, "loop"), num_updates=num_calls)
    step, machine = captured(case, setup)
    prepare(step, machine)
    found = by_step(case, setup, step, num_updates=num_calls)
    assert_same(expected, found)
    assert machine.num_replays == 0
    reasons = step.explain().reasons
    assert len(reasons) == 1
    assert setup.model.step.num_windows == num_calls
    return reasons[0]


def test_a_wait_for_the_device_is_named_and_never_captured() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    machines = []

    def prepare(step: Any, machine: FakeMachine) -> None:
        machine.places = ["model.py:31", "model.py:31", "hooks.py:7"]
        machines.append(machine)

    reason = reasons_after(case, setup, prepare)
    assert reason == "the step waits for the GPU at model.py:31, hooks.py:7"
    assert machines[0].num_records == 0


def test_a_capture_that_fails_changes_nothing() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")

    def prepare(step: Any, machine: FakeMachine) -> None:
        machine.refusal = RuntimeError("operation not permitted when stream is capturing\nmore")

    reason = reasons_after(case, setup, prepare)
    assert reason.startswith(
        "it cannot be captured: RuntimeError: operation not permitted when stream is capturing (at"
    )


def test_a_capture_that_fails_inside_a_window_keeps_what_was_added_up() -> None:
    case = CASES["accumulate"]
    right = by_hand(case, set_up(case, lockstep.DDP, "fused"))
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    record = machine.record

    def refuse_later(run: Any) -> Any:
        if machine.num_records >= 1:
            machine.num_records += 1
            run()  # it breaks at its end, when Python has walked through it
            raise RuntimeError("broke at the end")
        return record(run)

    state: dict[str, Any] = {}

    def undoing(run: Any) -> Any:
        state.update(
            {
                "tensors": [
                    (t, t.detach().clone()) for t in [*setup.module.parameters(), *(step._runner._kept._tensors or [])]
                ]
                + [
                    (value, value.clone()) for values in setup.optimizers[0].state.values() for value in values.values()
                ],
            }
        )
        try:
            return refuse_later(run)
        except RuntimeError:
            with torch.no_grad():
                for tensor, value in state["tensors"]:
                    tensor.copy_(value)
            raise

    machine.record = undoing  # type: ignore[method-assign]
    found = by_step(case, setup, step)
    assert_same(right, found)
    (reason,) = step.explain().reasons
    assert reason.startswith("it cannot be captured: RuntimeError: broke at the end")
    assert machine.num_replays
    assert setup.model.step.num_windows == 20


class Counting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) * self.num_calls


class Drawing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


@pytest.mark.parametrize(
    ("model", "words"),
    [(Counting, "changes a number in Python: module.num_calls"), (Drawing, "random numbers of the host (Python's")],
)
def test_what_python_changes_in_a_step_is_found(model: type[nn.Module], words: str) -> None:
    losses = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        random.seed(4)
        module = model()
        ddp = lockstep.DDP(module)
        setup = Setup(module, ddp, [torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)], [], None)
        case = CASES["mlp"]
        step = captured(case, setup)[0] if is_captured else make_step(case, setup, "loop")
        losses.append([float(step(batch_of(index))[0]) for index in range(7)])
        if is_captured:
            (reason,) = step.explain().reasons
            assert words in reason
    assert losses[0] == losses[1]


def test_where_nothing_can_be_captured_python_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Counting()
    setup = Setup(module, lockstep.DDP(module), [torch.optim.AdamW(module.parameters(), fused=True)], [], None)
    step, _ = captured(CASES["mlp"], setup)
    for index in range(4):
        step(batch_of(index))
    assert step.explain().reasons
    monkeypatch.setattr(Surroundings, "values", lambda self: pytest.fail("it was looked at"))
    for index in range(4, 8):
        step(batch_of(index))
    assert (step.explain().num_loop_calls, module.num_calls) == (8, 8)


def test_another_setting_means_another_program() -> None:
    case = CASES["dropout"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    for index in range(5):
        step(batch_of(index))
    assert machine.num_records == 1
    setup.module.inner[1].p = 0.0
    for index in range(5):
        step(batch_of(index))
    assert machine.num_records == 2
    setup.optimizers[0].param_groups[0]["weight_decay"] = 0.5
    for index in range(5):
        step(batch_of(index))
    assert machine.num_records == 3
    setup.module.eval()
    step(batch_of(0))
    assert machine.num_records == 3  # not before its warm-up


def test_state_that_was_loaded_is_captured_anew() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    for index in range(6):
        step(batch_of(index))
    assert machine.num_replays == 3
    setup.optimizers[0].load_state_dict(setup.optimizers[0].state_dict())
    step(batch_of(7))
    assert machine.num_replays == 3
    assert "captured anew" in str(step.explain())


def test_a_batch_with_something_unknown_in_it_is_for_the_loop() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    unknown = object()
    for index in range(6):
        step({**batch_of(index), "more": unknown})
    assert "the batch holds a object" in step.explain().reasons[0]
    assert machine.num_records == 0


def test_numbers_in_a_batch_are_part_of_its_kind() -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    step, machine = captured(case, setup)
    for index in range(5):
        step({**batch_of(index), "epoch": 1})
    assert machine.num_records == 1
    step({**batch_of(0), "epoch": 2})
    assert machine.num_replays == 2


def test_a_replay_that_did_not_happen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP, "fused")
    monkeypatch.setattr(captured_file, "_CHECK_EVERY", 2)
    step, _ = captured(case, setup)
    for index in range(6):
        step(batch_of(index))
    step._runner._counter.sub_(1)

    def go_on() -> None:
        for index in range(6):
            step(batch_of(index))

    with pytest.raises(lockstep.errors.LockstepError, match="a replay failed"):
        go_on()


# ---------------------------------------------------------------- known before it is tried


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({"static_graph": True}, "static_graph=True"),
    ],
)
def test_what_a_wrapper_does_in_python_is_a_reason(options: dict[str, Any], words: str) -> None:
    from lockstep.program.parts import Parallel
    from lockstep.program.reasons import _why_no_program

    reasons = _why_no_program(Parallel(lockstep.DDP(Mlp(), **options)))
    assert [words in reason for reason in reasons] == [True]


def reason_of(optimizer: torch.optim.Optimizer, module: nn.Module, **options: Any) -> str:
    from lockstep.program.reasons import _optimizer_reason

    step = lockstep.TrainStep(module, optimizer, lambda m, b: m(b).mean(), **options)
    return "; ".join(_optimizer_reason(optimizer, step._options))


def test_optimizers_that_cannot_be_captured_say_why() -> None:
    module = Mlp()
    parameters = list(module.parameters())

    class Own(torch.optim.SGD):
        pass

    schedule = torch.optim.lr_scheduler.ConstantLR
    sgd = torch.optim.SGD(parameters, lr=0.1)
    assert reason_of(sgd, module) == ""
    assert "fused=True a schedule needs no new program" in reason_of(sgd, module, scheduler=schedule(sgd))
    fused = torch.optim.SGD(parameters, lr=0.1, fused=True)
    assert reason_of(fused, module, scheduler=schedule(fused)) == ""
    assert "Own has no option capturable=" in reason_of(Own(parameters, lr=0.1), module)
    assert reason_of(torch.optim.AdamW(parameters), module) == ""
    scaler = torch.amp.GradScaler("cpu")
    assert "it skips there itself" in reason_of(torch.optim.AdamW(parameters), module, scaler=scaler)
    assert reason_of(torch.optim.AdamW(parameters, fused=True), module, scaler=scaler) == ""
    assert "differentiable" in reason_of(torch.optim.AdamW(parameters, differentiable=True), module)


def test_communication_hooks_that_keep_state_say_so() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from lockstep.program.reasons import _hook_reason

    ddp = lockstep.DDP(Mlp())
    assert _hook_reason(ddp) == []
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    assert _hook_reason(ddp) == []
    other = lockstep.DDP(Mlp())
    other.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    assert "may keep state in Python" in _hook_reason(other)[0]


# ---------------------------------------------------------------- updates bucket by bucket


@pytest.mark.parametrize("name", ["mlp", "mlp, two optimizers", "clip_value", "schedule", "average", "cnn", "gpt"])
def test_updates_bucket_by_bucket_have_the_result_of_the_loop(name: str) -> None:
    case = CASES[name]
    right = by_hand(case, set_up(case, one_bucket_each, FUSED[name]))
    setup = set_up(case, one_bucket_each, FUSED[name])
    step, machine = captured(case, setup, update_by_bucket=True)
    step._choose_updates(Mode.CAPTURED)
    found = by_step(case, setup, step)
    assert_same(right, found)
    assert machine.num_replays > 8
    assert "bucket by bucket" in str(step.explain())
    assert all(p.grad is None for p in setup.module.parameters())
    assert setup.model.step.num_updates == setup.model.step.num_windows == 20


def one_bucket_each(module: nn.Module) -> Any:
    return lockstep.DDP(module, bucket_cap_mb=1e-5)
