"""Clipping where not all gradients lie alike: shards on several meshes, and tensors that are not sharded at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_together(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    """Clip all gradients by their norm taken together, which is returned: the same number on every rank.

    torch's own function takes gradients of one mesh, and none that are not sharded.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_whole(nn.utils.get_total_norm([p.grad for p in own], norm_type)) for own in by_mesh.values()]  # type: ignore[misc]
    if not norms:
        return torch.tensor(0.0)
    total = (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), norm_type)
    )
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, total)
    return total


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
