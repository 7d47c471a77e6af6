"""Many tensors in one call, and tensors on the memory of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# One kernel for many copies, products, sums or averages; torch has no public names for them.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
foreach_mul: Callable[[list[torch.Tensor], float], Any] = torch._foreach_mul_
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_add_
foreach_lerp: Callable[[list[torch.Tensor], list[torch.Tensor], float], Any] = torch._foreach_lerp_
foreach_zero: Callable[[list[torch.Tensor]], Any] = torch._foreach_zero_

# Another tensor on the memory of one (with sizes, strides, and an offset to its own), which autograd does not know as a
# view of it; so methods such as detach_() work on it. As cheap as it gets, since it is made for every gradient in every
# step; so cheap that nothing is checked, not even that the memory is large enough.
alias: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]

# All tensors as one flat copy, and a flat tensor as views in given shapes: one call each instead of one per tensor.
flatten_dense: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
unflatten_dense: Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]] = torch._C._nn.unflatten_dense_tensors


# Tensors cut into equal chunks along a dimension, those of each rank one behind the other; one kernel that also casts.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


def dtensor_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around ``local`` with the placement of ``parameter``; its module was private, and may be again."""
    from torch.distributed.tensor import DTensor

    # With shape and stride of the whole: where shards are uneven they do not follow from one of them.
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **whole)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in; that of one without values is told by nothing public."""
    return int(tensor.untyped_storage()._cdata)


class _Shard(NamedTuple):
    """What a rank holds of a DTensor; ``is_first`` on one of the ranks that hold the same."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    is_first: bool


def shard_of(tensor: torch.Tensor) -> _Shard | None:
    """What this rank holds of a DTensor, None for any other tensor; where a shard lies has no public name."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return None
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise TypeError(f"a DTensor with {len(chunks)} pieces on one rank")
    mesh = tensor.device_mesh
    is_first = all(
        mesh.get_local_rank(axis) == 0 for axis, kind in enumerate(tensor.placements) if isinstance(kind, Replicate)
    )
    return _Shard(tensor.to_local(), tuple(chunks[0].offsets), is_first)
