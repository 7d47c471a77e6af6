"""Faults at the moments of a step: as an API, and as text."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from launching import LOCKSTEP, run_command, write_script
from lockstep.checkpoint.moments import Moment
from lockstep.observe import moments
from lockstep.testing import faults, inject
from lockstep.testing.faults import BadFault, read_faults
from lockstep.testing.inject import Fired, StepMoment
from multirank.harness import expect_errors, run_ranks


def wrapped() -> tuple[lockstep.DDP, torch.optim.Optimizer]:
    ddp = lockstep.DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), bucket_cap_mb=0.00001)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def train(num_steps: int, ddp: lockstep.DDP | None = None) -> lockstep.DDP:
    ddp, optimizer = wrapped() if ddp is None else (ddp, None)
    for _ in range(num_steps):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        if optimizer is not None:
            optimizer.step()
    return ddp


@pytest.fixture
def heard() -> object:
    found: list[moments.Reached] = []
    moments.listeners.append(found.append)
    yield found
    moments.listeners.remove(found.append)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_moments_of_a_step_come_in_order(world_of_one: None, heard: list[moments.Reached], compiled: bool) -> None:
    ddp, _ = wrapped()
    if compiled:
        ddp = torch.compile(ddp, backend="aot_eager")
    num_buckets = len(list((ddp._orig_mod if compiled else ddp).plan))
    heard.clear()
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
    names = [reached.moment.value for reached in heard if reached.step == heard[-1].step]
    if compiled:  # its forward is in the graph
        names = ["forward", *(name for name in names if name != "forward")]
    assert names[0] == "forward"
    assert names[1] == "backward"
    assert names.count("launch") == names.count("packed") == names.count("collect") == num_buckets > 1
    assert names[-1] == "end"
    for reached in heard:
        assert (reached.bucket >= 0) is (reached.moment.value in ("launch", "packed", "collect"))
        assert bool(reached.names) is (reached.bucket >= 0)


def test_steps_are_numbered_as_checkpoints_number_them(
    world_of_one: None, heard: list[moments.Reached], tmp_path: Path
) -> None:
    ddp = train(2)
    lockstep.checkpoint.save(tmp_path, ddp, step=100, asynchronous=False)
    train(1, ddp)
    assert (heard[-1].moment, heard[-1].step) == (StepMoment.END, 100)
    lockstep.checkpoint.load(tmp_path, ddp)
    train(1, ddp)
    assert (heard[-1].moment, heard[-1].step) == (StepMoment.END, 100)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nan_is_in_the_gradient_of_that_step_only(world_of_one: None, compiled: bool) -> None:
    ddp, _ = wrapped()
    run = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    first = ddp.step.num_windows
    found = []
    with inject.fault(StepMoment.PACKED, inject.nan, step=_own_step(ddp) + 1, bucket=0) as fault:
        for _ in range(3):
            ddp.zero_grad()
            run(torch.ones(2, 4)).sum().backward()
            found.append(any(bool(p.grad.isnan().any()) for p in ddp.parameters() if p.grad is not None))
    assert found == [False, True, False]
    assert fault.fired is Fired.FIRED
    assert ddp.step.num_windows == first + 3


def _own_step(ddp: lockstep.DDP) -> int:
    return ddp.timeline.step + moments._shift


def test_a_fault_comes_once_or_for_some_steps(world_of_one: None) -> None:
    ddp = train(1)
    count: list[int] = []
    first = _own_step(ddp)
    with inject.fault(StepMoment.END, lambda reached: count.append(reached.step)):
        train(3, ddp)
    assert len(count) == 1
    count.clear()
    with inject.fault(StepMoment.FORWARD, lambda reached: count.append(reached.step), step=first + 4, num_steps=2):
        train(5, ddp)
    assert count == [first + 4, first + 5]
    train(1, ddp)
    assert len(count) == 2  # a fault ends with its context
    count.clear()
    first = _own_step(ddp)
    with inject.fault(StepMoment.FORWARD, lambda reached: count.append(reached.step), num_steps=2):
        train(4, ddp)
    assert count == [first, first + 1]


def test_only_the_rank_that_is_meant_is_hit(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = train(1)
    monkeypatch.setattr(inject, "_world", lambda: 2)
    with inject.fault(StepMoment.FORWARD, inject.raises, rank=1) as fault:
        train(1, ddp)
        assert fault.fired is Fired.NOT_YET
        monkeypatch.setattr(inject, "_this_rank", lambda: 1)
        with pytest.raises(inject.Fault, match=r"injected at forward of step \d+"):
            train(1, ddp)


def test_sleeping_takes_its_time(world_of_one: None) -> None:
    ddp = train(1)
    for action in (inject.delay(0.2), inject.freeze(0.2)):
        with inject.fault(StepMoment.BACKWARD, action):
            began = time.monotonic()
            train(1, ddp)
            assert time.monotonic() - began >= 0.2


def test_steps_are_not_for_checkpoints() -> None:
    with pytest.raises(ValueError, match="for moments of a step"), inject.fault(Moment.DONE, inject.kill, step=3):
        pass


def raise_on_one_rank() -> None:
    with inject.fault(StepMoment.LAUNCH, inject.raises, rank=1, step=2):
        train(5)


def test_a_fault_on_one_rank_is_an_error_on_all() -> None:
    errors = expect_errors(3, [0, 1, 2], raise_on_one_rank)
    assert errors[1].type_name == "Fault"
    assert all("injected at launch of step 2" in errors[rank].text for rank in (0, 2))


def nan_on_one_rank() -> list[bool]:
    ddp, _ = wrapped()
    found = []
    with inject.fault(StepMoment.PACKED, inject.nan, rank=1, step=1, bucket=0):
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            found.append(any(math.isnan(p.grad.sum().item()) for p in ddp.parameters()))
    return found


def test_nan_of_one_rank_travels() -> None:
    assert run_ranks(2, nan_on_one_rank) == [[False, True, False]] * 2


# As text


def test_text_is_read_with_its_defaults() -> None:
    kill, slow, late = read_faults("kill:rank=1,step=5; slow:seconds=0.1 ;sleep:seconds=2,moment=joining,attempt=any;")
    assert (kill.action, kill.rank, kill.step, kill.moment, kill.attempt) == ("kill", 1, 5, StepMoment.BACKWARD, 0)
    assert (slow.rank, slow.step, slow.moment, slow.seconds) == (None, 0, StepMoment.LAUNCH, 0.1)
    assert slow.num_steps > 1 << 30
    assert (late.moment, late.attempt) == (StepMoment.JOINING, None)
    (leave,) = read_faults("exit:status=0")
    assert leave.status == 0
    assert read_faults("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode", "there is no fault 'explode'"),
        ("kill:5", "'5' is not one of"),
        ("kill:rank", "'rank' is not one of"),
        ("kill:rank=", "'rank=' is not one of"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("kill:step=1.5", "step is '1.5'"),
        ("kill:attempt=some", "attempt is 'some'"),
        ("sleep:seconds=soon", "seconds is 'soon'"),
        ("sleep:seconds=-1", "seconds is '-1'"),
        ("sleep:seconds=inf", "seconds is 'inf'"),
        ("freeze", "freeze needs seconds"),
        ("kill:seconds=3", "kill has no seconds; sleep and freeze and slow have"),
        ("raise:status=3", "raise has no status; exit has"),
        ("kill:steps=3", "kill has no steps"),
        ("sleep:seconds=1,steps=0", "steps is '0'"),
        ("kill:rank=²", "rank is '²'"),
        ("exit:status=256", "status is 256; a process ends with one from 0 to 255"),
        ("kill:bucket=1", "there is no bucket at the moment 'backward'; there is one at launch, packed, collect"),
    ],
)
def test_bad_text_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(BadFault) as caught:
        read_faults(text)
    assert message in str(caught.value)


def test_every_action_has_a_default_moment_and_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    for action, (moment, _) in faults.ACTIONS.items():
        assert f"| `{action}` | " in page
        row = next(line for line in page.splitlines() if line.startswith(f"| `{action}` | "))
        assert row.endswith(f"| `{moment.value}` |")
    for moment in StepMoment:
        assert f"`{moment.value}`" in page


@pytest.mark.multirank
def test_the_environment_variable_reaches_the_ranks(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group()
        sys.stdout.write(f"rank {dist.get_rank()} is here\\n")
        """,
    )
    env = {"LOCKSTEP_INJECT": "exit:moment=joined,status=7"}
    done = run_command([*LOCKSTEP, "run", "--report-dir", tmp_path, script], env=env)
    assert (done.exit_code, done.output) == (7, "")
    assert "LOCKSTEP_INJECT" not in os.environ


@pytest.mark.multirank
def test_the_first_moment_of_a_rank_comes_before_the_program(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('here')\n")
    words = ["--report-dir", tmp_path, "--inject", "raise:moment=started"]
    done = run_command([*LOCKSTEP, "run", *words, script])
    assert (done.exit_code, done.output) == (1, "")
    assert "raised Fault: injected at started" in done.errors


@pytest.mark.parametrize("rank", [1, -1, "0", True])
def test_a_rank_that_there_is_not_is_an_error(world_of_one: None, rank: Any) -> None:
    with pytest.raises(ValueError, match="rank is"), inject.fault(StepMoment.BACKWARD, inject.raises, rank=rank):
        train(1)


def test_a_rank_that_turns_out_not_to_be_there_is_an_error(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "_world", lambda: None)
    with inject.fault(StepMoment.BACKWARD, inject.raises, rank=1):
        monkeypatch.undo()
        with pytest.raises(ValueError, match="rank is 1, and there are 1 ranks"):
            train(1)
