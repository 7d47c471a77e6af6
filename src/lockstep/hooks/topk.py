"""Only the largest elements travel; the rest waits in a residual (error feedback).

What travels: the bucket is cut into chunks, and each rank picks from every chunk the ``ratio`` largest elements
by magnitude of gradient plus residual. One all-gather carries their values (in the bucket's dtype) and their
int16 places within the chunk: (element size + 2) bytes per chosen element to each other rank. Every rank adds
the contributions in rank order, so all ranks end with the same bits. The bytes grow with the world: against a
ring all-reduce of float32, top-k sends less only while ``ratio < 4 / 3 / num_ranks``.

Choosing per chunk and not per bucket is fair to parameters with small gradients: from the bucket as a whole they
would be sent once in a long while, which optimizers that rescale each parameter (Adam) take badly.

What is kept: one residual per bucket, float32 (float64 for float64 buckets), as long as the bucket.
"""

# No `from __future__ import annotations` here: torch checks a hook's annotations as objects, not as strings.
from dataclasses import dataclass

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

_PLACE_BYTES = 2
_LARGEST_CHUNK = 2**15
# Each rank's row starts on a multiple of this, so that its parts may be viewed as any dtype.
_ROW_ALIGNMENT = 16


class TopKState(ErrorFeedbackState):
    """State of ``topk_hook``; ``ratio`` is the share of elements that each rank sends per step."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, ratio: float = 0.01, chunk_size: int = 1024
    ) -> None:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"ratio is the share of elements to send and must be in (0, 1], got {ratio!r}")
        if not 1 <= chunk_size <= _LARGEST_CHUNK:
            raise ValueError(f"chunk_size must be from 1 to {_LARGEST_CHUNK}, got {chunk_size!r}")
        super().__init__(process_group)
        self.ratio = ratio
        self.chunk_size = chunk_size


@dataclass(frozen=True)
class ChunkLayout:
    """How a bucket is cut into chunks, and how many elements of each are sent."""

    num_elements: int
    chunk: int
    num_chunks: int
    num_kept: int

    @staticmethod
    def of(num_elements: int, chunk_size: int, ratio: float) -> "ChunkLayout":
        chunk = min(chunk_size, num_elements)
        return ChunkLayout(num_elements, chunk, -(-num_elements // chunk), max(1, round(ratio * chunk)))

    @property
    def padded_elements(self) -> int:
        return self.chunk * self.num_chunks

    @property
    def num_sent(self) -> int:
        return self.num_kept * self.num_chunks


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the largest elements of all ranks; zero elsewhere, with the rest kept for the next step."""
    buffer = bucket.buffer()
    if bucket_needs_no_compression(state, buffer):
        return average_exactly(state, buffer)

    num_ranks = state.num_ranks
    layout = ChunkLayout.of(buffer.numel(), state.chunk_size, state.ratio)
    work_dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    residual = state.residual_of(bucket, lambda: {"left_out": torch.zeros_like(buffer, dtype=work_dtype)})["left_out"]

    compensated = torch.zeros(layout.padded_elements, dtype=work_dtype, device=buffer.device)
    torch.add(residual, buffer, out=compensated[: layout.num_elements])
    chunks = compensated.view(layout.num_chunks, layout.chunk)
    # topk ranks NaN above everything and |inf| above every number, so what is not finite is always sent.
    places = torch.topk(chunks.abs(), layout.num_kept, dim=1, sorted=False).indices
    chosen = chunks.gather(1, places)
    values = chosen.to(buffer.dtype)
    # What rounding to the bucket's dtype took away stays behind as well.
    chunks.scatter_(1, places, chosen - values.to(work_dtype))
    left_out = compensated[: layout.num_elements]

    row = _pack(values, places)
    state.wire.add(all_gather_bytes(row.numel(), num_ranks), all_reduce_bytes(payload_bytes(buffer), num_ranks))
    rows = torch.empty(num_ranks * row.numel(), dtype=torch.uint8, device=buffer.device)

    def combine(_: Future[list[torch.Tensor]]) -> torch.Tensor:
        keep_for_current_stream(row, rows, left_out, residual, buffer)
        total = torch.zeros(layout.num_chunks, layout.chunk, dtype=work_dtype, device=buffer.device)
        for rank_row in rows.view(num_ranks, -1).unbind():
            rank_values, rank_places = _unpack(rank_row, layout, buffer.dtype)
            # Places of one rank are distinct, so the order of additions is the order of ranks.
            total.scatter_add_(1, rank_places, rank_values.to(work_dtype))
        buffer.copy_(total.div_(num_ranks).view(-1)[: layout.num_elements])
        commit_if_finite(buffer, [(residual, left_out)])
        return buffer

    return all_gather_flat(rows, row, state.process_group).then(combine)


def _pack(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """One flat row of bytes: the values, their places, and zeros up to the alignment."""
    parts = [values.view(-1).view(torch.uint8), places.to(torch.int16).view(-1).view(torch.uint8)]
    padding = -sum(part.numel() for part in parts) % _ROW_ALIGNMENT
    if padding:
        parts.append(torch.zeros(padding, dtype=torch.uint8, device=values.device))
    return torch.cat(parts)


def _unpack(row: torch.Tensor, layout: ChunkLayout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and int64 places, one line per chunk."""
    values_end = layout.num_sent * dtype.itemsize
    places_end = values_end + layout.num_sent * _PLACE_BYTES
    values = row[:values_end].view(dtype)
    places = row[values_end:places_end].view(torch.int16).to(torch.int64)
    return values.view(layout.num_chunks, -1), places.view(layout.num_chunks, -1)


# All its collectives start in the same order on every rank, so buckets may be under way together.
topk_hook.keeps_order = True  # type: ignore[attr-defined]
