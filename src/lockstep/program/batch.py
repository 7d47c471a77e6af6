"""A batch as a tree: the tensors in it, and everything else that makes it what it is.

A program is made for one kind of batch: its nesting, its numbers and words, and of each tensor the shape, strides,
dtype and device.  ``Batch.key`` is all of that; two batches with equal keys differ in the values of tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def exact(value: Any) -> Hashable:
    """A number or word as something that is equal to the same one only: True is not 1, and 0.0 is not -0.0."""
    kind = type(value)
    if kind is bool:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    return (kind, repr(value)) if kind is complex else value  # type: ignore[no-any-return]


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with every tensor replaced; what is neither a container nor a tensor stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _like(tree, {key: map_tensors(value, change) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: map_tensors(getattr(tree, f.name), change) for f in fields(tree) if f.init})
    return tree


def _like(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return values
    try:
        return type(tree)(values)  # type: ignore[call-arg]
    except TypeError:
        return values  # a mapping that cannot be made from one: a plain one has the same entries


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order in which ``map_tensors`` comes to them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, note)
    return found


@dataclass(frozen=True)
class Batch:
    """A batch, taken apart."""

    tree: Any
    tensors: tuple[Tensor, ...]
    key: Hashable
    opaque: str  # the type of something in it of which a program cannot know whether it is the same again

    @staticmethod
    def of(tree: Any) -> Batch:
        opaque: list[str] = []
        key = _key(tree, opaque)
        tensors = tuple(tensors_in(tree))
        return Batch(tree, tensors, (key, _shared_memory(tensors)), opaque[0] if opaque else "")

    def rebuilt(self, tensors: list[Tensor]) -> Any:
        """The same tree around other tensors."""
        following = iter(tensors)
        return map_tensors(self.tree, lambda _: next(following))

    def shown(self) -> str:
        """The shapes, as people write them: ``[8, 256] int64, [8] float32``."""
        shapes = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors]
        return ", ".join(shapes) or "no tensors"


def _shared_memory(tensors: tuple[Tensor, ...]) -> Hashable:
    """Which tensors lie in the same memory, and how far from each other: slices of one data set are alike.

    A step that writes to one of them, which the others see, is no program (``Unwritten``).
    """
    if len(tensors) < 2:
        return ()
    owners = [t.untyped_storage().data_ptr() if t.layout == torch.strided else 0 for t in tensors]
    if len(set(owners)) == len(owners):
        return ()
    firsts = [owners.index(owner) for owner in owners]
    return tuple(
        (first, t.storage_offset() - tensors[first].storage_offset() if owner else 0)
        for first, owner, t in zip(firsts, owners, tensors, strict=True)
    )


class Unwritten:
    """Tells whether a step has written to tensors of its batch that share memory."""

    def __init__(self, batch: Batch) -> None:
        self._tensors = batch.tensors if batch.key[1] else ()  # type: ignore[index]
        self._versions = [t._version for t in self._tensors]

    def reason(self) -> str:
        """Why it cannot be a program then; empty if it has not."""
        if [t._version for t in self._tensors] == self._versions:
            return ""
        return "the step writes to tensors of the batch that share memory"


def _key(tree: Any, opaque: list[str]) -> Hashable:
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or type(tree) is not Tensor:
            opaque.append(f"{type(tree).__name__} of layout {tree.layout}")
        strides = tree.stride() if tree.layout == torch.strided else ()
        return (tuple(tree.shape), strides, tree.dtype, tree.device.type, tree.requires_grad)
    if isinstance(tree, Mapping):
        return (type(tree), tuple((_key(k, opaque), _key(v, opaque)) for k, v in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree), tuple(_key(value, opaque) for value in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return (type(tree), tuple((f.name, _key(getattr(tree, f.name), opaque)) for f in fields(tree)))
    if isinstance(tree, _PLAIN):
        return (type(tree), exact(tree))
    opaque.append(type(tree).__qualname__)
    return (type(tree), id(tree))
