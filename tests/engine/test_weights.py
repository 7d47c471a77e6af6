"""How ranks look at their weights, and which differences count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.engine.bucket import Slot
from lockstep.engine.weights import Weights


def slots_of(*parameters: torch.Tensor) -> list[Slot]:
    return [Slot(f"p{index}", nn.Parameter(p), "", index) for index, p in enumerate(parameters)]


def compared(window: int, *everyones: list[Slot]) -> dict[int, float]:
    ranks = [Weights() for _ in everyones]
    for weights, slots in zip(ranks, everyones, strict=True):
        weights.look(window, slots)
    words = [weights.word() for weights in ranks]
    found = [weights.compare(words) for weights in ranks]
    assert len(set(map(str, found))) == 1
    return found[0]


def test_equal_weights() -> None:
    assert compared(0, slots_of(torch.ones(3)), slots_of(torch.ones(3))) == {}


def test_other_weights() -> None:
    found = compared(0, slots_of(torch.ones(4)), slots_of(torch.ones(4)), slots_of(2 * torch.ones(4)))
    assert set(found) == {0, 1, 2}
    assert found[0] == found[1]
    assert found[2] == pytest.approx(2 * found[0])
    assert 1.0 <= found[0] <= 3.0  # the norm is 2


def orthogonal(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return nn.init.orthogonal_(torch.empty(32, 32))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (orthogonal(1), orthogonal(2)),
        (orthogonal(1), -orthogonal(1)),
        (orthogonal(1), orthogonal(1).flip(0)),
        (torch.tensor([3.0, -1.0, 2.0, 5.0]), torch.tensor([2.0, 3.0, 5.0, -1.0])),
        (torch.tensor(0.5), torch.tensor(-0.5)),
    ],
)
def test_other_weights_of_the_same_norm(one: torch.Tensor, other: torch.Tensor) -> None:
    assert compared(0, slots_of(one), slots_of(other))
    assert not compared(0, slots_of(one), slots_of(one.clone()))


def test_what_is_left_by_rounding_near_zero_is_no_difference() -> None:
    assert not compared(0, slots_of(torch.tensor(2e-8)), slots_of(torch.tensor(-1e-7)))
    assert compared(0, slots_of(torch.tensor(2e-4)), slots_of(torch.tensor(-1e-4)))


def test_weights_that_each_rank_changes_by_itself_are_left_out() -> None:
    one, other = Weights(), Weights()
    one.skipped = other.skipped = {"p0"}
    one.look(0, slots_of(torch.ones(2)))
    other.look(0, slots_of(2 * torch.ones(2)))
    assert one.word() == other.word() == 0


@pytest.mark.parametrize(
    ("dtype", "factor", "counts"),
    [
        (torch.float32, 1 + 1e-6, False),
        (torch.float32, 1 + 1e-3, True),
        (torch.float64, 1 + 1e-3, True),
        (torch.bfloat16, 1 + 2**-7, False),
        (torch.bfloat16, 1.25, True),
        (torch.complex64, 1 + 1e-3, True),
    ],
)
def test_rounding_is_no_difference(dtype: torch.dtype, factor: float, counts: bool) -> None:
    value = torch.ones(64, dtype=dtype)
    assert bool(compared(0, slots_of(value), slots_of(value * factor))) is counts


def test_nan_on_one_rank_is_a_difference_and_on_all_is_none() -> None:
    bad = torch.full((3,), float("nan"))
    assert compared(0, slots_of(torch.ones(3)), slots_of(bad))
    assert not compared(0, slots_of(bad), slots_of(bad))


def test_every_element_of_a_large_parameter_has_its_turn() -> None:
    one = torch.ones(300, 1000)
    for row in (0, 150, 299):
        other = one.clone()
        other[row] = 2
        assert any(compared(window, slots_of(one), slots_of(other)) for window in range(40)), row


def test_one_long_row() -> None:
    one, other = torch.ones(1, 50_000), torch.ones(1, 50_000)
    other[0, :20_000] = 2
    assert compared(0, slots_of(one), slots_of(other))


def test_parameters_have_their_turns() -> None:
    same = [torch.ones(3), torch.ones(4)]
    other = [torch.ones(3), 2 * torch.ones(4)]
    assert not compared(4, slots_of(*same), slots_of(*other))
    assert compared(5, slots_of(*same), slots_of(*other))


@pytest.mark.parametrize("num_windows_per_update", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_parameters", [3, 4, 8])
def test_parameters_have_their_turns_later_too(num_windows_per_update: int, num_parameters: int) -> None:
    """When looks have become rarer; however many windows there are between two updates."""
    weights, slots = Weights(), slots_of(*[torch.ones(2)] * num_parameters)
    seen: dict[int, str] = {}
    for window in range(0, 1000, num_windows_per_update):
        weights.look(window, slots)
        if word := weights.word():
            seen[window] = weights.name
            weights.compare([word, word])
    later = {window: name for window, name in seen.items() if window >= 200}
    assert set(later.values()) == {slot.name for slot in slots}
    assert len(later) <= 201  # one in four
    assert len(seen) - len(later) >= 100 // num_windows_per_update  # nearly each at first


def test_a_new_beginning_is_looked_at() -> None:
    weights, slots = Weights(), slots_of(torch.ones(2))
    weights.look(5, slots)
    assert weights.word()
    weights.forget()
    weights.look(5, slots)
    assert not weights.word()
    weights.begin_anew()
    weights.look(5, slots)
    assert weights.word()


def test_empty_parameters_and_none() -> None:
    assert not compared(0, slots_of(torch.ones(0, 3)), slots_of(torch.ones(0, 3)))
    assert not compared(0, [], [])


def test_a_look_waits_until_all_ranks_have_it() -> None:
    """As on a GPU that is behind: nothing is compared, and nothing else is looked at, before."""

    class Event:
        is_there = False

        def query(self) -> bool:
            return self.is_there

    one, other = Weights(), Weights()
    slots = slots_of(torch.ones(2), torch.ones(2))
    one.look(0, slots)
    other.look(0, slots_of(3 * torch.ones(2), torch.ones(2)))
    event = other._event = Event()
    words = [one.word(), other.word()]
    assert words[1] == 0
    assert not one.compare(words)
    assert not other.compare(words)
    one.look(1, slots)
    other.look(1, slots)
    event.is_there = True
    words = [one.word(), other.word()]
    assert one.compare(words)
    assert other.compare(words)
    assert one.name == other.name == "p0"


def test_looks_at_different_parts_are_let_go() -> None:
    one, other = Weights(), Weights()
    slots = slots_of(torch.ones(2), 5 * torch.ones(2))
    one.look(0, slots)
    other.look(1, slots)
    words = [one.word(), other.word()]
    assert not one.compare(words)
    assert not other.compare(words)
    assert one.word() == other.word() == 0


def test_a_class_of_its_own_is_left_alone() -> None:
    class Special(torch.Tensor):
        pass

    special = torch.ones(3).as_subclass(Special)
    slots = [Slot("p", nn.Parameter(special), "", 0)]
    assert type(slots[0].parameter) is Special
    assert not compared(0, slots, slots_of(torch.ones(0)))
    weights = Weights()
    weights.look(0, slots)
    assert weights.word() == 0


def test_types_without_a_norm_are_left_alone() -> None:
    slots = [Slot("p", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False), "", 0)]
    weights = Weights()
    weights.look(0, slots)
    assert weights.word() == 0
