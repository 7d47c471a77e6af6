"""A run that is killed and resumed equals one that was not, bit by bit: parameters, optimizer, losses, random numbers.

Three and four ranks, since with two a sum has only one order.  Accumulation, dropout, batch norm, mid-epoch.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from multirank.checkpoint_runs import train
from multirank.compare import assert_identical
from multirank.harness import lockstep_only, run_outcomes, run_ranks

pytestmark = lockstep_only
NUM_STEPS = 7


def resumed_equals_straight(
    tmp_path: Path,
    world: int,
    optimizer: str,
    die: tuple[int, int],
    *,
    save_every: int = 1,
    hook: str | None = None,
    compiled: bool = False,
    seed: int = 8,  # of the resumed run, which must not matter
) -> None:
    options = {"save_every": save_every, "hook": hook, "compiled": compiled}
    straight = run_ranks(world, train, tmp_path / "straight", optimizer, NUM_STEPS, **options)
    outcomes = run_outcomes(world, train, tmp_path / "killed", optimizer, NUM_STEPS, die=die, **options)
    assert outcomes[die[0]].exit_status == -9
    resumed = run_ranks(world, train, tmp_path / "killed", optimizer, NUM_STEPS, seed=seed, **options)
    for rank in range(world):
        assert resumed[rank]["notes"] == ()
        assert resumed[rank]["first"] < NUM_STEPS
        for key in ("state", "losses", "rng"):
            assert_identical(resumed[rank][key], straight[rank][key], f"{key} of rank {rank}")


@pytest.mark.parametrize(("world", "optimizer", "die"), [(3, "adamw", (1, 5)), (4, "sgd_momentum", (0, 4))])
def test_killed_and_resumed(tmp_path: Path, world: int, optimizer: str, die: tuple[int, int]) -> None:
    resumed_equals_straight(tmp_path, world, optimizer, die)


@pytest.mark.slow
def test_killed_and_resumed_compiled(tmp_path: Path) -> None:
    """The straight run starts with a plan of its own, so it is the killed one that both begin with."""
    options = {"save_every": 2, "compiled": True}
    run_ranks(3, train, tmp_path / "straight", "adamw", 2, **options)
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    straight = run_ranks(3, train, tmp_path / "straight", "adamw", NUM_STEPS, **options)
    run_outcomes(3, train, tmp_path / "killed", "adamw", NUM_STEPS, die=(1, 6), **options)
    resumed = run_ranks(3, train, tmp_path / "killed", "adamw", NUM_STEPS, **options)
    for rank in range(3):
        assert resumed[rank]["first"] >= 2
        for key in ("state", "losses", "rng"):
            assert_identical(resumed[rank][key], straight[rank][key], f"{key} of rank {rank}")


@pytest.mark.parametrize("hook", ["int8", "topk", "powersgd"])
def test_what_a_hook_left_out_is_not_lost(tmp_path: Path, hook: str) -> None:
    resumed_equals_straight(tmp_path, 3, "sgd_momentum", (2, 6), save_every=2, hook=hook)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.soak] * (n >= 3)) for n in range(20)])
def test_killed_anywhere(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    world = draw.choice([3, 4])
    die = (draw.randrange(world), draw.randrange(2, NUM_STEPS))
    optimizer, save_every = draw.choice(["sgd_momentum", "adamw"]), draw.choice([1, 2, 3])
    # Some die before the first checkpoint counts: they begin anew, with the seed they began with.
    resumed_equals_straight(tmp_path, world, optimizer, die, save_every=save_every, seed=0)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4)])
def test_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    """Allowed, and said; the state that is loaded is the one that was saved."""
    first = run_ranks(before, train, tmp_path, "adamw", 4)
    loaded = run_ranks(after, train, tmp_path, "adamw", 4)
    for rank in range(after):
        assert loaded[rank]["first"] == 4
        assert_identical(loaded[rank]["state"], first[0]["state"], f"rank {rank}")
        assert any(f"saved by {before} ranks and is loaded by {after}" in note for note in loaded[rank]["notes"])
    gone_on = run_ranks(after, train, tmp_path, "adamw", 6)
    equal = [key for key in gone_on[0]["state"] if "running" not in key]
    for rank in range(after):
        assert_identical(*({key: gone_on[r]["state"][key] for key in equal} for r in (0, rank)), f"rank {rank}")
