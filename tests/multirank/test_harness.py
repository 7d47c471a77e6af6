"""The harness itself: values, errors, output, limits, leftovers. One that passes everything is no judge."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from multirank.harness import expect_errors, run_outcomes, run_ranks
from multirank.mixes import Together


def reduce_ranks(scale: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), total * scale


def test_values_come_back_by_rank_from_distinct_processes() -> None:
    values = run_ranks(3, reduce_ranks, 2.0)
    assert len({pid for pid, _ in values} | {os.getpid()}) == 4
    assert [value.item() for _, value in values] == [6.0, 6.0, 6.0]


def raise_on_rank_one() -> str:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        raise KeyError("the missing one")
    return "fine"


def test_a_failing_rank_fails_the_run_with_its_traceback_and_output() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, raise_on_rank_one)
    text = str(caught.value)
    assert "1 of 2 ranks failed" in text
    assert "raise KeyError" in text
    assert "rank 1 was here" in text
    assert "rank 0 was here" not in text


def test_an_expected_error_must_be_on_exactly_the_named_ranks() -> None:
    errors = expect_errors(2, [1], raise_on_rank_one)
    assert errors[1].type_name == "KeyError"
    assert "LookupError" in errors[1].base_names
    assert "the missing one" in errors[1].text
    with pytest.raises(AssertionError, match="expected an error on ranks"):
        expect_errors(2, [0, 1], raise_on_rank_one)


def lone_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(100)


def test_a_hanging_run_is_killed_and_shows_its_stacks() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, lone_collective, limit_s=10)
    assert "did not end within 10 s" in str(caught.value)
    assert "lone_collective" in str(caught.value)


def leave_a_child() -> int:
    code = "import os, time\nos.setsid()\ntime.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code]).pid if dist.get_rank() == 0 else 0


def test_a_run_that_leaves_a_process_behind_fails_and_the_process_is_killed() -> None:
    with pytest.raises(AssertionError, match="left processes behind"):
        run_ranks(2, leave_a_child)


def die_without_a_word() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_its_exit_status() -> None:
    outcomes = run_outcomes(2, die_without_a_word)
    assert outcomes[1].exit_status == 7
    assert outcomes[1].error is None
    with pytest.raises(AssertionError, match="rank 1: died with exit status 7"):
        run_ranks(2, die_without_a_word)


def test_a_function_without_an_importable_name_is_refused() -> None:
    with pytest.raises(ValueError, match="top of a module"):
        run_ranks(2, lambda: None)


def fail_in_the_mode_of_its_name(name: str, mode: str, backend: str) -> list[str]:
    if mode == name:
        raise ValueError("this mode fails")
    return [mode]


def test_a_mode_that_fails_beside_others_is_the_one_that_fails() -> None:
    together = Together.of(fail_in_the_mode_of_its_name, "second", ("first", "second", "third"), "", 2)
    assert together.digests("first") == [["first"]] * 2
    with pytest.raises(AssertionError, match="this mode fails"):
        together.digests("second")
    assert together.digests("third") == [["third"]] * 2


def fail_after_another(name: str, mode: str, backend: str) -> list[str]:
    if os.environ.setdefault("MODE_BEFORE", mode) != mode:
        raise ValueError("something was left by the mode before")
    return [mode]


def test_modes_that_fail_only_beside_each_other_fail() -> None:
    together = Together.of(fail_after_another, "any", ("first", "second"), "", 2)
    assert together.digests("first") == [["first"]] * 2
    with pytest.raises(AssertionError, match="each mode passes alone"):
        together.digests("second")
