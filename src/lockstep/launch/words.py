"""Last words: what a rank writes down when it fails, in a file of its own that outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.agree.beat import attribute_of

_MAX_ERRORS = 8
_MAX_CHARS = 20_000


@dataclass(frozen=True)
class Words:
    """An error of a rank; ``kinds`` names its type, its bases, and those of the errors that it came from.

    ``peers`` are the ranks that the error itself names; ``thread`` is empty for the main thread.
    """

    time: float
    type: str
    text: str
    traceback: str = ""
    kinds: tuple[str, ...] = ()
    peers: tuple[int, ...] = ()
    thread: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def first_line(self) -> str:
        lines = [line.strip() for line in self.text.strip().splitlines()]
        if not lines:
            return self.type
        # What is announced in a line is said in the next one.
        return f"{self.type}: {' '.join(lines[:2]) if lines[0].endswith(':') else lines[0]}"


def words_of(
    error: BaseException, trace: TracebackType | None = None, *, thread: str = "", text: str | None = None
) -> Words:
    """Describe an error; ``trace`` is the part of its traceback to show."""
    shown = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return Words(
        time=time.time(),
        type=type(error).__name__,
        text=(_text_of(error) if text is None else text)[:_MAX_CHARS],
        traceback="".join(shown)[-_MAX_CHARS:],
        kinds=tuple(dict.fromkeys(kind.__name__ for link in _chain(error) for kind in type(link).__mro__)),
        peers=tuple(dict.fromkeys(rank for link in _chain(error) for rank in _peers(link))),
        thread=thread,
    )


def _text_of(error: BaseException) -> str:
    """What an error says; some cannot say it."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be read: str() raised {type(failure).__name__})"


def write_words(folder: Path, rank: int, words: Words) -> None:
    """Leave them for the launcher; the first few count."""
    for number in range(_MAX_ERRORS):
        path = folder / f"rank-{rank}.error-{number}.json"
        if path.exists():
            continue
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # an error on the way out must not be hidden by a full disk
            partial.write_text(json.dumps(words.as_json()))
            partial.rename(path)
        return


def read_words(folder: Path, rank: int) -> list[Words]:
    """What a rank left, oldest first; what cannot be understood is left out."""
    found = []
    for path in folder.glob(f"rank-{rank}.error-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            data = json.loads(path.read_text())
            found.append(
                Words(
                    time=float(data["time"]),
                    type=str(data["type"]),
                    text=str(data["text"]),
                    traceback=str(data["traceback"]),
                    kinds=tuple(map(str, data["kinds"])),
                    peers=tuple(map(int, data["peers"])),
                    thread=str(data["thread"]),
                )
            )
    return sorted(found, key=lambda words: words.time)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _peers(error: BaseException) -> Iterator[int]:
    for name in ("rank", "ranks"):
        value = attribute_of(error, name)
        for rank in value if isinstance(value, (list, tuple, set, frozenset)) else [value]:
            if isinstance(rank, int):
                yield rank
