"""A training script, as users write it: for ``lockstep precompile``, and called by the ranks of tests."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

ONE_EACH = 1e-5  # so that every parameter has a bucket of its own
NUM_CALLS = 8


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss_of(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make(
    mode: str, path: str = "", width: int = 16, cap: float | None = ONE_EACH, sharded: bool = False, **options: Any
) -> Any:
    torch.manual_seed(3)
    module = Mlp(width)
    model = lockstep.fully_shard(module) if sharded else lockstep.DDP(module, bucket_cap_mb=cap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7)
    options = {"accumulate": 2, "clip_norm": 0.05, "mode": mode, **options}
    if path:
        return lockstep.load_step(path, model, optimizer, loss_of, **options)
    return lockstep.TrainStep(model, optimizer, loss_of, **options)


def train(step: Any, num_calls: int = NUM_CALLS) -> list[Tensor]:
    """The losses, and the parameters at the end."""
    losses = []
    for index in range(num_calls):
        generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
        batch = {"x": torch.randn(5, 6, generator=generator), "y": torch.randn(5, 4, generator=generator)}
        losses.append(step(batch))
    parameters = [p.detach() for p in step._options.model.parameters()]
    return [*losses, *((p.to_local() if hasattr(p, "to_local") else p).clone() for p in parameters)]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(make(os.environ.get("TEST_MODE", "graph"), sharded="TEST_SHARDED" in os.environ), 1000)
    raise AssertionError("precompile leaves the script before it ends")
