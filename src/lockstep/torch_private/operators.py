"""Operators of our own: how a graph comes to the function behind one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_num_modes = torch._C._len_torch_dispatch_stack
_level_of_transforms = torch._C._functorch.maybe_current_level
_is_profiled = torch._C._autograd._profiler_enabled
_PLAIN = {Tensor, torch.nn.Parameter}
_PLAIN_OR_NONE = {*_PLAIN, type(None)}


def call_directly(operator: Any, function: Callable[..., Any]) -> None:
    """Let a call of ``operator`` reach ``function`` at once, if its first argument or those in it are plain tensors.

    Torch's dispatcher takes as long as what these functions do: it asks autograd, and turns all arguments into its own
    values and those into Python's again.  Whoever traces, profiles or transforms still comes by it.  Called before
    anyone else has the operator, whose hash is that of what it calls.
    """
    dispatch = operator._op

    @wraps(function)
    def call(first: Any, *others: Any, **named: Any) -> Any:
        kinds = set(map(type, first)) if type(first) is list else {type(first)}
        is_plain = kinds.issubset(_PLAIN_OR_NONE) and type(others[0]) in _PLAIN
        if is_plain and not (_num_modes() or _is_profiled() or _level_of_transforms() is not None):
            return function(first, *others, **named)
        return dispatch(first, *others, **named)

    operator._op = call
