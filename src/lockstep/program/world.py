"""What a loss function and a model can see of Python: found once, looked at before every step.

A program was made for the world as it was then: numbers in a closure, a configuration, a buffer or a module that was
replaced, hooks.  Another world means another program.  Containers are found by walking from the model and the loss
function; what they hold is compared by value where it is a plain number or word, and by identity where it is not.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_MOST_DEPTH = 4
_MOST_ENTRIES = 256  # a longer container is data, and compared by identity
_STRUCTURE = (
    *("_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
_Look = Callable[[], Any]


class World:
    """All that is seen from a model and a loss function."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._roots = (model, loss)
        self._find()

    def _find(self) -> None:
        self._seen: set[int] = set()
        self._looks: list[_Look] = []
        self._labels: list[str] = []
        self._walk(self._roots[0], 0, "")
        self._walk(self._roots[1], 0, "")
        self._now = self._read()

    def values(self) -> Hashable:
        """The world as it is now; what is new in it is looked at from now on."""
        now = self._read()
        if now != self._now:
            self._find()
            now = self._now
        return now

    def changed(self, before: Hashable) -> str:
        """Say where anything is not what it was, among what was looked at then; empty if nothing is."""
        assert isinstance(before, tuple)
        now = self._read()
        pairs = zip(self._labels, before, now, strict=False)
        return next((label for label, old, new in pairs if old != new), "") if now != before else ""

    def objects(self) -> list[Any]:
        """What is compared by identity: whoever keeps ``values`` keeps these, or another object may get the number."""
        return [value for look in self._looks for value in look() if type(value) not in _PLAIN]

    def _read(self) -> tuple[Hashable, ...]:
        return tuple(
            [tuple([v if type(v) in _PLAIN else id(v) for v in look()]) for look in self._looks],
        )

    # ---------------------------------------------------------------- what there is to look at

    def _walk(self, value: Any, depth: int, around: str) -> None:
        if type(value) in _PLAIN or isinstance(value, (Tensor, type, types.ModuleType)) or depth > _MOST_DEPTH:
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        label = (
            type(value).__name__ if isinstance(value, nn.Module) or not around else f"{around}: {type(value).__name__}"
        )
        for look, inner in _containers(value):
            self._looks.append(look)
            self._labels.append(label)
            for entry in inner:
                self._walk(entry, depth if isinstance(value, nn.Module) else depth + 1, label)


def _containers(value: Any) -> Iterator[tuple[_Look, list[Any]]]:
    """Ways to look into ``value``, each with what is in there now."""
    if isinstance(value, nn.Module):
        for name in _STRUCTURE:
            entries: Mapping[Any, Any] = getattr(value, name)
            yield partial(_entries_of, value, name), list(entries.values()) if name == "_modules" else []
        if not (type(value).__module__.startswith("lockstep") or "_orig_mod" in value._modules):
            yield partial(_public, vars(value)), _public(vars(value))
    elif isinstance(value, types.FunctionType):
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        cells = value.__closure__ or ()
        look = partial(_seen_by, value, names, cells)
        yield look, look()
    elif isinstance(value, types.MethodType):
        yield list, [value.__self__, value.__func__]
    elif isinstance(value, partial):
        yield list, [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (dict, list, tuple, set)):
        if len(value) <= _MOST_ENTRIES:
            look = partial(_items, value)
            yield look, look()
    elif hasattr(value, "__dict__") and not callable(getattr(value, "__array__", None)):
        yield partial(_items, vars(value)), list(vars(value).values())
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            yield list, [call]


def _entries_of(module: nn.Module, name: str) -> list[Any]:
    return list(getattr(module, name).values())


def _public(entries: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in entries.items() if name[0] != "_"]


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _seen_by(function: types.FunctionType, names: list[str], cells: Any) -> list[Any]:
    known = function.__globals__
    found = [known.get(name) for name in names]
    for cell in cells:
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)  # not filled yet
    return [*found, *(function.__defaults__ or ()), function.__code__]
