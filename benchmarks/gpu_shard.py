"""Sharded training on one GPU, world of one on nccl, next to FSDP2; run in a rank by gpu.py.

Parameters are gathered in bf16 and reduced in fp32, one unit per block and the root.  "compiled, not sharded" is the
same model under torch.compile with bf16 autocast: what a sharded one cannot beat.  A world of one copies where others
send, in FSDP2 as here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpu_device import DEVICE, peak_bytes, prepare, reset_peak, synchronize
from gpu_timing import CONTEXT, NUM_SYMBOLS, Trainer, gpt2
from models import give_own_code
from timing import interleave

SUBJECTS: dict[str, dict[str, Any]] = {
    "FSDP2 eager": {"subject": "torch"},
    "lockstep eager": {"subject": "lockstep"},
    "FSDP2, blocks compiled": {"subject": "torch", "compiled": "blocks"},
    "compiled, not sharded": {"subject": "none", "compiled": "model"},
    "lockstep, one graph": {"subject": "lockstep", "compiled": "model"},
}


def sharded(subject: str, module: Any, low: bool = True) -> nn.Module:
    """The model as one unit per block and one for the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if subject == "none":
        return module
    if subject == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from lockstep import fully_shard
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


class ShardTrainer(Trainer):
    """A step of the GPT-2 sized model."""

    def __init__(self, subject: str, compiled: str | None = None, num_steps: int = 1) -> None:
        torch.manual_seed(0)
        self.is_sharded = subject != "none"
        self.module = gpt2().to(DEVICE)
        give_own_code(self.module)
        if compiled == "blocks":
            for block in self.module.blocks:
                block.compile()
        self.module = sharded(subject, self.module)
        self.model = torch.compile(self.module) if compiled == "model" else self.module
        self._set_up(num_steps)
        for _ in range(5):
            self.step()
        synchronize()

    def forward_and_backward(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not self.is_sharded):
            loss = self.model(self.batch)
        loss.backward()


def step_times(num_rounds: int, num_steps: int) -> dict[str, Any]:
    prepare()
    trainers, failed = {}, {}
    for name, options in SUBJECTS.items():
        try:
            trainers[name] = ShardTrainer(num_steps=num_steps, **options)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:400]
    times = interleave({name: trainer.seconds_per_step for name, trainer in trainers.items()}, num_rounds)
    return {"times": times, "failed": failed}


def peak_memory(name: str) -> int:
    """Peak allocated bytes in the steps of this process after the first ones."""
    prepare()
    trainer = ShardTrainer(**SUBJECTS[name])
    reset_peak()
    for _ in range(3):
        trainer.step()
    return peak_bytes()


def _whole(gradient: Any) -> torch.Tensor:
    """All shards of a gradient; by way of the host, since gloo's functional collectives crash on CUDA tensors."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, gradient.to_local().cpu())
    return torch.cat(parts).to(DEVICE)


def gradients(compiled: bool, low: bool) -> dict[str, Any]:
    """Every parameter's gradient against the plain module in fp32 on the whole batch: the largest relative error.

    With bf16 gathers, FSDP2's error of the same kind is next to it.
    """
    prepare()
    torch.set_float32_matmul_precision("highest")
    errors = {}
    for subject in ("lockstep", "torch") if low else ("lockstep",):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = gpt2().to(DEVICE)
        module = sharded(subject, copy.deepcopy(plain), low)
        world, rank = dist.get_world_size(), dist.get_rank()
        batch = torch.randint(NUM_SYMBOLS, (2 * world, min(CONTEXT, 256) + 1), device=DEVICE)
        dist.broadcast(batch, 0)
        model = torch.compile(module) if compiled and subject == "lockstep" else module
        for _ in range(3):
            module.zero_grad()
            plain.zero_grad()
            model(batch[2 * rank : 2 * rank + 2]).backward()
            plain(batch).backward()
        worst, where = 0.0, ""
        for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            whole = _whole(ours.grad)
            error = ((whole - theirs.grad).abs().max() / theirs.grad.abs().max()).item()
            if error > worst:
                worst, where = error, name
        errors[subject] = (worst, where)
    return errors
