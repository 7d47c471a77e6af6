"""A sign of life: what a process posts about itself every second, and how others read it.

What peers write is believed only as far as it has the right form: the store is open to anyone who can reach it.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.agree.alive import Process, read_process

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = str(Path(threading.__file__).parent)
_LAUNCHER = str(Path(_PACKAGE, "cli", "bootstrap.py"))
_LONGEST_TEXT = 4000
_NUM_LINES = 40


class Place(str):
    """Where a rank waits, in words; ``step`` and ``order`` (within the step) say what comes before what."""

    step: int
    order: int

    def __new__(cls, text: str, step: int = -1, order: int = 0) -> Place:
        place = super().__new__(cls, text)
        place.step, place.order = step, order
        return place

    def is_reached_by(self, other: Place) -> bool:
        """Whether a rank that waits at ``other`` has come here, or further."""
        if self == other:
            return True
        return self.step >= 0 and other.step >= 0 and (other.step, other.order) >= (self.step, self.order)


@dataclass
class Beat:
    """What one process says about itself."""

    number: int
    process: Process | None = None
    hosts_store: bool = False
    doing: str = ""  # which step, in words
    at: str = ""  # file, line and function
    note: str = ""  # what else may help: an error in another thread
    ended: bool = False
    how: str = ""  # it ended, in words
    left: list[str] = field(default_factory=list)  # boards whose process group it has destroyed
    heard: bool = False  # the last words of the process that ended first
    waits: dict[str, Place] = field(default_factory=dict)  # board: where it has waited for more than a second
    meets: dict[str, tuple[str, str]] = field(default_factory=dict)  # board: a meeting, and what it is about

    def to_json(self) -> str:
        """The text that travels."""
        data = asdict(self)
        data["waits"] = {board: [str(p), p.step, p.order] for board, p in self.waits.items()}
        return json.dumps(data)

    @property
    def words(self) -> str:
        """One line for messages: what the process was last seen doing."""
        parts = [part for part in (self.doing, f"at {self.at}" if self.at else "") if part]
        if self.waits:
            parts.append("waits in " + "; ".join(self.waits.values()))
        if self.note:
            parts.append(self.note)
        return ", ".join(parts) or "nothing is known"


def read_beat(text: str | None) -> Beat | None:
    """Read what another process wrote; None where it is not a beat."""
    try:
        data = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not _is_number(data.get("number")):
        return None
    waits = {board: place for board, value in _items(data.get("waits")) if (place := _place(value)) is not None}
    left = data.get("left")
    meets = {
        board: (value[0][:_LONGEST_TEXT], value[1][:_LONGEST_TEXT])
        for board, value in _items(data.get("meets"))
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }
    return Beat(
        number=data["number"],
        process=read_process(data.get("process")),
        hosts_store=data.get("hosts_store") is True,
        doing=_text(data.get("doing")),
        at=_text(data.get("at")),
        note=_text(data.get("note")),
        ended=data.get("ended") is True,
        how=_text(data.get("how")),
        left=[name for name in left[:100] if isinstance(name, str)] if isinstance(left, list) else [],
        heard=data.get("heard") is True,
        waits=waits,
        meets=meets,
    )


@dataclass(frozen=True)
class Words:
    """Why a rank failed, in its own words."""

    rank: int
    type: str
    text: str
    ended: bool = False  # it came to its end without an error
    ranks: tuple[int, ...] = ()  # those that it was waiting for

    def to_json(self) -> str:
        """The text that travels."""
        return json.dumps(asdict(self))


def read_words(text: str | None, world: int) -> Words | None:
    """Read what another rank wrote; None where it is not words of one of ``world`` ranks."""
    try:
        data = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    rank, kind, words, ranks = data.get("rank"), data.get("type"), data.get("text"), data.get("ranks", [])
    if not (isinstance(rank, int) and _is_number(rank) and 0 <= rank < world):
        return None
    if not (isinstance(kind, str) and isinstance(words, str)):
        return None
    late = tuple(r for r in ranks if _is_number(r)) if isinstance(ranks, list) else ()
    return Words(rank, kind[:200], words[:_LONGEST_TEXT], data.get("ended") is True, late)


def words_of(error: BaseException, rank: int) -> Words:
    """The words of an exception that this rank has raised."""
    ranks = attribute_of(error, "ranks")
    if ranks is None:
        ranks = (attribute_of(error, "rank"),)
    named = tuple(r for r in ranks if _is_number(r)) if isinstance(ranks, (tuple, list)) else ()
    try:
        text = str(error)
    except Exception as failure:  # a program's own class
        text = f"(its text cannot be read: str() raised {type(failure).__name__})"
    return Words(rank, type(error).__name__, text[:_LONGEST_TEXT], ranks=named)


def attribute_of(error: BaseException, name: str) -> Any:
    """An attribute of an exception, None where it has none; one of a program's own class may raise."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


# ---------------------------------------------------------------- where a process is


def where_now() -> str:
    """The innermost line of the program itself (not of this package, torch or Python) that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, _STANDARD, "<")) or "/torch/" in name):
            return _shown(frame)
        frame = frame.f_back
    return "" if innermost is None else _shown(innermost)


def stack_now() -> str:
    """The main thread's stack, as text; without the lines by which ``lockstep run`` starts a program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the main thread has ended"
    lines = [line for line in traceback.extract_stack(frame) if line.filename != _LAUNCHER]
    text = "".join(traceback.format_list(lines[-_NUM_LINES:]))
    return text.encode(errors="backslashreplace").decode()  # a path may hold what no text does


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


# ---------------------------------------------------------------- reading with care


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62


def _text(value: Any) -> str:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items())[:100] if isinstance(value, Mapping) else []


def _place(value: Any) -> Place | None:
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)):
        return None
    if not (_is_number(value[1]) and _is_number(value[2])):
        return None
    return Place(value[0][:_LONGEST_TEXT], value[1], value[2])
