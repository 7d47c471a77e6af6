"""Uneven inputs: what a rank that has run out of data does so that the others can go on.

It mirrors, in the same order, every collective that a forward and backward issue on the others: the buffer sync, the
question whether this iteration synchronises, each bucket with zeros, and the exchange of used parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.engine.bucket import LiveBucket
from lockstep.engine.eager import EagerBackward
from lockstep.engine.reducer import Reducer


class Joining(Protocol):
    """What the join hook needs of the wrapper."""

    reducer: Reducer
    backward: EagerBackward

    def mirror_forward(self) -> None: ...

    def ask_whether_to_sync(self, *, has_joined: bool) -> bool: ...

    def sync_final_model(self, is_last_joiner: bool) -> None: ...


class MirrorHook(JoinHook):
    """The join hook of one wrapper."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        self._ddp: Joining = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger.values["join_uneven_inputs"] = 1
        super().__init__()

    def main_hook(self) -> None:
        """Mirror one iteration of the ranks that still have data."""
        ddp = self._ddp
        ddp.mirror_forward()
        if not ddp.ask_whether_to_sync(has_joined=True):
            return
        mirror_buckets(ddp.reducer)
        backward = ddp.backward
        if backward.exchanges_used_map_next():
            nothing = torch.zeros_like(backward.local_used_map())
            ddp.reducer.land(
                dist.all_reduce(nothing, group=ddp.reducer.process_group, async_op=True),
                nothing,
                "the exchange of used parameters (joined)",
            )
            backward.graph_is_learned = backward.static_graph
        backward.num_synced_passes += 1

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: everyone takes the model of one that trained to the end."""
        self._ddp.sync_final_model(is_last_joiner)


def mirror_buckets(reducer: Reducer) -> None:
    """Contribute zeros to every bucket.  Launch all first, as the others do, then collect."""
    flying: list[LiveBucket] = []
    for bucket in reducer.buckets:
        reducer.launch(bucket, [None] * len(bucket.slots))
        flying.append(bucket)
    for bucket in flying:
        reducer.collect(bucket)
        bucket.flat, bucket.gradients = None, []
