"""What peers write is believed only in the right form."""

from __future__ import annotations

import json
import sys
import threading
import traceback

import pytest

from lockstep.agree.alive import this_process
from lockstep.agree.beat import Beat, Place, Words, read_beat, read_words, stack_now, where_now, words_of
from lockstep.errors import PeerLate, PeerLost

NONSENSE = [
    *(None, "", "{", "[]", "null", "3", '"text"', "\x00\xff", "[" * 5000, '{"number": null}', '{"number": true}'),
    *('{"rank": 0}', '{"rank": -1, "type": "A", "text": "b"}', '{"rank": 7, "type": "A", "text": "b"}'),
    *('{"rank": 0, "type": 3, "text": "b"}', '{"rank": "0", "type": "A", "text": "b"}', f'{{"number": {10**30}}}'),
]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_nothing(text: str | None) -> None:
    assert read_beat(text) is None
    assert read_words(text, 4) is None


def test_a_beat_travels() -> None:
    place = Place("the reduction of bucket 1 in step 3", 3, 1)
    beat = Beat(7, this_process(), True, "in step 3", "train.py:8 in main", waits={"b": place}, meets={"b": ("k", "s")})
    found = read_beat(beat.to_json())
    assert found == beat
    assert (found.waits["b"].step, found.waits["b"].order) == (3, 1)
    assert "train.py:8" in found.words


def test_parts_of_a_beat_that_are_wrong_are_left_out() -> None:
    data = {"number": 3, "process": {"pid": -5}, "doing": 4, "waits": {"b": [1, 2]}, "meets": {"b": ["k"]}, "ended": 1}
    assert read_beat(json.dumps(data)) == Beat(3)


def test_words_travel_and_are_shortened() -> None:
    error = PeerLate("x" * 10_000, [2])
    words = read_words(words_of(error, 1).to_json(), 4)
    assert words == Words(1, "PeerLate", "x" * 4000, ranks=(2,))


def test_who_has_come_how_far() -> None:
    here = Place("bucket 1 in step 3", 3, 1)
    assert here.is_reached_by(here)
    assert here.is_reached_by(Place("bucket 2 in step 3", 3, 2))
    assert here.is_reached_by(Place("bucket 0 in step 4", 4, 0))
    assert not here.is_reached_by(Place("bucket 0 in step 3", 3, 0))
    assert not here.is_reached_by(Place("bucket 5 in step 2", 2, 5))
    assert not here.is_reached_by(Place("a meeting"))
    assert Place("a meeting").is_reached_by(Place("a meeting"))


def test_where_this_process_is() -> None:
    assert "test_where_this_process_is" in where_now() or "pytest" in where_now()


def test_a_stack_is_without_the_lines_that_start_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run in a thread: then the main one is pytest's, and any file of it will do."""
    outermost = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])[0].filename
    assert outermost in stack_now()
    monkeypatch.setattr("lockstep.agree.beat._LAUNCHER", outermost)
    assert f'"{outermost}"' not in stack_now()
    assert stack_now()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    @property
    def rank(self) -> int:
        raise RuntimeError("nor a rank")

    ranks = rank


def test_an_error_that_cannot_be_shown_is_still_told() -> None:
    from lockstep.launch import words as launch_words

    assert words_of(Mute(), 1).text == "(its text cannot be read: str() raised ValueError)"
    assert launch_words.words_of(Mute()).text == "(its text cannot be read: str() raised ValueError)"


def test_words_name_the_ranks_that_an_error_names() -> None:
    assert words_of(PeerLost("gone", 3), 1).ranks == (3,)
    assert words_of(PeerLate("late", [2, 4]), 1).ranks == (2, 4)
    assert words_of(ValueError("x"), 1).ranks == ()
