"""Checkpoints that are complete or absent, verified before they are used, and never unpickled."""

from lockstep.checkpoint.dcp import export_dcp, import_dcp
from lockstep.checkpoint.loading import Loaded, latest, load, plan_of, verify
from lockstep.checkpoint.saving import Handle, State, save, wait

__all__ = [
    "Handle",
    "Loaded",
    "State",
    "export_dcp",
    "import_dcp",
    "latest",
    "load",
    "plan_of",
    "save",
    "verify",
    "wait",
]
