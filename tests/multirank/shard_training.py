"""How sharded models are trained in tests, and compared with one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import fully_shard
from multirank.compare import assert_close
from multirank.models import CASES, Case, reference_backward, shard

NUM_STEPS = 3

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def whole(tensor: Tensor) -> Tensor:
    """A DTensor put together; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()}


def whole_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: whole(p) for n, p in module.named_parameters()}


def shard_by_blocks(module: nn.Module, **options: Any) -> nn.Module:
    """Units as people make them: one for every block, and the rest."""
    for name in ("blocks", "layers"):
        for block in getattr(module, name, ()):
            if any(True for _ in block.parameters()):
                fully_shard(block, **options)
    return fully_shard(module, **options)


def train_and_compare(
    case: Case | str,
    dtype: torch.dtype = torch.float64,
    *,
    optimizer: str = "sgd_momentum",
    prepare: Callable[[nn.Module], Any] = shard_by_blocks,
    change: Callable[[nn.Module], Any] | None = None,
    num_steps: int = NUM_STEPS,
) -> nn.Module:
    """Train sharded and in one process, side by side; gradients of every step and the parameters must agree.

    ``prepare`` shards the module in place, and may return what is to be called (a compiled one).
    """
    case = CASES[case] if isinstance(case, str) else case
    rank, world = dist.get_rank(), dist.get_world_size()
    module, reference = case.module(dtype), case.module(dtype)
    if change is not None:
        change(module)
        change(reference)
    prepared = prepare(module)
    called = module if prepared is None else prepared
    mine = OPTIMIZERS[optimizer](module.parameters())
    theirs = OPTIMIZERS[optimizer](reference.parameters())
    tolerance = case.float64_tolerance if dtype == torch.float64 else None
    for step in range(num_steps):
        mine.zero_grad(set_to_none=step != 1)
        theirs.zero_grad(set_to_none=step != 1)
        case.loss(called, shard(case.batch(step, dtype), rank, world)).backward()
        reference_backward(case, reference, case.batch(step, dtype), world)
        what = f"{case.name}, step {step}"
        if step != 2 or case.name != "branches":  # zeroed gradients stay, where in one process they are none
            assert_close(whole_gradients(module), gradients(reference), what, tolerance)
        mine.step()
        theirs.step()
    tolerance = max(tolerance or 0.0, 1e-7) if dtype == torch.float64 else None
    assert_close(whole_parameters(module), parameters(reference), f"{case.name}, parameters", tolerance)
    return module


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in module.named_parameters()}


def parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.detach() for n, p in module.named_parameters()}
