"""Signs of life, which tests wait for in place of a time in which they should have come."""

from __future__ import annotations

from time import sleep

import torch.distributed as dist

from lockstep.agree.pulse import pulse_of_this_process


def know_the_others(*, leaves_last: bool = False) -> None:
    """Wait until this rank has read a sign of life of every other one; the one that leaves last, until all have."""
    pulse = pulse_of_this_process()
    assert pulse is not None
    while any(pulse.last_seen(rank) is None for rank in range(pulse.world) if rank != pulse.rank):
        sleep(0.05)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {pulse.rank} knows the others", "yes")
    while leaves_last and not store.check([f"rank {rank} knows the others" for rank in range(pulse.world)]):
        sleep(0.05)
