"""What Lockstep changes in torch for the whole process; done when the first wrapper is built, not by an import.

The hook on all optimizers (``engine/step_guard.py``) is the one thing more; it comes with the first wrapper, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep import torch_private
from lockstep.engine import module_watch
from lockstep.engine.feeders import compiled_autograd
from lockstep.graph.backend import lockstep_backend

if TYPE_CHECKING:
    from lockstep.graph.backend import OverlapCompiler

_is_active = False


def activate() -> None:
    """Watch modules for new parameters, make the backend known by name, and compile the graphs of our wrappers."""
    global _is_active
    if _is_active:
        return
    module_watch.start()
    torch_private.register_backend(lockstep_backend, "lockstep")
    torch_private.stand_in_for_ddp_optimizer(_overlap_compiler)
    compiled_autograd.start()
    _is_active = True


def _overlap_compiler(
    bucket_bytes_cap: int, backend_compile_fn: Callable[..., Any], first_bucket_cap: int | None = None
) -> OverlapCompiler | None:
    """For the wrapper that runs, if it is ours: see graph/backend.py."""
    from lockstep.ddp.wrapper import DistributedDataParallel

    ddp = DistributedDataParallel._active_ddp_module
    return ddp._parts.compilation.compiler_for(backend_compile_fn) if isinstance(ddp, DistributedDataParallel) else None
