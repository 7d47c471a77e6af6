"""Process groups, their stores, and collectives without the checks of the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    _get_default_group,
    _get_default_store,
    _rank_not_in_group,
)

__all__ = [
    "all_reduce",
    "backend_name",
    "default_group",
    "default_store",
    "rank_not_in_group",
]

# The default group and its store: torch has no public way to ask for either.
default_group: Callable[[], Any] = _get_default_group
default_store: Callable[[], Any] = _get_default_store
# Whether this process is outside of a group: what stands for the group then has no method to ask.
rank_not_in_group: Callable[[Any], bool] = _rank_not_in_group

_options: dict[Any, Any] = {}


def all_reduce(process_group: Any, tensor: torch.Tensor, op: Any) -> Any:
    """Start an all-reduce in place; returns its work.

    The public function checks and logs in Python before each call, which a bucket in the backward would pay for.
    """
    options = _options.get(op)
    if options is None:
        options = AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        _options[op] = options
    return process_group.allreduce([tensor], options)


def backend_name(process_group: Any, device: torch.device) -> str:
    """Which backend serves ``device`` in this group; the public question answers for the group as a whole."""
    try:
        return str(process_group._get_backend(device).name()).lower()
    except (RuntimeError, AttributeError):
        return str(process_group.name()).lower()
