"""Sparse gradients: they have no fixed size, so each travels alone, by one of three ways."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.bucket import Slot
from lockstep.engine.flight import Flight, Landed
from lockstep.engine.transport import Transport


def pack_sparse(slot: Slot, gradient: Tensor | None) -> Tensor:
    """A copy that may be reduced in place; an empty one for no gradient."""
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.long, device=slot.parameter.device)
        return torch.sparse_coo_tensor(indices, slot.parameter.new_empty((0, *slot.shape[1:])), slot.shape)
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    return gradient.detach().coalesce().clone()


def start_sparse(
    gradient: Tensor, transport: Transport, *, factor: float, known_rows: Tensor | None, name: str
) -> Flight:
    """Start the mean over the group: of known rows, by the backend's own sparse sum, or by gathering."""
    if known_rows is not None:
        return _start_known_rows(gradient, transport, factor, known_rows.to(gradient.device), name)
    if transport.backend(gradient.device) == "gloo":
        return transport.start_sparse_all_reduce(gradient.mul_(factor), name)
    return Landed(gather_sparse_sum(gradient, transport, factor))


def _start_known_rows(gradient: Tensor, transport: Transport, factor: float, rows: Tensor, name: str) -> Flight:
    """All ranks said beforehand which rows any of them touches: a dense all-reduce of just those rows."""
    dense = gradient.to_dense().index_select(0, rows) * factor
    flight = transport.start_all_reduce(dense, mean=False, name=name)
    return flight.then(lambda: torch.sparse_coo_tensor(rows.unsqueeze(0), dense, gradient.shape).coalesce())


def gather_sparse_sum(gradient: Tensor, transport: Transport, factor: float) -> Tensor:
    """The mean of sparse gradients on a backend without sparse collectives: gather indices and values, then add.

    Sizes are exchanged first, parts are padded to the largest; ranks add in rank order, so results are bitwise equal.
    """
    gradient = gradient.coalesce()

    def gather(part: Tensor) -> list[Tensor]:
        return transport.all_gather(part, lambda: "the exchange of a sparse gradient")

    counts = gather(torch.tensor([gradient._nnz()], device=gradient.device))
    num_entries = [int(count.item()) for count in counts]
    longest = max(1, *num_entries)

    def gather_padded(part: Tensor) -> list[Tensor]:
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: part.shape[0]] = part
        return [whole[:num] for whole, num in zip(gather(padded), num_entries, strict=True)]

    indices = gather_padded(gradient.indices().t().contiguous())
    values = gather_padded(gradient.values())
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values) * factor, gradient.shape)
    return total.coalesce()
