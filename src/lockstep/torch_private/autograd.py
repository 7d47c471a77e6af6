"""The autograd engine: its passes, accumulators and hooks, and who holds the memory of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

__all__ = [
    "current_dist_autograd_context",
    "engine_will_run",
    "gradient_accumulator",
    "in_backward",
    "in_nested_backward",
    "memory_owners",
    "only_hooks_are_ours",
    "preserve_version_counter",
    "queue_backward_callback",
]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has finished.

    The engine offers no public hook for the end of a pass; torch's own FSDP uses this one.
    """
    Variable._execution_engine.queue_callback(callback)


_hooks_before = attrgetter("_backward_hooks")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")


def only_hooks_are_ours(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but one hook after accumulation looks at these parameters' gradients on their way."""
    try:
        return not any(map(_hooks_before, parameters)) and set(map(len, map(_hooks_after, parameters))) == {1}
    except TypeError:  # one of them has none at all
        return False


def engine_will_run(node: Any) -> bool:
    """Whether the backward pass that is running now comes to ``node``.

    Asked for the node that accumulates into .grad, it tells a backward from torch.autograd.grad, for which the
    question is an error.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def memory_owners(tensor: torch.Tensor) -> int:
    """How many tensors, of whoever, live in this tensor's memory; torch counts, but has no public question."""
    count = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return count - 1  # without the storage object just made to ask


def in_nested_backward() -> bool:
    """In a callback at the end of a pass: whether that pass ran inside another one (a reentrant checkpoint).

    The thread then still has a node of the outer pass under evaluation; no public question gives that away.
    """
    return torch._C._current_autograd_node() is not None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass right now."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_accumulator(parameter: torch.Tensor) -> Any | None:
    """The graph node that adds into ``parameter.grad``; distributed autograd calls only hooks that sit on it.

    None where autograd is out of reach: inside an operator that a dispatch mode (a flop counter, say) has called.
    """
    with torch.enable_grad():
        expanded = parameter.expand_as(parameter)
    return None if expanded.grad_fn is None else expanded.grad_fn.next_functions[0][0]


def preserve_version_counter(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Buffers are overwritten between forward and backward; autograd must not take that for a user's edit."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def current_dist_autograd_context() -> int | None:
    """Id of the distributed autograd context this thread is in, if any (torch offers no public question for it).

    Without an RPC agent there can be none, which is the cheap and usual answer.
    """
    if not (dist.is_available() and dist.rpc.is_available() and torch._C._distributed_rpc._is_current_rpc_agent_set()):
        return None
    from torch.distributed.autograd import _current_context  # type: ignore[attr-defined]

    try:
        return int(_current_context()._context_id())
    except RuntimeError:
        return None
