"""Parameters and buffers made equal on all ranks: once when a model is wrapped, buffers before each forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import local_tensor


def broadcast_tensors(
    tensors: Iterable[Tensor], process_group: dist.ProcessGroup, source: int, chunk_bytes: int, watch: Watch
) -> None:
    """Copy ``tensors`` from group rank ``source`` to all ranks, packed by dtype and device into few messages."""
    chunks: list[tuple[list[Tensor], Tensor, Any]] = []
    with torch.no_grad():
        for members in _chunks([local_tensor(t.detach()) for t in tensors], chunk_bytes):
            flat = torch_private.flatten_dense(members)
            flat = flat.clone() if len(members) == 1 else flat
            wire = torch.view_as_real(flat) if flat.is_complex() else flat
            work = dist.broadcast(wire, group=process_group, group_src=source, async_op=True)
            chunks.append((members, flat, work))
        for members, flat, work in chunks:
            if flat.device.type == "cpu":
                watch.wait_work(work, lambda: f"the broadcast of the model's state from rank {source}")
            else:
                work.wait()
            if process_group.rank() != source:
                torch_private.foreach_copy(members, torch_private.unflatten_dense(flat, members))


def _chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        num_bytes = tensor.numel() * tensor.element_size()
        if kind not in kinds or sizes[kind] + num_bytes > chunk_bytes:
            kinds.setdefault(kind, []).append([])
            sizes[kind] = 0
        kinds[kind][-1].append(tensor)
        sizes[kind] += num_bytes
    return [chunk for chunks in kinds.values() for chunk in chunks]


def sync_module_states(
    module: nn.Module,
    process_group: dist.ProcessGroup,
    *,
    source: int,
    ignored: set[str],
    with_buffers: bool,
    chunk_bytes: int,
    watch: Watch,
) -> None:
    """Give every rank the parameters (and buffers) of group rank ``source``."""
    tensors: list[Tensor] = [p for name, p in module.named_parameters() if name not in ignored]
    if with_buffers:
        tensors += [b for name, b in module.named_buffers() if name not in ignored]
    broadcast_tensors(tensors, process_group, source, chunk_bytes, watch)
