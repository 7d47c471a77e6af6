"""The loop that every mode must equal, written by hand, and models to run it on."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_UPDATES = 20
RATE = 2.0**-7  # the same number in 32 and in 64 bits, as a program may hold it


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Cnn(nn.Module):
    """Convolutions with batch norm: buffers that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x.view(-1, 1, 2, 3))))
        return self.last(x.flatten(1))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class TiedGpt(nn.Module):
    """One block of a transformer over six places, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(4, 8)
        self.norm, self.attention = nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.symbols((x * 10).long() % 4)
        query, key, value = self.attention(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(h + self.network(h)).mean(1)


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "dropping": Dropping, "gpt": TiedGpt}


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loss_of(model: Any, batch: Any) -> Any:
    output = model(batch["x"])
    return F.mse_loss(output, batch["y"]), output


def batch_of(index: int, rank: int = 0, size: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return {"x": torch.randn(size, 6, generator=generator), "y": torch.randn(size, 4, generator=generator)}


@dataclass
class Case:
    """What a step is made with."""

    model: str = "mlp"
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)  # clip_norm, clip_value, accumulate, average
    scheduled: bool = False
    scale: float = 0.0  # the first scale of a gradient scaler

    @property
    def accumulate(self) -> int:
        return self.options.get("accumulate", 1)


CASES = {
    "mlp": Case(),
    "mlp, sgd": Case(optimizer="sgd"),
    "mlp, two optimizers": Case(optimizer="two"),
    "accumulate": Case(options={"accumulate": 4}),
    "clip_norm": Case(options={"clip_norm": 0.05}),
    "clip_value": Case(options={"clip_value": 0.01}),
    "schedule": Case(scheduled=True),
    "average": Case(options={"average": 0.9}),
    "scaler": Case(scale=16.0),
    "scaler that skips": Case(scale=2.0**127, options={"clip_norm": 0.05}),
    "cnn": Case(model="cnn"),
    "cnn, accumulate": Case(model="cnn", options={"accumulate": 2}),
    "dropout": Case(model="dropping"),
    "gpt": Case(model="gpt"),
    "everything": Case(
        model="gpt", scheduled=True, scale=16.0, options={"accumulate": 2, "clip_norm": 0.05, "average": 0.9}
    ),
}


def optimizers_of(kind: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    if kind == "adamw":
        return [torch.optim.AdamW(parameters, lr=RATE)]
    if kind == "fused":
        return [torch.optim.AdamW(parameters, lr=RATE, fused=True)]
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=8 * RATE, momentum=0.9)]
    half = len(parameters) // 2
    return [
        torch.optim.AdamW(parameters[:half], lr=RATE, fused=kind == "two fused"),
        torch.optim.SGD(parameters[half:], lr=8 * RATE, momentum=0.9, fused=kind == "two fused"),
    ]


@dataclass
class Setup:
    """A model with all that trains it."""

    module: nn.Module
    model: Any
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    scaler: Any

    def tensors(self) -> dict[str, Tensor]:
        found = {name: local(value.detach()).clone() for name, value in self.module.state_dict().items()}
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                found[f"rate {index}"] = torch.tensor(float(group["lr"]))
        return found


def set_up(case: Case, wrap: Any = None, optimizer: str | None = None) -> Setup:
    torch.manual_seed(3)
    module = MODELS[case.model]()
    model = wrap(module) if wrap is not None else module
    optimizers = optimizers_of(optimizer or case.optimizer, module)
    schedulers = (
        [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5 ** (n // 4)) for o in optimizers] if case.scheduled else []
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale, growth_interval=3) if case.scale else None
    torch.manual_seed(9)
    return Setup(module, model, optimizers, schedulers, scaler)


def by_hand(case: Case, setup: Setup, rank: int = 0, num_updates: int = NUM_UPDATES) -> dict[str, Tensor]:
    """Train as people write it; the tensors at the end, and every loss."""
    options, found = case.options, {}
    averages = {name: p.detach().clone() for name, p in setup.module.named_parameters()}
    for index in range(num_updates * case.accumulate):
        is_last = (index + 1) % case.accumulate == 0
        if index % case.accumulate == 0:
            for optimizer in setup.optimizers:
                optimizer.zero_grad()
        has_no_sync = hasattr(setup.model, "no_sync")
        with setup.model.no_sync() if has_no_sync and not is_last else nullcontext():
            loss, _ = loss_of(setup.model, batch_of(index, rank))
            share = loss / case.accumulate if case.accumulate > 1 else loss
            (setup.scaler.scale(share) if setup.scaler is not None else share).backward()
        found[f"loss {index}"] = loss.detach()
        if not is_last:
            continue
        clips = "clip_norm" in options or "clip_value" in options
        if setup.scaler is not None and clips:
            for optimizer in setup.optimizers:
                setup.scaler.unscale_(optimizer)
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(setup.module.parameters(), options["clip_norm"])
        if "clip_value" in options:
            torch.nn.utils.clip_grad_value_(setup.module.parameters(), options["clip_value"])
        for optimizer in setup.optimizers:
            setup.scaler.step(optimizer) if setup.scaler is not None else optimizer.step()
        if setup.scaler is not None:
            setup.scaler.update()
        with torch.no_grad():
            for name, value in averages.items():
                local(value).lerp_(local(setup.module.get_parameter(name)), 1 - options.get("average", 0.5))
        for scheduler in setup.schedulers:
            scheduler.step()
    if "average" in options:
        found |= {f"average of {name}": local(value) for name, value in averages.items()}
    return found | setup.tensors()


def make_step(case: Case, setup: Setup, mode: str, **more: Any) -> Any:
    import lockstep

    return lockstep.TrainStep(
        setup.model,
        setup.optimizers,
        loss_of,
        scaler=setup.scaler,
        scheduler=setup.schedulers or None,
        mode=mode,
        **case.options,
        **more,
    )


def by_step(case: Case, setup: Setup, step: Any, rank: int = 0, num_updates: int = NUM_UPDATES) -> dict[str, Tensor]:
    """Train by calls of a step; the same tensors as ``by_hand``."""
    found = {}
    for index in range(num_updates * case.accumulate):
        result = step(batch_of(index, rank))
        assert isinstance(result, tuple)
        assert not any(t.requires_grad for t in result)
        found[f"loss {index}"] = result[0]
    assert step.num_updates == num_updates
    if "average" in case.options:
        names = [name for name, _ in setup.module.named_parameters()]
        averaged = step.averaged_state_dict()
        found |= {f"average of {name}": local(averaged[name]) for name in names}
        if not hasattr(setup.module, "reshard"):  # a sharded module cannot be copied
            copy.deepcopy(setup.module).load_state_dict(averaged)
    return found | setup.tensors()


def assert_same(right: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """The same bits."""
    assert set(right) == set(found)
    different = [name for name, value in right.items() if not torch.equal(value, found[name])]
    assert not different, different


def assert_close(right: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert set(right) == set(found)
    for name, value in right.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}", check_dtype=False
        )
