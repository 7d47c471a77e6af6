"""DTensors from inside: their local part and their specification, which optimizers and checkpoints go by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

# The local part itself; the public to_local() makes another tensor, and a node of autograd's graph.
local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
# Mesh, placements, and the shape of the whole; there is no public way to make a second DTensor just like one.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def dtensor_around(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor around ``local``; the public ``from_local`` is ten times as slow, for every gradient of every step.

    It is complete when it is made: initialising it does nothing but tell compilers, and takes twice as long.
    """
    kind, make = _dtensor_maker()
    return make(kind, local, spec, requires_grad=False)  # type: ignore[no-any-return]


@cache
def _dtensor_maker() -> tuple[Any, Callable[..., Any]]:
    """The class, and what makes an object of it: looking both up for every gradient would take longer than that."""
    kind = _dtensor_class()
    return kind, kind.__new__


@cache
def _dtensor_class() -> Any:
    """Asked for once: an import statement takes as long as making one does."""
    from torch.distributed.tensor import DTensor

    return DTensor


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """By operator, who computes it in the place of a DTensor's own rules; there is no public way to give them one."""
    return _dtensor_class()._op_dispatcher._custom_op_handlers  # type: ignore[no-any-return]


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Let a DTensor be around another tensor of the same shape; everyone who holds it sees that.

    It tells compilers the place of its local part in memory as its own, so that is changed with it.
    """
    with torch.no_grad():
        is_alike = dtensor.dtype == local.dtype and dtensor.device == local.device
        if not is_alike or dtensor.storage_offset() != local.storage_offset():
            dtensor.data = dtensor_around(local, dtensor._spec)
    dtensor._local_tensor = local


def joined_mesh(meshes: Sequence[Any]) -> Any:
    """The mesh of several that were sliced out of one; torch's own sharding is the only user."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a tensor that was cut along ``dim`` once more after it had been cut along it."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def mark_as_sharded(module: Any, state: Any) -> None:
    """Let torch's other functions of this kind (``replicate``, pipelines) know that the module is looked after.

    ``state`` is what torch's own ``fully_shard.state(module)`` then gives; it has no public way in.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    module.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard()] = state


@cache
def torch_fully_shard() -> Any:
    """The function by which torch keeps the state of a sharded module; asked for while torch's own is there."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return inspect.unwrap(_fully_shard.fully_shard)


def group_memory(process_group: Any, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer from the allocator of the group's backend, where it has one; there is no public way to ask it."""
    backend = process_group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(num_elements, dtype=dtype, device=device)  # type: ignore[no-any-return]
    return torch.empty(num_elements, dtype=dtype, device=device)
