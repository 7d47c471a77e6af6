"""Only the largest elements of each bucket travel; the rest waits in a residual (error feedback).

What travels: each rank picks its ``ratio`` largest elements by magnitude of gradient plus residual, and one
all-gather carries their values (in the bucket's dtype) and int32 positions: (element size + 4) * k bytes to
each other rank. Every rank adds the contributions in rank order, so all ranks end with the same bits. The
bytes grow with the world: against a ring all-reduce of float32, top-k sends less only while ``ratio < 1 /
num_ranks``.

What is kept: one residual per bucket, float32 (float64 for float64 buckets), as long as the bucket.
"""

# No `from __future__ import annotations` here: torch checks the annotations of a hook as objects, not as
# strings.
import math

import torch
import torch.distributed as dist
from torch.futures import Future

from lockstep.hooks.residual import ErrorFeedbackState, commit_if_finite
from lockstep.hooks.state import (
    all_gather_flat,
    average_exactly,
    bucket_needs_no_compression,
    keep_for_current_stream,
    payload_bytes,
)
from lockstep.hooks.wire import all_gather_bytes, all_reduce_bytes

_INDEX_BYTES = 4
# Each rank's row starts on a multiple of this, so that its parts may be viewed as any dtype.
_ROW_ALIGNMENT = 16


class TopKState(ErrorFeedbackState):
    """State of ``topk_hook``; ``ratio`` is the share of elements that each rank sends per step."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, ratio: float = 0.01) -> None:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"ratio is the share of elements to send and must be in (0, 1], got {ratio!r}")
        super().__init__(process_group)
        self.ratio = ratio


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the largest elements of all ranks; zero elsewhere, with the rest kept for the next step."""
    buffer = bucket.buffer()
    if bucket_needs_no_compression(state, buffer):
        return average_exactly(state, buffer)
    if buffer.numel() > torch.iinfo(torch.int32).max:
        raise ValueError(f"a bucket of {buffer.numel()} elements is too long for int32 positions; lower bucket_cap_mb")

    num_ranks = state.num_ranks
    work_dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    residual = state.residual_of(bucket, lambda: {"left_out": torch.zeros_like(buffer, dtype=work_dtype)})["left_out"]

    compensated = residual + buffer
    num_kept = max(1, math.ceil(state.ratio * buffer.numel()))
    # topk ranks NaN above everything and |inf| above every number, so what is not finite is always sent.
    positions = torch.topk(compensated.abs(), num_kept, sorted=False).indices
    chosen = compensated[positions]
    values = chosen.to(buffer.dtype)
    # What rounding to the bucket's dtype took away stays behind as well.
    left_out = compensated.index_copy_(0, positions, chosen - values.to(work_dtype))

    row = _pack(values, positions)
    state.wire.add(all_gather_bytes(row.numel(), num_ranks), all_reduce_bytes(payload_bytes(buffer), num_ranks))
    rows = torch.empty(num_ranks * row.numel(), dtype=torch.uint8, device=buffer.device)

    def combine(_: Future[list[torch.Tensor]]) -> torch.Tensor:
        keep_for_current_stream(rows, left_out, residual, buffer)
        total = torch.zeros_like(residual)
        for rank_row in rows.view(num_ranks, -1).unbind():
            rank_values, rank_positions = _unpack(rank_row, num_kept, buffer.dtype)
            # Positions of one rank are distinct, so the order of additions is the order of ranks.
            total.index_add_(0, rank_positions, rank_values.to(work_dtype))
        buffer.copy_(total.div_(num_ranks))
        commit_if_finite(buffer, [(residual, left_out)])
        return buffer

    return all_gather_flat(rows, row, state.process_group).then(combine)


def _pack(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One flat row of bytes: the positions, the values, and zeros up to the alignment.

    Positions come first: two-byte values of odd count in front of them would leave them misaligned.
    """
    parts = [positions.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]
    padding = -sum(part.numel() for part in parts) % _ROW_ALIGNMENT
    if padding:
        parts.append(torch.zeros(padding, dtype=torch.uint8, device=values.device))
    return torch.cat(parts)


def _unpack(row: torch.Tensor, num_kept: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    positions_end = num_kept * _INDEX_BYTES
    values_end = positions_end + num_kept * dtype.itemsize
    positions = row[:positions_end].view(torch.int32).to(torch.int64)
    # Cloned, because eight-byte values behind an odd count of four-byte positions are not aligned in place.
    values = row[positions_end:values_end].clone().view(dtype)
    return values, positions
