"""Lockstep: data-parallel training for PyTorch in which every rank stays in step."""

from lockstep import errors
from lockstep.compiling import compile, explain
from lockstep.ddp import DDP, DistributedDataParallel
from lockstep.install import install, uninstall
from lockstep.plan import Plan
from lockstep.state_dict import unwrap
from lockstep.version import __version__

__all__ = [
    "DDP",
    "DistributedDataParallel",
    "Plan",
    "__version__",
    "compile",
    "errors",
    "explain",
    "install",
    "uninstall",
    "unwrap",
]
