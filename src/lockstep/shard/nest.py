"""Tensors in whatever a forward takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting of lists, tuples, dicts and dataclasses, with every tensor changed; itself if none was."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {key: map_tensors(change, item) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        changed = value.copy()  # keeps the kind of dict: OrderedDict, a model's output
        for key, item in items.items():
            changed[key] = item
        return changed
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value) if f.init}
        changed_only = {name: new for name, new in found.items() if new is not getattr(value, name)}
        return replace(value, **changed_only) if changed_only else value
    return value


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """The same nesting, with floating point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
