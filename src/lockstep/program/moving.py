"""Objects of Python that move on when they are used, and hold no value that could be read: iterators, generators.

A program would hold the number that one of them gave when it was traced.  What each has come to is read here, so that a
step that moves one is noticed.
"""

from __future__ import annotations

import array
import itertools
import operator
import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_PLAIN = (int, float, bool, str, bytes, type(None))
_MOST_BYTES = 4096
_ITERATORS_OF = ("builtins", "itertools")
_looks = itertools.count()


def place_look(value: Any) -> Callable[[], list[Any]] | None:
    """A way to see how far an object has moved; None for one that does not move."""
    if isinstance(value, random.Random):
        return partial(_of_random, value)
    if isinstance(value, torch.Generator):
        # Of the default one a program draws as a step does.
        return None if value is torch.default_generator else partial(_of_generator, value)
    if type(value).__module__.startswith("numpy.random"):
        return partial(_of_numpy, value)
    if isinstance(value, types.GeneratorType):
        return partial(_of_frame, value)
    if isinstance(value, (bytearray, array.array, memoryview)) or any(
        kind.__module__ == "_ctypes" for kind in type(value).__mro__
    ):
        return partial(_of_bytes, value)
    if isinstance(value, Iterator) and type(value).__module__ in _ITERATORS_OF:
        return partial(_of_iterator, value)
    return None


def _of_random(source: random.Random) -> list[Any]:
    return [hash(source.getstate())]


def _of_generator(source: torch.Generator) -> list[Any]:
    return [hash(tuple(source.get_state().tolist()))]


def _of_numpy(source: Any) -> list[Any]:
    bits = getattr(source, "bit_generator", source)
    state = getattr(bits, "state", None)
    if state is None:  # the older kind
        state = source.get_state() if hasattr(source, "get_state") else None
    return [repr(state)]


def _of_frame(source: types.GeneratorType[Any, Any, Any]) -> list[Any]:
    frame = source.gi_frame
    if frame is None:
        return [None]
    return [frame.f_lasti, *(v if isinstance(v, _PLAIN) else id(v) for v in frame.f_locals.values())]


def _of_bytes(source: Any) -> list[Any]:
    try:
        content = memoryview(source).tobytes()
    except (TypeError, ValueError):  # of ctypes, too: a pointer's target, a function, memory that was released
        return []
    return [content if len(content) <= _MOST_BYTES else hash(content)]


def _of_iterator(source: Iterator[Any]) -> list[Any]:
    if isinstance(source, itertools.count):
        return [repr(source)]
    left = operator.length_hint(source, -1)
    return [left if left >= 0 else -2 - next(_looks)]  # one that does not tell where it is: never the same again
