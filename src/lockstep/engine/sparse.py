"""Sparse gradients: they have no fixed size, so each travels alone, by one of three ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import Slot
from lockstep.engine.flight import Flight, Moment, WorkFlight, blocks_host


def pack_sparse(slot: Slot, gradient: Tensor | None) -> Tensor:
    """A copy that may be reduced in place; an empty one for no gradient."""
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.long, device=slot.parameter.device)
        return torch.sparse_coo_tensor(indices, slot.parameter.new_empty((0, *slot.shape[1:])), slot.shape)
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    return gradient.detach().coalesce().clone()


def start_sparse(
    gradient: Tensor,
    process_group: dist.ProcessGroup,
    backend: str,
    *,
    divisor: float,
    known_rows: Tensor | None,
) -> Flight:
    """Start the mean over the group: of known rows, by the backend's own sparse sum, or by gathering."""
    if known_rows is not None:
        return _start_known_rows(gradient, process_group, backend, divisor, known_rows.to(gradient.device))
    if backend == "gloo":
        gradient.div_(divisor)
        return WorkFlight(dist.all_reduce(gradient, group=process_group, async_op=True), blocks_host=True)
    return _Landed(gather_sparse_sum(gradient, process_group, divisor))


def _start_known_rows(
    gradient: Tensor, process_group: dist.ProcessGroup, backend: str, divisor: float, rows: Tensor
) -> Flight:
    """All ranks said beforehand which rows any of them touches: a dense all-reduce of just those rows."""
    dense = gradient.to_dense().index_select(0, rows) / divisor
    work = torch_private.all_reduce(process_group, dense, dist.ReduceOp.SUM)

    def as_sparse() -> Tensor:
        return torch.sparse_coo_tensor(rows.unsqueeze(0), dense, gradient.shape).coalesce()

    return WorkFlight(work, blocks_host(backend), after=as_sparse)


class _Landed:
    """A reduction that was done when it was started."""

    landed_ns: int | None = None

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        return self._result


def gather_sparse_sum(gradient: Tensor, process_group: dist.ProcessGroup, divisor: float) -> Tensor:
    """The mean of sparse gradients on a backend without sparse collectives: gather indices and values, then add.

    Sizes are exchanged first, parts are padded to the largest; ranks add in rank order, so results are bitwise equal.
    """
    gradient = gradient.coalesce()
    world = dist.get_world_size(process_group)
    count = torch.tensor([gradient._nnz()], device=gradient.device)
    counts = [torch.empty_like(count) for _ in range(world)]
    dist.all_gather(counts, count, group=process_group)
    num_entries = [int(c.item()) for c in counts]
    longest = max(1, *num_entries)

    def gather_padded(part: Tensor) -> list[Tensor]:
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=process_group)
        return [p[:n] for p, n in zip(parts, num_entries, strict=True)]

    indices = gather_padded(gradient.indices().t().contiguous())
    values = gather_padded(gradient.values())
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values) / divisor, gradient.shape)
    return total.coalesce()
