"""What every compression hook shares: the group, the byte counters, and the cases that are not compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from lockstep.hooks.wire import WireCount, all_reduce_bytes

# Backends whose collectives are put on a device stream: their futures count as done once the work is
# enqueued, so a follow-up collective started from ``then`` is started at once, in the thread and in the order
# of the hook calls.
_STREAM_BACKENDS = frozenset({"nccl", "xccl"})


class Bucket(Protocol):
    """The part of torch's ``GradBucket`` that the hooks use."""

    def index(self) -> int: ...
    def buffer(self) -> torch.Tensor: ...
    def parameters(self) -> list[torch.Tensor]: ...


class CompressionState:
    """Base of the hook states: ``process_group=None`` means the default group, looked up at each use."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.wire = WireCount()

    @property
    def bytes_on_wire(self) -> int:
        """Bytes this rank has sent through the hook (see ``wire.py`` for the formulas)."""
        return self.wire.bytes_on_wire

    @property
    def bytes_uncompressed(self) -> int:
        """Bytes this rank would have sent with a plain all-reduce in the gradients' own dtype."""
        return self.wire.bytes_uncompressed

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    def state_dict(self) -> dict[str, Any]:
        return {"bytes_on_wire": self.wire.bytes_on_wire, "bytes_uncompressed": self.wire.bytes_uncompressed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wire = WireCount(int(state["bytes_on_wire"]), int(state["bytes_uncompressed"]))


def bucket_needs_no_compression(state: CompressionState, buffer: torch.Tensor) -> bool:
    """Whether a bucket takes the exact path: nothing to send, nobody to send to, or not a dense real
    tensor.
    """
    if buffer.layout == torch.strided and not (buffer.is_floating_point() or buffer.is_complex()):
        raise TypeError(
            f"a compression hook got a bucket of dtype {buffer.dtype}; gradients are floating point or "
            "complex. Leave parameters of this dtype out of data parallel (requires_grad=False)."
        )
    return (
        state.num_ranks == 1 or buffer.numel() == 0 or buffer.layout != torch.strided or not buffer.is_floating_point()
    )


def average_exactly(state: CompressionState, buffer: torch.Tensor) -> Future[torch.Tensor]:
    """The uncompressed way, for complex and sparse buckets, empty buckets and a world of one."""
    if state.num_ranks == 1 or buffer.numel() == 0:
        return finished_future(buffer)
    # A sparse all-reduce sends its stored values and their int64 coordinates to every rank.
    num_bytes = payload_bytes(buffer)
    sent = all_reduce_bytes(num_bytes, state.num_ranks)
    state.wire.add(sent, sent)
    num_ranks = state.num_ranks
    # Dividing first keeps half-precision sums inside their range.
    buffer.div_(num_ranks)
    work = dist.all_reduce(buffer, group=state.process_group, async_op=True)
    return work.get_future().then(lambda _: buffer)


def payload_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    coalesced = tensor.coalesce()
    values, indices = coalesced.values(), coalesced.indices()
    return values.numel() * values.element_size() + indices.numel() * indices.element_size()


def finished_future(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future = new_future(tensor)
    future.set_result(tensor)
    return future


def new_future(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """A future that may hold a tensor of this device: on CUDA it then also carries the stream to wait for."""
    if tensor.is_cuda:
        return Future(devices=[tensor.device])
    return Future()


def all_gather_flat(
    output: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup | None
) -> Future[list[torch.Tensor]]:
    """All-gather of equal flat pieces; torch 2.13 renamed the call, 2.11 has only the old name."""
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    future: Future[list[torch.Tensor]] = gather(output, piece, group=group, async_op=True).get_future()
    return future


def completes_on_stream(state: CompressionState, tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and _backend_name(state.process_group, tensor.device.type) in _STREAM_BACKENDS


def _backend_name(group: dist.ProcessGroup | None, device_type: str) -> str:
    """The backend that serves a device: ``get_backend_config`` reads like ``"cpu:gloo,cuda:nccl"``."""
    config = str(dist.get_backend_config(group))
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return by_device.get(device_type, config)


def keep_for_current_stream(*tensors: torch.Tensor) -> None:
    """Tell the CUDA allocator that this stream uses these too; ``then`` runs its callback on a stream of
    its own.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
