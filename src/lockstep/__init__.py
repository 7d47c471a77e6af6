"""Lockstep: data-parallel training for PyTorch in which every rank stays in step.

Importing it changes nothing and costs next to nothing: each name below is loaded when it is first used, and what has to
be changed in torch is changed when the first model is wrapped.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# These two are taken at once: the function has the name of its module, which would be found in its place once
# something had imported it.
from lockstep.install import install, uninstall
from lockstep.version import __version__

if TYPE_CHECKING:
    from typing import Any

    from lockstep import checkpoint, data, errors, hooks
    from lockstep.agree.stopping import stopping
    from lockstep.compiling import compile, explain
    from lockstep.ddp import DDP, DistributedDataParallel
    from lockstep.observe.report import write_report
    from lockstep.observe.timeline import Timeline
    from lockstep.plan import Plan
    from lockstep.program import TrainStep, load_step
    from lockstep.shard import FullyShardedDataParallel, fully_shard
    from lockstep.state_dict import unwrap

__all__ = [
    "DDP",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Plan",
    "Timeline",
    "TrainStep",
    "__version__",
    "checkpoint",
    "compile",
    "data",
    "errors",
    "explain",
    "fully_shard",
    "hooks",
    "install",
    "load_step",
    "stopping",
    "uninstall",
    "unwrap",
    "write_report",
]

# Each name and the module that has it; a module that is a public name itself stands for itself.
_MODULE_OF = {
    "DDP": "lockstep.ddp",
    "DistributedDataParallel": "lockstep.ddp",
    "FullyShardedDataParallel": "lockstep.shard",
    "Plan": "lockstep.plan",
    "Timeline": "lockstep.observe.timeline",
    "TrainStep": "lockstep.program",
    "checkpoint": "lockstep.checkpoint",
    "compile": "lockstep.compiling",
    "data": "lockstep.data",
    "errors": "lockstep.errors",
    "explain": "lockstep.compiling",
    "fully_shard": "lockstep.shard",
    "hooks": "lockstep.hooks",
    "load_step": "lockstep.program",
    "stopping": "lockstep.agree.stopping",
    "unwrap": "lockstep.state_dict",
    "write_report": "lockstep.observe.report",
}

# Out of sight of type checkers, for which a module with __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load a public name, and keep it here: only the first access comes this way."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_MODULE_OF[name])
        value = globals()[name] = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
