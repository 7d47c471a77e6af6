"""Mode ``"compiled"``, and what a compiled function does not look at again: hooks of modules, methods of classes.

Dynamo holds both for constant: a forward hook that comes later is not run, nor is a method that took the place of one
that it knows.  Here they are looked at before each step; where they have changed, everything is compiled anew.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.program.record import Record

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_CHANGES = 8  # after which nothing is compiled any more


# By class, as it was when something of it was last compiled here: all steps of a process share what is compiled of it.
_methods: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


class Unguarded:
    """The hooks of a model's modules, and the methods of their classes."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._entries = [vars(module) for module in modules]
        self._classes = list({kind: None for module in modules for kind in type(module).__mro__ if kind is not object})
        self._hooks = self._hooks_now()

    def has_changed(self) -> bool:
        """Whether any of them is another one than when this was asked the last time."""
        before, self._hooks = self._hooks, self._hooks_now()
        is_changed = not _are_same(before, self._hooks)
        for kind in self._classes:
            now = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
            if not _are_same(_methods.setdefault(kind, now), now):
                _methods[kind] = now
                is_changed = True
        return is_changed

    def _hooks_now(self) -> list[Any]:
        held = [entries[name] for entries in self._entries for name in _HOOKS if entries[name]]
        return [hook for hooks in held for hook in hooks.values()]


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


class Compiled:
    """The model and its loss under ``torch.compile``."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any], record: Record) -> None:
        self._plain = lambda batch: loss(model, batch)
        self._unguarded = Unguarded(model)
        self._record = record
        self._num_changes = 0
        self._compute = self._compiled()

    def __call__(self, batch: Any) -> Any:
        if self._unguarded.has_changed():
            self._compile_anew()
        return self._compute(batch)

    def _compiled(self) -> Callable[[Any], Any]:
        # A code object of its own, or two steps would share their graphs, and run out of room for them.
        compiled: Callable[[Any], Any] = torch.compile(torch_private.own_code(self._plain))
        return compiled

    def _compile_anew(self) -> None:
        self._num_changes += 1
        if self._num_changes > _MOST_CHANGES:
            self._record.fall_back("hooks of modules, or methods of their classes, change from step to step")
            self._compute = self._plain
            return
        self._record.note("a hook of a module or a method of a class was replaced; it was compiled anew")
        torch.compiler.reset()  # what was cut off at a graph break has a cache of its own
        self._compute = self._compiled()
