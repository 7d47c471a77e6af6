"""Which modules are installed, and how far what they make is looked into.

The objects of a library lead far (a logger to all loggers, a queue to its threads), and change as they are used.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

# Of these no class is changed by a program.
NOT_LOOKED_INTO = frozenset(("torch", "lockstep", "numpy", "_thread")) | sys.stdlib_module_names
# What these make reports, waits or writes; no forward computes with it.
_QUIET = frozenset(
    (
        *("logging", "threading", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "_asyncio"),
        *("io", "_io", "socket", "_socket", "subprocess", "tqdm", "tensorboard", "tensorboardX", "wandb"),
    )
)
_QUIET_IN_TORCH = ("torch.utils.tensorboard", "torch.multiprocessing")
_PLAIN_HOLDERS = frozenset(("builtins", "types", "collections", "functools", "contextvars", "_contextvars"))
_MOST_DEPTH_IN_LIBRARY = 2


def root_of(name: str | None) -> str:
    """The package that a module is in."""
    return (name or "builtins").partition(".")[0]


@cache
def is_library(name: str | None) -> bool:
    """Whether a module is installed, and not of the program itself."""
    path = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return root_of(name) in NOT_LOOKED_INTO or "site-packages" in path or "dist-packages" in path


def depth_left(value: Any, left: int) -> int:
    """How many objects further to look from ``value``, where ``left`` are left; less than none: not into it either."""
    kind = value if isinstance(value, type) else type(value)
    if _is_quiet(kind.__module__) or (isinstance(value, types.FunctionType) and _is_quiet(value.__module__)):
        return -1
    if isinstance(value, type):
        return left
    if any(_is_quiet(base.__module__) for base in kind.__mro__):  # the program's own kind of it: what it has itself
        return min(left, 0)
    if kind.__module__ in _PLAIN_HOLDERS or not is_library(kind.__module__) or _is_configuration(value):
        return left
    return min(left, _MOST_DEPTH_IN_LIBRARY)


@cache
def _is_quiet(name: str | None) -> bool:
    return root_of(name) in _QUIET or (name or "").startswith(_QUIET_IN_TORCH)


def _is_configuration(value: Any) -> bool:
    """Whether it is made to hold what a program is set to, nested as the program likes."""
    return (
        isinstance(value, (argparse.Namespace, Mapping, Sequence))
        or dataclasses.is_dataclass(value)
        or "config" in type(value).__name__.lower()
    )
