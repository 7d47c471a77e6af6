"""Step time, peak memory and time in hooks on one GPU, world of one on nccl; run in a rank by gpu.py."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from forcing import force_collective
from gpu_device import DEVICE, IS_GPU, device_seconds, peak_bytes, prepare, synchronize
from models import GPT, ManyTiny
from subjects import ALONE, BEFORE_DEFAULT, LOCKSTEP_DEFAULT, LOCKSTEP_GRID, TORCH_DEFAULT, TORCH_GRID, Subject
from timing import interleave

BATCH, CONTEXT, NUM_SYMBOLS = (8, 1024, 50304) if IS_GPU else (2, 32, 256)
SUBJECTS = {s.name: s for s in [ALONE, TORCH_DEFAULT, *TORCH_GRID, LOCKSTEP_DEFAULT, BEFORE_DEFAULT, *LOCKSTEP_GRID]}
FORCED = ", collective forced"


def gpt2() -> GPT:
    """GPT-2's small size: 124 M parameters."""
    width, num_layers, num_heads = (768, 12, 12) if IS_GPU else (32, 2, 2)
    return GPT(NUM_SYMBOLS, CONTEXT, width, num_layers, num_heads)


class Trainer:
    def __init__(self, subject: Subject, num_steps: int, forced: bool = False, hook: bool = False) -> None:
        torch.manual_seed(0)
        self.module = gpt2().to(DEVICE)
        self.model = self.ddp = subject.wrap(self.module)
        change(self.ddp, forced, hook)
        self._set_up(num_steps)
        for _ in range(3):
            self.step()

    def _set_up(self, num_steps: int) -> None:
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(NUM_SYMBOLS, (BATCH, CONTEXT + 1), device=DEVICE)
        self.num_steps = num_steps

    def forward_and_backward(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.model(self.batch)
        loss.backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _steps(self) -> None:
        for _ in range(self.num_steps):
            self.step()

    def seconds_per_step(self) -> float:
        return device_seconds(self._steps) / self.num_steps

    def host_seconds_per_step(self) -> float:
        """How long the host takes to issue a forward and a backward, of an idle device that never makes it wait."""
        total = 0.0
        for _ in range(self.num_steps):
            synchronize()
            begin = time.perf_counter()
            self.forward_and_backward()
            total += time.perf_counter() - begin
            synchronize()
            self.optimizer.zero_grad()
        return total / self.num_steps


def change(ddp: Any, forced: bool, hook: bool) -> None:
    """What a subject can have besides its constructor's options."""
    if forced:
        force_collective(ddp)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def _trainer(name: str, num_steps: int) -> Trainer:
    return Trainer(SUBJECTS[name.removesuffix(FORCED)], num_steps, forced=name.endswith(FORCED))


def step_times(subjects: list[str], num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    prepare()
    trainers = {name: _trainer(name, num_steps) for name in subjects}
    return interleave({name: trainer.seconds_per_step for name, trainer in trainers.items()}, num_rounds)


def peak_memory(subject: str, forced: bool = False, hook: bool = False) -> int:
    """Peak allocated bytes of this process, in which nothing else has run: model, optimizer, steps."""
    prepare()
    Trainer(SUBJECTS[subject], 1, forced, hook)
    return peak_bytes()


def hook_times(subjects: list[str], num_rounds: int, num_parameters: int) -> dict[str, list[float]]:
    """Seconds of one backward over tiny parameters, until the device is idle."""
    prepare()
    scale = torch.tensor(0.5, device=DEVICE)

    def measured(name: str) -> Any:
        module = ManyTiny(num_parameters).to(DEVICE)
        model = SUBJECTS[name].wrap(module)

        def one() -> float:
            loss = model(scale)
            synchronize()
            begin = time.perf_counter()
            loss.backward()
            synchronize()
            seconds = time.perf_counter() - begin
            module.zero_grad()
            return seconds

        for _ in range(3):
            one()
        return one

    return interleave({name: measured(name) for name in subjects}, num_rounds)
