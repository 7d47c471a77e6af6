"""Ranks made equal when a model is wrapped: they compare models and options, then take rank 0's state."""

from __future__ import annotations

from lockstep import settings
from lockstep.agree.model import agree_on_model
from lockstep.ddp import setup
from lockstep.ddp.options import Options
from lockstep.ddp.peers import Peers
from lockstep.engine.module_state import broadcast_tensors, sync_module_states


def make_ranks_equal(wrapped: setup.Wrapped, options: Options, peers: Peers, chunk_bytes: int) -> None:
    """Compare with the other ranks, connect with them, then take rank 0's parameters and buffers."""
    if peers.board is not None:
        compared = options.compared(wrapped.ignored, wrapped.placement.device_type, peers.world)
        ignored = wrapped.ignored - set(options.delayed_names)
        with_buffers = options.syncs_buffers_at_wrap
        mine = setup.describe(wrapped.module, ignored, compared, wrapped.plan, with_buffers=with_buffers)
        agree_on_model(peers.board, mine, settings.agreement_timeout())
    peers.connect()
    take_state(wrapped, peers, 0, chunk_bytes, with_buffers=options.syncs_buffers_at_wrap)
    if options.delayed_names:
        parameters = dict(wrapped.module.named_parameters(remove_duplicate=False))
        delayed = [parameters[name] for name in options.delayed_names]
        broadcast_tensors(delayed, peers.group, 0, chunk_bytes, peers.watch)


def take_state(
    wrapped: setup.Wrapped, peers: Peers, source: int, chunk_bytes: int, *, with_buffers: bool = True
) -> None:
    """Take the parameters and buffers of one rank of the group."""
    sync_module_states(
        wrapped.module,
        peers.group,
        source=source,
        ignored=wrapped.ignored,
        with_buffers=with_buffers,
        chunk_bytes=chunk_bytes,
        watch=peers.watch,
    )
