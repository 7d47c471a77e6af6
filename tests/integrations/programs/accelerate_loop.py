"""Training loops written with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from cases import OUT, Record, run_cases
from torch import nn

NUM_FEATURES, NUM_CLASSES = 24, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def make_data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, NUM_FEATURES, generator=generator)
    targets = torch.randint(NUM_CLASSES, (96,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)


def make_accelerator(**settings: Any) -> Accelerator:
    # One process, several accelerators: each one starts from settings of its own.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


class Training:
    def __init__(self, hook: DistributedDataParallelKwargs | None = None, **settings: Any) -> None:
        net = Net()
        self.record = Record(net)
        self.accelerator = make_accelerator(kwargs_handlers=[hook] if hook else [], **settings)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            net, optimizer, make_data(), schedule
        )

    def epoch(self) -> Training:
        for inputs, targets in self.data:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return self

    def end(self) -> dict[str, Any]:
        assert self.accelerator.unwrap_model(self.model, keep_torch_compile=False) is self.record.module
        return self.record.end(self.model)


def accumulate() -> dict[str, Any]:
    """Six batches in groups of four, so the last group is a short one; bf16 autocast."""
    return Training(gradient_accumulation_steps=4, mixed_precision="bf16").epoch().end()


def fp16_hook() -> dict[str, Any]:
    return Training(DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)).epoch().end()


def power_sgd() -> dict[str, Any]:
    hook = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_wrapper=DDPCommunicationHookType.FP16,
        comm_state_option={
            "matrix_approximation_rank": 2,
            "start_powerSGD_iter": 2,
            "min_compression_rate": 1,
        },
    )
    return Training(hook).epoch().end()


def compiled() -> dict[str, Any]:
    return Training(dynamo_backend="aot_eager").epoch().end()


def uninterrupted() -> dict[str, Any]:
    training = Training(gradient_accumulation_steps=2).epoch()
    training.accelerator.save_state(str(OUT / "state"))
    return training.epoch().end()


def resumed() -> dict[str, Any]:
    training = Training(gradient_accumulation_steps=2)
    training.accelerator.load_state(str(OUT / "state"))
    return training.epoch().end()


def sync_in_the_backward() -> dict[str, Any]:
    """The forward runs without synchronisation, and only the backward is told to synchronise."""
    training = Training()
    accelerator, model, optimizer = training.accelerator, training.model, training.optimizer
    first, second, *_ = training.data
    for _ in range(2):
        with accelerator.no_sync(model):
            losses = [nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in (first, second)]
            accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        optimizer.step()
        optimizer.zero_grad()
    return training.end()


run_cases(accumulate, fp16_hook, power_sgd, uninterrupted, resumed, sync_in_the_backward, compiled)
