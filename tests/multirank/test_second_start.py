"""A job that finds everything in the compiler's cache: the same gradients, the same launches, nothing compiled."""

from __future__ import annotations

import copy
import os
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


class Model(nn.Module):
    """Where it detaches, its second parameter goes into the graph, but no gradient for it comes out."""

    def __init__(self, detaches: bool = False) -> None:
        super().__init__()
        self.first, self.offset, self.last = nn.Linear(6, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 3)
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + (self.offset.detach() if self.detaches else self.offset))


def wrap(kind: str, module: nn.Module) -> nn.Module:
    import lockstep

    if kind in ("freed", "kept"):
        return lockstep.fully_shard(module, reshard_after_forward=kind == "freed")
    if kind == "frozen":
        module.get_parameter("first.weight").requires_grad_(False)
    return lockstep.DDP(
        module, find_unused_parameters=kind == "detaches", bucket_cap_mb=1e-4 if kind == "small buckets" else 25
    )


def train(kind: str) -> dict[str, Any]:
    """Three steps, compared with a single process; what was found in the cache, and what the graphs launch."""
    import lockstep

    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    counts.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    modules = [Model(kind == "detaches") for _ in range(2 if kind == "two of a kind" else 1)]
    references = copy.deepcopy(modules)
    wrapped = [wrap(kind, module) for module in modules]
    models = list(map(torch.compile, wrapped))
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for _ in range(3):
        for model, module, reference in zip(models, modules, references, strict=True):
            module.zero_grad()
            reference.zero_grad()
            model(batches[rank]).pow(2).mean().backward()
            torch.stack([reference(batch).pow(2).mean() for batch in batches]).mean().backward()
            for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
                right = torch.zeros_like(q) if q.grad is None or not p.requires_grad else q.grad
                found = torch.zeros_like(p) if p.grad is None else p.grad
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{kind} {n}: {m}")
    explanation: Any = lockstep.explain(wrapped[-1])
    if kind in ("freed", "kept"):
        launches: list[Any] = [(unit.name, unit.backward_gathers_in_graph) for unit in explanation.units]
    else:
        launches = [(launch.names, launch.delivers) for graph in explanation.graphs for launch in graph.launches]
    return {
        "misses": counts["inductor"]["fxgraph_cache_miss"] + counts["inductor"]["fxgraph_cache_bypass"],
        "hits": counts["inductor"]["fxgraph_cache_hit"],
        "joint hits": counts["aot_autograd"]["autograd_cache_hit"],
        "launches": launches,
        "left": getattr(explanation, "left_to_hooks", {}),
    }


def train_each(kinds: list[str], directories: list[str]) -> dict[str, dict[str, Any]]:
    """All of these in one process, one after the other; each rank has a cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directories[dist.get_rank()]
    return {kind: train(kind) for kind in kinds}


def test_a_second_start_compiles_nothing_and_launches_the_same(tmp_path: Path) -> None:
    kinds, filled, empty = ["plain", "detaches", "kept"], str(tmp_path / "filled"), str(tmp_path / "empty")
    first = run_ranks(2, train_each, kinds, [filled, filled], preload=PRELOAD, limit_s=LIMIT_S)
    second = run_ranks(2, train_each, kinds, [filled, filled], preload=PRELOAD, limit_s=LIMIT_S)
    for kind in kinds:
        if kind != "kept":  # ranks with shards do not take turns
            assert sum(rank[kind]["misses"] for rank in first) == 2, kind
        for rank in second:
            assert [rank[kind][what] for what in ("misses", "hits", "joint hits")] == [0, 2, 1], kind
        assert all(rank[kind]["launches"] == first[0][kind]["launches"] for rank in [*first, *second])
        assert all(rank[kind]["left"] == first[0][kind]["left"] for rank in [*first, *second])
    assert first[0]["detaches"]["left"]["offset"] == "the graph computes no gradient for it"

    # One rank finds what was kept, and the other compiles; what was kept is for other launches than most of these.
    kinds = ["small buckets", "frozen", "two of a kind", "freed", "kept"]
    third = run_ranks(2, train_each, kinds, [filled, empty], preload=PRELOAD, limit_s=LIMIT_S)
    for kind in kinds:
        assert third[0][kind]["launches"] == third[1][kind]["launches"], kind
        found = {"kept": [1, 0], "two of a kind": [2, 1]}.get(kind, [0, 0])
        assert [rank[kind]["joint hits"] for rank in third] == found, kind
    assert [third[0][kind]["launches"] for kind in ("freed", "kept")] == [[("Model", 1)], [("Model", 0)]]
    assert len(third[0]["small buckets"]["launches"]) > 1
    assert all("first.weight" not in names for names, _ in third[0]["frozen"]["launches"])
    assert all(is_delivered for kind in kinds[:3] for _, is_delivered in third[0][kind]["launches"])
