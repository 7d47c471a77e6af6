"""A world of one skips its collective, as there is nothing to send; to measure what it costs, it is forced here.

torch's DDP always calls the collective, so there is nothing to do for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def force_collective(model: Any) -> None:
    """Let a wrapper of any subject call its collective in a world of one; raises where it cannot be made to."""
    reducer = getattr(model, "reducer", None)
    transport = getattr(reducer, "transport", None)
    if hasattr(transport, "forces_collective"):
        transport.forces_collective = True
    elif hasattr(reducer, "start") and hasattr(reducer, "process_group"):
        _force_in_earlier_version(reducer)
    elif type(model).__module__.startswith("lockstep"):
        raise RuntimeError(f"{type(model).__module__} offers no way to force a collective in a world of one")


@contextmanager
def forced_collectives_of_shards() -> Iterator[None]:
    """Let sharded models gather and scatter in a world of one too, in here."""
    from lockstep.shard.mesh import ShardMesh

    before = ShardMesh.is_alone
    ShardMesh.is_alone = property(lambda self: False)
    try:
        yield
    finally:
        ShardMesh.is_alone = before


def _force_in_earlier_version(reducer: Any) -> None:
    """Versions before transports decide in ``Reducer.start``; the same call follows here that a larger world gets."""
    package = type(reducer).__module__.partition(".")[0]
    flights = importlib.import_module(f"{package}.engine.flight")
    private = importlib.import_module(f"{package}.torch_private")
    usual_start = reducer.start

    def start(bucket: Any, flat: Any) -> Any:
        if reducer.comm_hook is not None or flat.is_sparse or flat.numel() == 0 or flat.is_complex():
            return usual_start(bucket, flat)
        work = private.all_reduce(reducer.process_group, flat, dist.ReduceOp.SUM)
        return flights.WorkFlight(work, reducer._blocks_host(flat))

    reducer.start = start


def num_left_in_graph(model: Any) -> int:
    """How many buckets the last backward launched from inside a compiled graph, in any version."""
    buckets = model.reducer.buckets
    if hasattr(buckets[0], "left_in_graph"):
        return sum(bucket.left_in_graph for bucket in buckets)
    return sum(bucket.num_clean_windows > 0 for bucket in buckets)
