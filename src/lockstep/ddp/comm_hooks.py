"""Communication hooks as users hand them over: what is checked, and the built-in ones by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep import torch_private
from lockstep.ddp.logbook import throw
from lockstep.engine.grad_bucket import GradBucket
from lockstep.observe.logging_data import LoggingData


def check_comm_hook(hook: Any, data: LoggingData) -> None:
    """Raise if ``hook`` cannot be called with (state, bucket), or says that it returns something else."""
    if not callable(hook):
        throw(data, TypeError, "Communication hook must be callable.")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except Exception:  # an annotation that cannot be resolved from here
        signature = inspect.signature(hook)
    names = list(signature.parameters)
    if len(names) < 2:
        throw(data, TypeError, f"A communication hook takes (state, bucket); {hook!r} takes {tuple(names)}.")
    bucket = signature.parameters.get("bucket", signature.parameters[names[1]])
    if bucket.annotation not in (inspect.Parameter.empty, Any, GradBucket, torch_private.GradBucket):
        throw(data, ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
    returns = signature.return_annotation
    if returns not in (inspect.Signature.empty, Any, torch.futures.Future, torch.futures.Future[Tensor]):
        throw(data, ValueError, "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_comm_hook(kind: Any) -> Callable[..., Any]:
    """Find the hook behind one of torch's names."""
    known: dict[Any, Any] = {
        torch_private.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        torch_private.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in known:
        raise ValueError(f"Unknown built-in hook {kind!r}; known: {[str(k) for k in known]}.")
    return known[kind]
