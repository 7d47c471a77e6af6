"""Gradients travel as bfloat16: half the bytes of float32, the range of float32, 8 bits of precision.

What travels: one all-reduce of the bucket in bf16, 2 bytes per element in place of 4 (or 8). Nothing is kept
between steps. The average is taken before rounding, so a sum over many ranks stays in range.
"""

# No `from __future__ import annotations` here: torch checks the annotations of a hook as objects, not as
# strings.
import torch
import torch.distributed as dist
from torch.futures import Future

from lockstep.hooks.state import (
    CompressionState,
    average_exactly,
    bucket_needs_no_compression,
    keep_for_current_stream,
    payload_bytes,
)
from lockstep.hooks.wire import all_reduce_bytes


class Bf16State(CompressionState):
    """State of ``bf16_hook``: the group and the byte counters."""


def bf16_hook(state: Bf16State, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the bucket over all ranks in bf16 and give it back in its own dtype."""
    buffer = bucket.buffer()
    if bucket_needs_no_compression(state, buffer):
        return average_exactly(state, buffer)

    num_ranks = state.num_ranks
    rounded = (buffer / num_ranks).to(torch.bfloat16)
    state.wire.add(
        all_reduce_bytes(payload_bytes(rounded), num_ranks),
        all_reduce_bytes(payload_bytes(buffer), num_ranks),
    )
    work = dist.all_reduce(rounded, group=state.process_group, async_op=True)

    def restore(_: Future[list[torch.Tensor]]) -> torch.Tensor:
        keep_for_current_stream(rounded, buffer)
        return buffer.copy_(rounded)

    return work.get_future().then(restore)


# All its collectives start in the same order on every rank, so buckets may be under way together.
bf16_hook.keeps_order = bf16_hook.is_linear = True  # type: ignore[attr-defined]
