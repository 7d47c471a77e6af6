"""What torch itself is set to around a step: a program holds what it was when it was traced.

Flags that change which kernels run, or that a model may ask for, mean another program.  A step that was called where
nothing needs a gradient, or inside of a mode that wants to see every operator, is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep import torch_private


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names, per backend
        return "by backend"


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return (
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )


def _deterministic() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def _backends() -> tuple[Any, ...]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return (
        *(torch.backends.mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    )


TORCH_STATE: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("the default dtype", torch.get_default_dtype),
    ("the default device", torch.get_default_device),
    ("deterministic algorithms", _deterministic),
    ("the precision of matrix products", _matmul_precision),
    ("flags of backends", _backends),
    ("the use of autocast", _autocast),
    ("the detection of anomalies", torch.is_anomaly_enabled),
    ("the number of threads", torch.get_num_threads),
    ("hooks on all modules", torch_private.global_hooks),
)


def why_not_now() -> str:
    """Why a call that is made just here is none for a program; empty if it may be."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "it was called where gradients are off"
    modes = torch_private.modes_around()
    return f"a mode of torch stands around it, which sees every operator ({', '.join(modes)})" if modes else ""
