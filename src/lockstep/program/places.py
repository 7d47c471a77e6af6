"""Where in a user's program something went wrong, as ``model.py:31``, and what that was, as a sentence."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

from lockstep import torch_private

_OURS = Path(__file__).parent.parent
_TORCHS = Path(torch.__file__).parent
_PYTHONS = Path(sysconfig.get_paths()["stdlib"])
_PACKAGES = ("site-packages", "dist-packages")
_MOST_CHARS = 300


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor this package's."""
    path = Path(file)
    return not file.startswith("<") and _OURS not in path.parents and _TORCHS not in path.parents


def _is_installed(file: str) -> bool:
    """Whether a file is Python's own, or of an installed package: less telling than one of the program's."""
    path = Path(file)
    return _PYTHONS in path.parents or any(part in _PACKAGES for part in path.parts)


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own that led to an error, else of a package he uses; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    frames = [f for f in frames if not _is_installed(f.filename)] or frames
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def shown(error: BaseException) -> str:
    """An error in one line, with its place."""
    place = place_of(error)
    return f"{_named(error)}{f' (at {place})' if place else ''}"


def why_not_traced(error: BaseException) -> str:
    """Why running a step on tensors without values ended in an error, with the place in the user's program."""
    place, (kind, operator) = place_of(error), torch_private.kind_of_trace_error(error)
    at = f" (at {place})" if place else " (in torch, outside of the program's own lines)"
    if kind is torch_private.TraceError.SHAPE:
        return f"the shape of what {operator_shown(operator)} returns depends on the values of a tensor{at}"
    if kind is torch_private.TraceError.RULE:
        return f"torch cannot tell the shape of what {operator_shown(operator)} returns without running it{at}"
    if kind is torch_private.TraceError.VALUE:
        asked = operator_shown(operator) if operator else "a branch or a number"
        return f"the step needs the value of a tensor while it is traced, for {asked}{at}"
    if place:
        return f"the program's own code raises {_named(error)} when it is traced with tensors that have no values{at}"
    return f"torch cannot trace or compile it, and raises {_named(error)}{at}"


def _named(error: BaseException) -> str:
    """The type of an error with the first line of its text, where that says anything."""
    text = next(iter(str(error).strip().splitlines()), "")[:_MOST_CHARS]
    return f"{type(error).__name__}: {text}" if any(c.isalpha() for c in text) else type(error).__name__


def operator_shown(operator: object) -> str:
    """An operator as a user knows it: ``nonzero()`` for ``aten.nonzero.default``."""
    name = str(operator)
    if "_local_scalar_dense" in name:
        return "a branch or item()"
    parts = name.split(".")
    return f"{parts[1]}()" if len(parts) > 1 else name or "an operator"
