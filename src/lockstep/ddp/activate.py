"""What Lockstep changes in torch for the whole process; done when the first wrapper is built, not by an import.

The hook on all optimizers (``engine/step_guard.py``) is the one thing more; it comes with the first wrapper, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep import torch_private
from lockstep.ddp import dispatch
from lockstep.ddp.dispatch import GraphDispatcher
from lockstep.engine import module_watch
from lockstep.engine.feeders import compiled_autograd
from lockstep.graph import meeting
from lockstep.graph.backend import lockstep_backend

_is_active = False


def activate() -> None:
    """Watch modules for new parameters, make the backend known by name, and compile the graphs of our wrappers."""
    global _is_active
    if _is_active:
        return
    module_watch.start()
    torch_private.register_backend(lockstep_backend, "lockstep")
    torch_private.stand_in_for_ddp_optimizer(_graph_dispatcher, dispatch.any_alive)
    torch_private.guard_on_groups()
    compiled_autograd.start()
    meeting.start()
    _is_active = True


def _graph_dispatcher(
    bucket_bytes_cap: int, backend_compile_fn: Callable[..., Any], first_bucket_cap: int | None = None
) -> GraphDispatcher | None:
    """For the wrapper that runs, if it is ours, or whichever the graph belongs to, if none does."""
    from lockstep.ddp.wrapper import DistributedDataParallel

    active = DistributedDataParallel._active_ddp_module
    if isinstance(active, DistributedDataParallel):
        return GraphDispatcher(active, backend_compile_fn)
    is_torchs = isinstance(torch_private.TorchDDP._active_ddp_module, torch_private.TorchDDP)
    return None if is_torchs or not dispatch.any_alive() else GraphDispatcher(None, backend_compile_fn)
