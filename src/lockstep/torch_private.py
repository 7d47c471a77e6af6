"""The one door to private torch API.

Every private name the project uses is imported here, with the reason and what stands in its way.  torch moves these
every two months; ``tests/test_torch_private.py`` fails by the name that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    _get_default_group,
    _get_default_store,
    _rank_not_in_group,
)
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

__all__ = [
    "BufferCommHookLocation",
    "BuiltinCommHookType",
    "GradBucket",
    "MixedPrecision",
    "RecordFunction",
    "all_reduce",
    "as_overlapped_optimizer",
    "backend_name",
    "cast_forward_inputs",
    "current_dist_autograd_context",
    "default_group",
    "default_store",
    "dtensor_like",
    "flatten_dense",
    "foreach_copy",
    "foreach_mul",
    "gradient_accumulator",
    "gradient_hooks",
    "in_backward",
    "in_backward_optimizer_handles",
    "in_nested_backward",
    "inputs_to_device",
    "leave_frame_to_python",
    "memory_owners",
    "preserve_version_counter",
    "queue_backward_callback",
    "rank_not_in_group",
    "unflatten_dense",
]

# The location enum and the precision dataclass are what users pass in; they must be torch's own objects.
BufferCommHookLocation = _BufferCommHookLocation
MixedPrecision = _MixedPrecision

# Public in use, but not exported as far as type checkers see: the bucket class hooks are annotated with, and the
# built-in hooks' names.
GradBucket: Any = dist.GradBucket  # type: ignore[attr-defined]
BuiltinCommHookType: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]

# The default group and its store: torch has no public way to ask for either.
default_group: Callable[[], Any] = _get_default_group
default_store: Callable[[], Any] = _get_default_store
rank_not_in_group: Callable[[Any], bool] = _rank_not_in_group

# Moves nested inputs to the device on a side stream, with RRefs and dataclasses, exactly as DDP users know it.
inputs_to_device: Callable[..., Any] = _to_kwargs
cast_forward_inputs: Callable[..., Any] = _cast_forward_inputs


# One kernel for many copies, and for many products; torch has no public names for them.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
foreach_mul: Callable[[list[torch.Tensor], float], Any] = torch._foreach_mul_

# All tensors as one flat copy, and a flat tensor as views in given shapes: one call each instead of one per tensor.
flatten_dense: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
unflatten_dense: Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]] = torch._C._nn.unflatten_dense_tensors

# A profiler range that costs a fraction of a microsecond while no profiler runs; the public one costs several.
RecordFunction: Any = torch._C._profiler._RecordFunctionFast


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


def dtensor_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around ``local`` with the placement of ``parameter``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has finished.

    The engine offers no public hook for the end of a pass; torch's own FSDP uses this one.
    """
    Variable._execution_engine.queue_callback(callback)


def leave_frame_to_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler skip this function's own frame, but compile the functions it calls.

    ``torch.compiler.disable(recursive=False)`` does that too, and marks the function besides; a module whose forward
    is so marked is traced as a whole from outside, which is what must not happen.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """The hooks that run after a gradient was accumulated, of whoever; torch offers no way to list them."""
    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return list(hooks.values()) if hooks else []


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


def gradient_accumulator(parameter: torch.Tensor) -> Any:
    """The graph node that adds into ``parameter.grad``; distributed autograd calls only hooks that sit on it."""
    with torch.enable_grad():
        expanded = parameter.expand_as(parameter)
    assert expanded.grad_fn is not None
    return expanded.grad_fn.next_functions[0][0]


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


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """The fused-optimizer wrapper behind ``_register_fused_optim``."""
    from torch.distributed.algorithms._optimizer_overlap import (  # type: ignore[attr-defined]
        _as_overlapped_optim,
    )

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)


def in_backward_optimizer_handles(parameter: torch.Tensor) -> list[Any]:
    """Hook handles that ``_apply_optimizer_in_backward`` left on a parameter; DDP has to take them over."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return list(param_to_optim_hook_handle_map.get(parameter, []))
