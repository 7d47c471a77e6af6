"""Counts the bytes of tensors that are alive, and the most there were at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sees every tensor that an operator makes while it is entered; ``peak`` is the most there was at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes in and was not seen before was there before, and does not count.
        self._known.update(map(torch.Tensor.untyped_storage, _tensors((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, num_bytes)

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]
