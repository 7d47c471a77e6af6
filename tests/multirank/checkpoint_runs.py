"""A training run on several ranks that saves checkpoints, to be stopped anywhere and resumed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep

NUM_SAMPLES = 72
ACCUMULATE = 2
OPTIMIZERS = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 3)
    )


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state by name, whole."""

    def whole(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    plain = lockstep.unwrap(model)
    state = {f"model.{key}": whole(value) for key, value in plain.state_dict().items()}
    for name, parameter in plain.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = whole(value)
    return state


def train(
    folder: Path,
    optimizer_name: str,
    last_step: int,
    *,
    save_every: int = 1,
    die: tuple[int, int] | None = None,  # rank, step
    hook: str | None = None,
    asynchronous: bool = True,
    compiled: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Train up to ``last_step`` optimizer steps, from wherever the folder says."""
    torch.manual_seed(seed)
    model = build_model()
    samples = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    # Compiled, sizes are chosen by measuring the link; two runs may choose differently.
    cap = None if compiled else 0.001
    ddp = lockstep.DDP(model, bucket_cap_mb=cap, plan=lockstep.checkpoint.plan_of(folder))
    register_hook(ddp, hook)
    if compiled:
        ddp.compile(backend="aot_eager")
    optimizer = OPTIMIZERS[optimizer_name](ddp.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    sampler = lockstep.data.ResumableSampler(samples, seed=3)
    loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=sampler)
    torch.manual_seed(100 * seed + dist.get_rank())  # dropout differs between ranks
    objects = {"scheduler": scheduler, "data": sampler}
    loaded = lockstep.checkpoint.load(folder, ddp, optimizer, **objects, missing_ok=True)
    step, losses = (loaded.step, loaded.per_rank.get("losses", [])) if loaded else (0, [])
    first = step
    while step < last_step:
        batches = sampler.batches(loader)
        for number, batch in enumerate(batches, 1):
            last = number % ACCUMULATE == 0
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(batch).square().mean()
                loss.backward()
            losses.append(loss.item())
            if not last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if die == (dist.get_rank(), step):
                os.kill(os.getpid(), signal.SIGKILL)
            if step % save_every == 0:
                lockstep.checkpoint.save(
                    folder,
                    ddp,
                    optimizer,
                    step=step,
                    **objects,
                    per_rank={"losses": losses},
                    keep=2,
                    asynchronous=asynchronous,
                )
            if step == last_step:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    lockstep.checkpoint.wait()
    return {
        "state": whole_state(ddp, optimizer),
        "losses": losses,
        "first": first,
        "rng": torch.get_rng_state(),
        "notes": loaded.notes if loaded else (),
    }


def register_hook(ddp: lockstep.DDP, name: str | None) -> None:
    if name == "int8":
        ddp.register_comm_hook(lockstep.hooks.Int8State(), lockstep.hooks.int8_hook)
    elif name == "topk":
        ddp.register_comm_hook(lockstep.hooks.TopKState(), lockstep.hooks.topk_hook)
    elif name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
