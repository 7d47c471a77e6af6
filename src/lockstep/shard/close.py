"""``torch.allclose`` of DTensors: code that compares parameters or gradients need not know that they are sharded.

torch has a rule for ``torch.equal`` only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lockstep import torch_private

_allclose = torch.ops.aten.allclose.default


def install() -> None:
    """Let DTensors be compared from now on."""
    torch_private.dtensor_handlers().setdefault(_allclose, _run)


@torch.no_grad()
def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second, *tolerances = args
    if not isinstance(first, DTensor) or not isinstance(second, DTensor) or first.device_mesh != second.device_mesh:
        raise RuntimeError(
            f"torch.allclose was given {_shown(first)} and {_shown(second)}. Compare two DTensors on one mesh, or take "
            "full_tensor() of them."
        )
    mesh, placements = first.device_mesh, list(first.placements)
    if mesh.get_coordinate() is None:
        return True  # this rank has no part of them
    for axis, placement in enumerate(placements):
        if placement.is_partial() or first.shape != second.shape:  # a sum to be made, or parts that do not match
            placements[axis] = Replicate()
    mine = [torch_private.local_of(tensor.redistribute(mesh, placements)) for tensor in (first, second)]
    said = torch.tensor(int(operator(*mine, *tolerances, **kwargs)), device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(said, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return bool(said)


def _shown(value: Any) -> str:
    return f"a DTensor on {value.device_mesh}" if isinstance(value, DTensor) else f"a {type(value).__name__}"
