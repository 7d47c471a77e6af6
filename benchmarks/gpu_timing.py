"""Step time, peak memory and time in hooks on one GPU, world of one on nccl; run in a rank by gpu.py."""

from __future__ import annotations

import time
from typing import Any

import torch

from models import GPT, ManyTiny
from subjects import ALONE, LOCKSTEP_DEFAULT, LOCKSTEP_GRID, TORCH_DEFAULT, TORCH_GRID, Subject
from timing import interleave

BATCH, CONTEXT, NUM_SYMBOLS = 8, 1024, 50304
SUBJECTS = {s.name: s for s in [ALONE, TORCH_DEFAULT, *TORCH_GRID, LOCKSTEP_DEFAULT, *LOCKSTEP_GRID]}


def gpt2() -> GPT:
    """GPT-2's small size: 124 M parameters."""
    return GPT(num_symbols=NUM_SYMBOLS, context=CONTEXT, width=768, num_layers=12, num_heads=12)


class Trainer:
    def __init__(self, subject: Subject, num_steps: int) -> None:
        torch.manual_seed(0)
        self.module = gpt2().cuda()
        self.model = subject.wrap(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(NUM_SYMBOLS, (BATCH, CONTEXT + 1), device="cuda")
        self.num_steps = num_steps
        for _ in range(3):
            self.step()

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds_per_step(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.num_steps):
            self.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / self.num_steps


def _prepare() -> None:
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")


def step_times(subjects: list[str], num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    _prepare()
    trainers = {name: Trainer(SUBJECTS[name], num_steps) for name in subjects}
    return interleave({name: trainer.seconds_per_step for name, trainer in trainers.items()}, num_rounds)


def peak_memory(subject: str) -> int:
    """Peak allocated bytes of this process, in which nothing else has run: model, optimizer, steps."""
    _prepare()
    Trainer(SUBJECTS[subject], 1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def hook_times(subjects: list[str], num_rounds: int, num_parameters: int) -> dict[str, list[float]]:
    """Seconds of one backward over tiny parameters, until the device is idle."""
    _prepare()
    scale = torch.tensor(0.5, device="cuda")

    def measured(name: str) -> Any:
        module = ManyTiny(num_parameters).cuda()
        model = SUBJECTS[name].wrap(module)

        def one() -> float:
            loss = model(scale)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loss.backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            module.zero_grad()
            return seconds

        for _ in range(3):
            one()
        return one

    return interleave({name: measured(name) for name in subjects}, num_rounds)
