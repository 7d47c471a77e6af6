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
_QUIET_STEPS = 20  # in a row, without a change: those before count no longer


# By class, as it was when something of it was last compiled here: all steps of a process share what is compiled of it.
# A method may hold its class (``super()``), and would keep it here for ever.
_methods: weakref.WeakKeyDictionary[type, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class Unguarded:
    """The hooks of a model's modules, and the methods of their classes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._list(list(model.modules()))
        self._hooks = self._hooks_now()

    def _list(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._entries = [vars(module) for module in modules]
        self._classes = list({kind: None for module in modules for kind in type(module).__mro__ if kind is not object})

    def has_changed(self) -> bool:
        """Whether any of them is another one than when this was asked the last time."""
        modules = list(self._model.modules())
        if not _are_same(self._modules, modules):
            self._list(modules)
        before, self._hooks = self._hooks, self._hooks_now()
        is_changed = not _are_same(before, self._hooks)
        for kind in self._classes:
            now = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
            known = _methods.get(kind)
            if known is None or not _are_same([method() for method in known], now):
                _methods[kind] = list(map(weakref.ref, now))
                is_changed = is_changed or known is not None
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
        self._num_quiet = 0  # steps since the last of them
        self._compute = self._compiled()

    def __call__(self, batch: Any) -> Any:
        if self._compute is self._plain:
            return self._plain(batch)
        if self._unguarded.has_changed():
            self._compile_anew()
        else:
            self._num_quiet += 1
        return self._compute(batch)

    def _compiled(self) -> Callable[[Any], Any]:
        # A code object of its own, or two steps would share their graphs, and run out of room for them.
        compiled: Callable[[Any], Any] = torch.compile(torch_private.own_code(self._plain))
        return compiled

    def _compile_anew(self) -> None:
        self._num_changes = 1 if self._num_quiet >= _QUIET_STEPS else self._num_changes + 1
        self._num_quiet = 0
        if self._num_changes > _MOST_CHANGES:
            self._record.fall_back("hooks of modules, or methods of their classes, change from step to step")
            self._compute = self._plain
            return
        self._record.note("a hook of a module or a method of a class was replaced; it was compiled anew")
        torch.compiler.reset()  # what was cut off at a graph break has a cache of its own
        self._compute = self._compiled()
