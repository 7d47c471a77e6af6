"""Where in a user's program something went wrong, as ``model.py:31``."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_OURS = Path(__file__).parent.parent
_TORCHS = Path(torch.__file__).parent


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor this package's."""
    path = Path(file)
    return not file.startswith("<") and _OURS not in path.parents and _TORCHS not in path.parents


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own that led to an error; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def shown(error: BaseException) -> str:
    """An error in one line, with its place."""
    lines = str(error).strip().splitlines() or [""]
    place = place_of(error)
    return f"{type(error).__name__}: {lines[0]}{f' (at {place})' if place else ''}"
