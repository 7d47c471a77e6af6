"""The replicated wrapper: a drop-in for torch's DistributedDataParallel."""

from lockstep.ddp.wrapper import DDP, DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel"]
