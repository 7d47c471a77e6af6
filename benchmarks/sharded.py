"""Sharded models side by side: torch's fully_shard and ours, eager and compiled, and no sharding at all.

    python benchmarks/sharded.py                  # one GPU: a world of one on nccl, GPT of 191 M parameters
    python benchmarks/sharded.py --ranks 2        # ranks on gloo, which share the GPU
    python benchmarks/sharded.py --cpu --quick    # a tiny model and no GPU: shows that it runs

First every subject's gradients are compared with the model that is not sharded, one by one; then each subject's steps
are timed by themselves, since all of them together would not fit.  One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs

import lockstep
from models import GPT

Subject = Callable[[nn.Module, MixedPrecisionPolicy], Any]


def by_blocks(shard: Callable[..., Any], module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    for block in module.blocks:
        shard(block, mp_policy=policy)
    shard(module, mp_policy=policy)


def alone(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    return module


def alone_compiled(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    return torch.compile(module)


def torch_eager(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    by_blocks(torchs, module, policy)
    return module


def torch_blocks(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    for block in module.blocks:
        block.compile()
    by_blocks(torchs, module, policy)
    return module


def ours_eager(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    by_blocks(lockstep.fully_shard, module, policy)
    return module


def ours_compiled(module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
    by_blocks(lockstep.fully_shard, module, policy)
    return torch.compile(module, fullgraph=True)


SUBJECTS: dict[str, Subject] = {
    "no sharding, eager": alone,
    "no sharding, compiled": alone_compiled,
    "FSDP2, eager": torch_eager,
    "FSDP2, compiled blocks": torch_blocks,
    "lockstep, eager": ours_eager,
    "lockstep, compiled": ours_compiled,
}


class Trainer:
    def __init__(self, name: str, options: argparse.Namespace, policy: MixedPrecisionPolicy) -> None:
        self.device = "cpu" if options.cpu else "cuda"
        size = (256, 32, 32, 2, 2) if options.cpu else (50304, 1024, 1024, 12, 16)
        torch.manual_seed(0)
        self.module = GPT(*size).to(self.device)
        self.model = SUBJECTS[name](self.module, policy)
        self.is_alone = name.startswith("no sharding")
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        batch = 2 if options.cpu or options.ranks > 1 else 8
        self.batch = torch.randint(size[0], (batch, size[1] + 1), generator=generator).to(self.device)

    def backward(self, *, autocast: bool) -> None:
        # Without sharding, autocast stands for the policy's smaller dtype.
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast and self.is_alone):
            loss = self.model(self.batch)
        loss.backward()

    def step(self) -> None:
        self.backward(autocast=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.module.named_parameters():
            gradient: Any = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return found


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The largest error of any gradient, relative to the largest element of its tensor, in float32."""
    results = []
    reference = Trainer("no sharding, eager", options, MixedPrecisionPolicy())
    reference.backward(autocast=False)
    expected = reference.gradients()
    for name in SUBJECTS:
        torch.compiler.reset()
        trainer = Trainer(name, options, MixedPrecisionPolicy())
        for _ in range(2):  # the second step shows what the first one left behind
            trainer.module.zero_grad()
            trainer.backward(autocast=False)
        found = trainer.gradients()
        worst = max((found[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-12) for n, g in expected.items())
        results.append({"what": "gradients", "subject": name, "worst_relative_error": worst})
        del trainer, found
    return results


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results = []
    for name in SUBJECTS:  # one after the other in memory, each by itself
        torch.compiler.reset()
        trainer = Trainer(name, options, policy)
        start = time.perf_counter()
        trainer.step()
        _synchronize(options)
        cold = time.perf_counter() - start
        for _ in range(3):
            trainer.step()
        if not options.cpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(options.rounds):
            _synchronize(options)
            start = time.perf_counter()
            trainer.step()
            _synchronize(options)
            times.append(time.perf_counter() - start)
        peak = 0 if options.cpu else torch.cuda.max_memory_allocated()
        entry = {"what": "step", "subject": name, "ms": 1e3 * median(times), "fastest_ms": 1e3 * min(times)}
        results.append({**entry, "peak_gib": peak / 2**30, "first_step_s": cold})
        del trainer
    return results


def _synchronize(options: argparse.Namespace) -> None:
    if not options.cpu:
        torch.cuda.synchronize()


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    backend = "nccl" if not options.cpu and options.ranks == 1 else "gloo"
    if not options.cpu:
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("highest")
    dist.init_process_group(backend, store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks)
    results = compare(options)
    if not options.cpu:
        torch.set_float32_matmul_precision("high")
    results += measure(options)
    if rank == 0:
        for result in results:
            print(json.dumps({**result, "ranks": options.ranks, "torch": str(torch.__version__)}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.rounds = 3 if options.quick else 20
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
