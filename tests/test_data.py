"""The position in the data: every sample once, whatever is prefetched, wherever it stops, however many ranks go on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.data import ResumableSampler


def deal(
    num_samples: int, world: int, state: dict | None, num_batches: int | None, size: int, **options: bool
) -> tuple:
    """What each rank sees, up to some number of batches; and the position after that."""
    seen, states = [], []
    for rank in range(world):
        sampler = ResumableSampler(num_samples, rank=rank, world=world, seed=4, **options)
        if state is not None:
            sampler.load_state_dict(state)
        mine: list[list[int]] = []
        loader = DataLoader(range(num_samples), batch_size=size, sampler=sampler)  # type: ignore[arg-type]
        batches = sampler.batches(loader)
        for batch in batches:
            mine.append(batch.tolist())
            if len(mine) == num_batches:
                break
        states.append(sampler.state_dict())
        batches.close()  # type: ignore[attr-defined]
        seen.append(mine)
    assert all(other == states[0] for other in states)  # the position is the same on all ranks
    return seen, states[0]


def flat(seen: list[list[list[int]]]) -> list[int]:
    return [sample for rank in seen for batch in rank for sample in batch]


@given(
    num_samples=st.integers(1, 60),
    world=st.integers(1, 5),
    size=st.integers(1, 4),
    stop=st.integers(1, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_stopping_anywhere_changes_nothing(
    num_samples: int, world: int, size: int, stop: int, shuffle: bool, drop_last: bool
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last}
    straight, _ = deal(num_samples, world, None, None, size, **options)
    first, state = deal(num_samples, world, None, stop, size, **options)
    rest, _ = deal(num_samples, world, state, None, size, **options)
    assert [a + b for a, b in zip(first, rest, strict=True)] == straight


@given(num_samples=st.integers(1, 60), worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)), stop=st.integers(1, 6))
def test_another_number_of_ranks_sees_the_rest_once(num_samples: int, worlds: tuple[int, int], stop: int) -> None:
    first, state = deal(num_samples, worlds[0], None, stop, 2)
    rest, _ = deal(num_samples, worlds[1], state, None, 2)
    seen = Counter(flat(first) + flat(rest))
    assert set(seen) == set(range(num_samples))
    assert sum(seen.values()) - num_samples < sum(worlds)  # only what fills up the last round is seen again


def test_the_same_shares_as_torchs_sampler() -> None:
    for rank in range(3):
        theirs = DistributedSampler(range(10), num_replicas=3, rank=rank, shuffle=False)  # type: ignore[arg-type]
        assert list(ResumableSampler(10, rank=rank, world=3, shuffle=False)) == list(theirs)


def test_epochs_have_other_orders() -> None:
    sampler = ResumableSampler(50)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_prefetched_is_not_counted(num_workers: int) -> None:
    def go(sampler: ResumableSampler, num_batches: int | None) -> list[list[int]]:
        options = {"num_workers": num_workers, "prefetch_factor": 4 if num_workers else None}
        loader = DataLoader(range(64), batch_size=4, sampler=sampler, **options)  # type: ignore[arg-type]
        seen: list[list[int]] = []
        for batch in sampler.batches(loader):
            seen.append(batch.tolist())
            if len(seen) == num_batches:
                assert sampler.state_dict()["position"] == 4 * len(seen)
                break
        return seen

    straight = go(ResumableSampler(64), None)
    sampler = ResumableSampler(64)
    first = go(sampler, 3)
    resumed = ResumableSampler(64)
    resumed.load_state_dict(sampler.state_dict())
    assert first + go(resumed, None) == straight


def test_going_on_draws_no_random_number() -> None:
    """A loader draws a seed when it begins; a run that was not interrupted did that at the start of the epoch."""
    sampler = ResumableSampler(16)
    sampler.position = 8
    before = torch.get_rng_state()
    next(iter(sampler.batches(DataLoader(range(16), batch_size=2, sampler=sampler))))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_that_is_not_known_is_refused() -> None:
    sampler = ResumableSampler(16)
    iterator = iter(DataLoader(range(16), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    next(iterator)
    with pytest.raises(RuntimeError, match=r"sampler\.batches"):
        sampler.state_dict()


def test_other_data_is_refused() -> None:
    state = ResumableSampler(16, seed=1).state_dict()
    with pytest.raises(ValueError, match="num_samples is 17, and was 16; seed is 2, and was 1"):
        ResumableSampler(17, seed=2).load_state_dict(state)
    for options in ({"source": 0}, {"source": 4, "rank": 2, "world": 2}):
        with pytest.raises(ValueError, match=r"at least 1|world of 2"):
            ResumableSampler(**options)
    with pytest.raises(ValueError, match="batch_size="):
        next(iter(ResumableSampler(4).batches([1, 2])))


@pytest.mark.parametrize("leaves_out", [False, True])
def test_an_epoch_that_is_over_is_not_an_empty_one(leaves_out: bool) -> None:
    """Without set_epoch() a loop would go on for the rest of its epochs without a single batch."""
    sampler = ResumableSampler(18)
    loader = DataLoader(range(18), batch_size=4, sampler=sampler, drop_last=leaves_out)  # type: ignore[arg-type]
    assert len(list(sampler.batches(loader))) == 5 - leaves_out
    state = sampler.state_dict()
    with pytest.raises(RuntimeError, match=r"Epoch 0 .* sampler\.set_epoch\(1\)"):
        next(sampler.batches(loader))
    resumed = ResumableSampler(18)
    resumed.load_state_dict(state)
    sampler.set_epoch(1)
    assert len(list(sampler.batches(loader))) == 5 - leaves_out
    # Saved at the end of an epoch: nothing is left of it, and the loop goes on with the next.
    loader = DataLoader(range(18), batch_size=4, sampler=resumed, drop_last=leaves_out)  # type: ignore[arg-type]
    assert list(resumed.batches(loader)) == []
    resumed.set_epoch(1)
    assert len(list(resumed.batches(loader))) == 5 - leaves_out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": -4}, "no position in the data: epoch 0, -4"),
        ({"epoch": -1}, "no position in the data: epoch -1"),
        ({"seed": None}, "has no seed"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    state = {**ResumableSampler(5).state_dict(), **change}
    with pytest.raises(ValueError, match=words):
        ResumableSampler(5).load_state_dict({key: value for key, value in state.items() if value is not None})


def test_the_number_of_samples_may_be_any_whole_number() -> None:
    assert len(ResumableSampler(numpy.int64(5))) == 5


def test_a_loader_whose_batches_cannot_be_counted_is_refused() -> None:
    sampler = ResumableSampler(18)
    others = DataLoader(range(18), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has not drawn from this sampler"):
        next(sampler.batches(others))
    assert sampler.state_dict()["position"] == 0
    anyhow = DataLoader(range(18), batch_size=4, sampler=sampler, num_workers=2, in_order=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_order"):
        next(sampler.batches(anyhow))
