"""What dynamo hands graphs to: backends by name, behind their wrappers, and those made of AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unwrap_backend(backend: Any) -> tuple[Any, dict[str, Any]]:
    """The compiler behind the wrappers that torch.compile and dynamo put around it, and what they call it with."""
    for _ in range(10):
        inner = getattr(backend, "_torchdynamo_orig_backend", None)
        if inner is None:
            break
        backend = inner
    if type(backend) is torch._TorchCompileWrapper:
        return backend.compiler_fn, dict(backend.kwargs)
    return backend, {}


def register_backend(function: Callable[..., Any], name: str) -> None:
    """Make a backend known by name, if it is not yet; entry points do the same for installed packages only."""
    from torch._dynamo.backends import registry

    if registry._COMPILER_FNS.get(name) is not function:  # asked by name before, so found by its entry point
        registry.register_backend(compiler_fn=function, name=name)


def aot_backend_parts(backend: Any) -> dict[str, Any] | None:
    """The parts of a backend made of AOTAutograd (``aot_eager`` and what ``aot_autograd()`` makes); None for others."""
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    if isinstance(backend, AotAutograd):
        return {"partition_fn": default_partition, **backend.kwargs}
    if backend is aot_eager:
        return {
            "fw_compiler": boxed_nop,
            "bw_compiler": boxed_nop,
            "partition_fn": min_cut_rematerialization_partition,
            "keep_inference_input_mutations": True,
        }
    return None


def aot_backend(parts: dict[str, Any]) -> Callable[..., Any]:
    """A backend made of AOTAutograd with these parts; the maker lives in a private module."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**parts)
