"""A job that finds everything in the compiler's cache: the same gradients, the same launches, nothing compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

PRELOAD = ("torch._inductor.compile_fx",)
LIMIT_S = 500.0  # several cold starts of a compiler, on a machine that may be busy


class Detaching(nn.Module):
    """Its second parameter goes into the graph, but no gradient for it comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.offset, self.last = nn.Linear(6, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.offset.detach())


def train() -> dict[str, Any]:
    import lockstep

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    module, reference = Detaching(), Detaching()
    reference.load_state_dict(module.state_dict())
    ddp = lockstep.DDP(module, find_unused_parameters=True)
    model = torch.compile(ddp)
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for _ in range(3):
        module.zero_grad()
        reference.zero_grad()
        model(batches[rank]).pow(2).mean().backward()
        torch.stack([reference(batch).pow(2).mean() for batch in batches]).mean().backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            right = torch.zeros_like(q) if q.grad is None else q.grad
            found = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    counts = torch._dynamo.utils.counters
    graphs = ddp.explain_compilation().graphs
    launches = [(launch.names, launch.delivers) for graph in graphs for launch in graph.launches]
    return {
        "misses": counts["inductor"]["fxgraph_cache_miss"],
        "hits": counts["inductor"]["fxgraph_cache_hit"],
        "launches": launches,
    }


def test_a_second_start_compiles_nothing_and_launches_the_same(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first = run_ranks(2, train, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    second = run_ranks(2, train, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert sum(rank["misses"] for rank in first) == 2
    assert [rank["misses"] for rank in second] == [0, 0]
    assert [rank["hits"] for rank in second] == [2, 2]
    assert all(rank["launches"] == first[0]["launches"] for rank in [*first, *second])
