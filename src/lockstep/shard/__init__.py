"""Sharded models: every rank keeps a part of the parameters, and has a unit of them whole only while it computes."""

from lockstep.shard.api import fully_shard
from lockstep.shard.module import ShardedModule, register_forward_method, share_comm_ctx
from lockstep.shard.older import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "ShardedModule",
    "fully_shard",
    "register_forward_method",
    "share_comm_ctx",
]
