"""By which settings ranks update, as numbers that they compare."""

from __future__ import annotations

import torch

from lockstep.agree.drift import can_change, settings_of, settings_shown, word_of, words_differ

SLOW, FAST = settings_of({"lr": 0.1}), settings_of({"lr": 0.2})
FIRST, SECOND, BOTH = 0x0001, 0x0100, 0x0101


def test_the_order_of_groups_and_how_they_are_cut_do_not_matter() -> None:
    assert word_of({SLOW: FIRST, FAST: SECOND}) == word_of({FAST: SECOND, SLOW: FIRST})
    assert word_of({SLOW: FIRST, FAST: 0}) == word_of({SLOW: FIRST})


def test_nothing_updated() -> None:
    assert word_of({}) == word_of({SLOW: 0}) == 0
    assert not words_differ([0, word_of({SLOW: BOTH}), word_of({SLOW: BOTH})])


def test_other_settings_for_the_same_parameters() -> None:
    assert words_differ([word_of({SLOW: BOTH}), word_of({FAST: BOTH})])
    assert words_differ([word_of({SLOW: FIRST}), word_of({FAST: FIRST}), 0])
    assert words_differ([word_of({SLOW: FIRST, FAST: SECOND}), word_of({SLOW: SECOND, FAST: FIRST})])


def test_ranks_may_update_their_own_shares_by_settings_of_their_own() -> None:
    assert not words_differ([word_of({SLOW: FIRST}), word_of({FAST: SECOND})])


def test_words_fit_where_they_travel() -> None:
    for places in (FIRST, BOTH, (1 << 8000) - 1):
        assert 0 < word_of({SLOW: places}) < 1 << 63


def test_settings_are_plain_values() -> None:
    class Rate:
        """Prints another address in each process."""

    class Number(float):
        def __repr__(self) -> str:
            return f"a number ({float(self)})"

    plain = settings_of({"lr": 0.5, "betas": (0.9, 1.0), "params": []})
    assert plain == settings_of({"lr": torch.tensor(0.5), "betas": [0.9, 1], "foreach": True})
    assert repr(plain) == repr(settings_of({"lr": Number(0.5), "betas": (0.9, 1)}))
    assert settings_of({"lr": Rate()}) == (("lr", "Rate"),)


def test_what_is_shown() -> None:
    names = ["a", "b"]
    assert settings_shown({SLOW: FIRST, FAST: SECOND}, names) == ["lr=0.1 (of a)", "lr=0.2 (of b)"]
    assert settings_shown({SLOW: BOTH}, names) == ["lr=0.1"]


def test_values_that_can_become_others_without_being_replaced() -> None:
    assert not any(map(can_change, [0.1, (0.9, 0.99), False, None, "l2"]))
    assert all(map(can_change, [torch.tensor(0.1), (0.9, torch.tensor(0.99)), [0.9, 0.99]]))


def test_ranks_update_all_shards_as_often() -> None:
    once, twice = word_of({SLOW: BOTH}), word_of({SLOW: 2 * BOTH})
    assert words_differ([once, twice], of_shards=True)
    assert words_differ([once, word_of({SLOW: FIRST})], of_shards=True)
    assert not words_differ([once, 0, once], of_shards=True)  # one that has not updated yet; updates are counted apart
    assert settings_shown({SLOW: 2 * FIRST + SECOND}, ["a", "b"]) == ["lr=0.1 (of b)", "lr=0.1, 2 times (of a)"]
    assert settings_shown({SLOW: 3 * BOTH}, ["a", "b"]) == ["lr=0.1, 3 times"]
