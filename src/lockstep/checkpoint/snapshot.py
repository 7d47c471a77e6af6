"""The snapshot: what this rank will write, copied to the host, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.checkpoint.collect import Collected
from lockstep.checkpoint.pieces import Held, checksums, shares


@dataclass
class Snapshot:
    """What one rank writes."""

    step: int
    shared: dict[str, Any]  # written by rank 0
    own: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    index: dict[str, list[Any]]  # name -> dtype, shape of the whole, offsets and sizes of this piece
    checks: dict[str, int] = field(default_factory=dict)  # of what must be equal on all ranks

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def own_name(rank: int, name: str) -> str:
    """Name a tensor that belongs to one rank."""
    return f"rank-{rank:05d}/{name}"


def take_snapshot(collected: Collected, step: int, rank: int, world: int, *, copies: bool, compares: bool) -> Snapshot:
    """Choose this rank's share and copy it; without ``copies`` the tensors themselves are kept."""
    writer = shares(collected.replicated, world)
    chosen: dict[str, Held] = {name: entry for name, entry in collected.replicated.items() if writer[name] == rank}
    if rank == 0:
        chosen |= collected.of_rank_zero
    chosen |= {name: entry for name, entry in collected.sharded.items() if _writes(entry, rank)}
    chosen |= {own_name(rank, name): entry for name, entry in collected.of_rank.items()}
    return Snapshot(
        step,
        collected.shared if rank == 0 else {},
        collected.own,
        _copied(chosen) if copies else {name: entry.local for name, entry in chosen.items()},
        {name: entry.to_json() for name, entry in chosen.items()},
        checksums(collected.replicated) if compares and world > 1 else {},
    )


def _writes(entry: Held, rank: int) -> bool:
    """Tell whether a rank has something to write of a sharded tensor; one that is empty everywhere is rank 0's."""
    is_empty = not all(entry.shape)
    return rank == 0 if is_empty else entry.is_writer and entry.local.numel() > 0


def _copied(chosen: Mapping[str, Held]) -> dict[str, torch.Tensor]:
    """Copy to the host, all copies from a GPU started before the first is waited for."""
    copies, devices = {}, set()
    for name, entry in chosen.items():
        local = entry.local
        if local.is_cuda:
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=True)
            copies[name] = host.copy_(local, non_blocking=True)
            devices.add(local.device)
        else:
            copies[name] = local.clone(memory_format=torch.contiguous_format)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
