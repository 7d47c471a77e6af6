"""Who writes what: the piece of each tensor that a rank holds, and the share of it that a rank writes.

A sharded tensor is written where its shards are.  A replicated one is there on every rank: each rank writes a share of
them, so that copying them off the device, which training waits for, takes the less time the more ranks there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lockstep import torch_private
from lockstep.checkpoint.tensorfile import dtype_name


@dataclass(frozen=True)
class Held:
    """The part of a whole tensor that this rank holds."""

    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_sharded: bool
    is_writer: bool  # of several ranks that hold the same shard, one writes it

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.local.element_size()

    def to_json(self) -> list[Any]:
        return [dtype_name(self.local.dtype), list(self.shape), list(self.offsets), list(self.local.shape)]


def held(tensor: torch.Tensor, place: str) -> Held:
    """Find out which part of a tensor this rank holds; ``place`` names it in errors."""
    if is_lazy(tensor):
        raise TypeError(f"{place} is not initialised yet: it gets its shape in the model's first forward")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{place} is a tensor of layout {layout}; only dense tensors can be stored")
    if tensor.is_meta:
        raise TypeError(f"{place} is on the meta device: it has no values yet")
    tensor = tensor.detach()
    sharded = torch_private.shard_of(tensor)
    local = tensor if sharded is None else sharded.local
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # It may have no memory of its own: what it holds (a quantised weight, say) is known to its class only.
        raise TypeError(
            f"{place} is a {type(local).__module__}.{type(local).__qualname__}, a kind of tensor that cannot be "
            "stored; save the plain tensors that it is made of, as extra= or by the module's state_dict()"
        )
    try:
        dtype_name(local.dtype)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from None
    if sharded is None:
        return Held(tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_sharded=False, is_writer=True)
    return Held(sharded.local, tuple(tensor.shape), sharded.offsets, is_sharded=True, is_writer=sharded.is_first)


def shares(replicated: Mapping[str, Held], world: int) -> dict[str, int]:
    """Give each replicated tensor to a rank that writes it: large ones first, each to the rank with least so far."""
    loads = [(0, rank) for rank in range(world)]
    writer = {}
    for name in sorted(replicated, key=lambda name: (-replicated[name].num_bytes, name)):
        load, rank = heapq.heappop(loads)
        writer[name] = rank
        heapq.heappush(loads, (load + replicated[name].num_bytes, rank))
    return writer


def checksums(tensors: Mapping[str, Held]) -> dict[str, int]:
    """Take a checksum of each tensor on its device, to see whether ranks hold the same."""
    sums = {}
    for name, entry in tensors.items():
        local = entry.local
        if local.numel() == 0:
            continue
        if local.is_complex():
            local = torch.view_as_real(local.resolve_conj())
        try:
            sums[name] = torch.hash_tensor(local)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # a dtype that torch has no checksum for
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    result: dict[str, int] = {}
    for names in by_device.values():  # one copy to the host per device
        stacked = torch.stack([sums[name].view(torch.int64) for name in names])
        result |= dict(zip(names, stacked.tolist(), strict=True))
    return result
