"""Which parameters a forward used, found by walking the autograd graph back from its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in any nesting of lists, tuples, dicts, dataclasses and locally owned RRefs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from find_tensors(getattr(value, item.name))
    elif _is_rref(value) and value.is_owner():
        yield from find_tensors(value.local_value())


def _is_rref(value: Any) -> bool:
    return dist.is_available() and dist.rpc.is_available() and isinstance(value, dist.rpc.RRef)


def parameters_reached_from(outputs: Iterable[Tensor]) -> set[int]:
    """``id()`` of every leaf that the graph behind ``outputs`` accumulates into."""
    reached: set[int] = set()
    nodes = []
    for output in outputs:
        if output.grad_fn is not None:
            nodes.append(output.grad_fn)
        elif output.requires_grad:
            reached.add(id(output))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return reached
