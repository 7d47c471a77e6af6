"""The words that a rank leaves for its launcher at its end."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import inside
from lockstep.launch.inside import Inside
from lockstep.launch.words import read_words, words_of, write_words


def test_words_that_cannot_be_understood_are_left_out(tmp_path: Path) -> None:
    good = words_of(ValueError("good"))
    write_words(tmp_path, 0, good)
    texts = ["{", "[" * 100_000, "3", json.dumps({**good.as_json(), "peers": [math.inf]}), '{"time": "x"}']
    for number, text in enumerate(texts, start=1):
        (tmp_path / f"rank-0.error-{number}.json").write_text(text)
    assert read_words(tmp_path, 0) == [good]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_words_are_left_also_if_a_signals_handler_raises_meanwhile(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[BaseException] = []

    def interrupted(error: BaseException, *args: Any, **kwargs: Any) -> Any:
        calls.append(error)
        if len(calls) == 1:
            raise kind("DataLoader worker was killed")
        return words_of(error, *args, **kwargs)

    monkeypatch.setattr(inside, "words_of", interrupted)
    with tempfile.TemporaryFile("w") as stacks:
        monkeypatch.setattr(inside, "_inside", Inside(tmp_path, 1, os.getpid(), stacks))
        if kind is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                inside.note_error(ValueError("the first"))
        else:
            inside.note_error(ValueError("the first"))
    texts = [words.text for words in read_words(tmp_path, 1)]
    assert texts == ["the first", "DataLoader worker was killed"][: len(texts)]
    assert len(texts) == (1 if kind is KeyboardInterrupt else 2)
