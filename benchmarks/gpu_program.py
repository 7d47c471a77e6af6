"""``lockstep.TrainStep`` on one GPU: parameters after 20 steps against the plain loop, and step times; run by gpu.py.

The loop here is written by hand, as a user would write it. Where kernels are the same, parameters must be the same
bits; elsewhere (a compiled program, a learning rate that a program holds in fp32) they must be within a tolerance. Each
case is on its own: what raises is reported with its traceback, and the rest goes on.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forcing import force_collective, forced_collectives_of_shards
from gpu_device import DEVICE, IS_GPU, device_seconds, prepare, reset_peak, synchronize
from models import GPT, SmallCNN, give_own_code
from subjects import lockstep_ddp
from timing import interleave

NUM_STEPS = 20
RATE = 2.0**-10  # the same number in fp32 and fp64
TOLERANCE = 2e-3  # of a parameter's largest value, after 20 steps of Adam; a wrong gradient is off by far more


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.1))
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.inner(x)), x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x), x.flip(1))


class Waiting(MLP):
    """Asks the device for a number in its forward: it cannot be captured, and must still be right."""

    def forward(self, x: Tensor) -> Tensor:
        loss = F.mse_loss(self.inner(x), x.flip(1))
        return loss * 2 if loss.item() > 1e9 else loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": MLP,
    "CNN": lambda: SmallCNN(width=8, num_layers=6),
    "GPT": lambda: GPT(512, 64, 128, 2, 4),
    "dropout": DropoutNet,
    "waits": Waiting,
}


def batch_for(name: str, step: int, where: str) -> Any:
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "GPT":
        made: Any = torch.randint(512, (4, 65), generator=generator)
    elif name == "CNN":
        made = torch.randn(4, 3, 16, 16, generator=generator)
    else:
        made = torch.randn(16, 32, generator=generator)
    if where == "pinned" and IS_GPU:
        return made.pin_memory()
    return made if where == "host" else made.to(DEVICE)


def halving(num_updates: int) -> float:
    """A schedule whose rates are the same in fp32 and fp64."""
    return 0.5 ** (num_updates // 5)


def optimizers_for(kind: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    if kind == "fused":
        return [torch.optim.AdamW(parameters, lr=RATE, fused=True)]
    if kind == "foreach":
        return [torch.optim.AdamW(parameters, lr=RATE, foreach=True)]
    if kind == "capturable":
        return [torch.optim.AdamW(parameters, lr=RATE, capturable=IS_GPU)]
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=RATE, momentum=0.9)]
    if kind == "fused sgd":
        return [torch.optim.SGD(parameters, lr=RATE, momentum=0.9, fused=True)]
    half = len(parameters) // 2
    return [
        torch.optim.AdamW(parameters[:half], lr=RATE, fused=True),
        torch.optim.SGD(parameters[half:], lr=RATE, momentum=0.9, fused=True),
    ]


# Name: what differs from {"model": "MLP", "optimizer": "fused"}. "bits": the kernels are the same, so the bits must be.
CASES: dict[str, dict[str, Any]] = {
    "MLP": {"bits": True},
    "MLP, plain model": {"wrap": "plain", "bits": True},
    "MLP, collective forced": {"forced": True, "bits": True},
    "MLP, batches of the host": {"where": "host", "bits": True},
    "MLP, pinned batches": {"where": "pinned", "bits": True},
    "MLP, foreach": {"optimizer": "foreach"},
    "MLP, capturable": {"optimizer": "capturable"},
    "MLP, SGD": {"optimizer": "sgd", "bits": True},
    "MLP, two optimizers": {"optimizer": "two", "bits": True},
    "MLP, accumulate 4": {"accumulate": 4, "bits": True},
    "MLP, clip_norm": {"clip_norm": 0.01, "bits": True},
    "MLP, clip_value": {"clip_value": 0.001, "bits": True},
    "MLP, scaler": {"scaler": True, "bits": True},
    "MLP, scaler that skips": {"scaler": "skips", "bits": True},
    "MLP, schedule": {"schedule": True, "bits": True},
    "MLP, average": {"average": 0.9, "bits": True},
    "MLP, by bucket": {"by_bucket": True, "bits": True},
    "MLP, by bucket, clip_value, schedule, average, collective forced": {
        "by_bucket": True,
        "clip_value": 0.001,
        "schedule": True,
        "average": 0.9,
        "forced": True,
        "bits": True,
    },
    "GPT, by bucket": {"model": "GPT", "by_bucket": True, "bits": True},
    "MLP, three shapes": {"shapes": True, "bits": True},
    "dropout": {"model": "dropout", "bits": True},
    "dropout, accumulate 4": {"model": "dropout", "accumulate": 4, "bits": True},
    "CNN": {"model": "CNN", "bits": True},
    "CNN, accumulate 4": {"model": "CNN", "accumulate": 4, "bits": True},
    "CNN, SGD": {"model": "CNN", "optimizer": "fused sgd", "bits": True},
    "GPT": {"model": "GPT", "bits": True},
    "GPT, compiled": {"model": "GPT", "compiled": True},
    "GPT, compiled, collective forced": {"model": "GPT", "compiled": True, "forced": True},
    "GPT, everything": {
        "model": "GPT",
        "accumulate": 4,
        "clip_norm": 0.1,
        "scaler": True,
        "schedule": True,
        "average": 0.9,
        "forced": True,
    },
    "GPT, everything, compiled": {
        "model": "GPT",
        "accumulate": 4,
        "clip_norm": 0.1,
        "schedule": True,
        "average": 0.9,
        "forced": True,
        "compiled": True,
    },
    "GPT, everything, SGD": {
        "model": "GPT",
        "optimizer": "fused sgd",
        "accumulate": 4,
        "clip_norm": 0.1,
        "scaler": True,
        "schedule": True,
        "average": 0.9,
        "bits": True,
    },
    "waits for the device": {"model": "waits", "bits": True, "falls_back": True},
    "MLP, sharded": {"wrap": "shard", "bits": True},
    "MLP, sharded, clip_norm": {"wrap": "shard", "clip_norm": 0.01, "bits": True},
    "MLP, sharded, clip_value, schedule, average": {
        "wrap": "shard",
        "clip_value": 0.001,
        "schedule": True,
        "average": 0.9,
        "bits": True,
    },
    "MLP, sharded, scaler that skips": {"wrap": "shard", "scaler": "skips", "bits": True},
    "MLP, sharded, foreach": {"wrap": "shard", "optimizer": "foreach"},
    "MLP, sharded, collectives forced": {"wrap": "shard", "forced": True, "bits": True},
    "MLP, sharded, accumulate 4": {"wrap": "shard", "accumulate": 4, "bits": True, "falls_back": True},
    "dropout, sharded": {"wrap": "shard", "model": "dropout", "bits": True},
    "CNN, sharded": {"wrap": "shard", "model": "CNN", "bits": True},
    "GPT, sharded": {"wrap": "shard", "model": "GPT", "bits": True},
    "GPT, sharded, bf16 gathers, collectives forced": {
        "wrap": "shard, bf16",
        "model": "GPT",
        "forced": True,
        "bits": True,
    },
    "GPT, sharded, compiled": {"wrap": "shard", "model": "GPT", "compiled": True},
    "GPT, sharded, compiled, collectives forced": {
        "wrap": "shard",
        "model": "GPT",
        "compiled": True,
        "forced": True,
        "clip_norm": 0.1,
        "schedule": True,
    },
}
GRAPH_CASES = (
    "MLP",
    "MLP, scaler that skips",
    "dropout",
    "CNN, SGD",
    "GPT, everything, SGD",
)  # SGD: Adam makes noise large


def check(names: list[str], mode: str, progress: str) -> None:
    """Run the cases one by one; each answer is written when it is there."""
    prepare()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    lockstep_ddp()
    for name in names:
        began = time.time()
        try:
            case = {"model": "MLP", "optimizer": "fused", **CASES[name]}
            forces = case.get("forced") and case.get("wrap", "").startswith("shard")
            with forced_collectives_of_shards() if forces else nullcontext():
                answer = run_case(mode=mode, **case)
        except Exception as error:
            answer = {
                "ok": False,
                "raised": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-2500:],
            }
        answer |= {"case": name, "mode": mode, "seconds": time.time() - began}
        _write(progress, answer)
    if mode == "captured" and "MLP" in names:
        try:
            answer = told_of_nan()
        except Exception as error:
            answer = {"ok": False, "raised": str(error), "trace": traceback.format_exc()[-2500:]}
        _write(progress, answer | {"case": "NaN is told", "mode": mode})


def _write(progress: str, answer: dict[str, Any]) -> None:
    with Path(progress).open("a") as file:
        file.write(json.dumps(answer) + "\n")


def told_of_nan() -> dict[str, Any]:
    """A batch with a NaN in a step that is replayed: the log says so soon after, and the step stays a program."""
    import lockstep

    gc.collect()  # a scaler of a case before would be taken for one in use
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    module = MLP().to(DEVICE)
    ddp = lockstep.DDP(module, bucket_cap_mb=0.02)
    step = lockstep.TrainStep(ddp, torch.optim.SGD(module.parameters(), lr=0.0), lambda m, b: m(b), mode="captured")
    for index in range(16):
        batch = batch_for("MLP", index, "device")
        step(batch.fill_(float("nan")) if index == 8 else batch)
        synchronize()
    logging.getLogger("lockstep").removeHandler(handler)
    told = [m for m in messages if "NaN or Inf" in m]
    explained = str(step.explain())
    ok = (len(told) == 1 and "calls: 0 as a program" not in explained) or not IS_GPU
    return {"ok": ok, "worst": [str(told)[:300], 0.0], "different": len(told), "of": 1, "explained": explained}


def run_case(
    model: str,
    optimizer: str,
    mode: str,
    *,
    bits: bool = False,
    wrap: str = "ddp",
    forced: bool = False,
    compiled: bool = False,
    where: str = "device",
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scaler: bool | str = False,
    schedule: bool = False,
    average: float | None = None,
    shapes: bool = False,
    falls_back: bool = False,
    by_bucket: bool = False,
) -> dict[str, Any]:
    import lockstep

    torch._dynamo.reset()
    torch.manual_seed(0)
    base = MODELS[model]().to(DEVICE)
    ends: list[dict[str, Any]] = []
    explained = ""
    for by_hand in (True, False):
        module = copy.deepcopy(base)
        give_own_code(module)
        ddp = lockstep.DDP(module, bucket_cap_mb=0.02) if wrap == "ddp" else module
        if wrap.startswith("shard"):
            shard_children(module, low=wrap.endswith("bf16"))
        elif forced:
            force_collective(ddp)
        called = torch.compile(ddp) if compiled else ddp
        optimizers = optimizers_for(optimizer, module)
        schedulers = [torch.optim.lr_scheduler.LambdaLR(o, halving) for o in optimizers] if schedule else []
        options: dict[str, Any] = {"growth_interval": 4}
        if scaler == "skips":
            options["init_scale"] = 2.0**127  # overflows, and halves until it does not
        grad_scaler = torch.amp.GradScaler(DEVICE, **options) if scaler else None
        torch.manual_seed(5)
        batches = [batch_for(model, i, where) for i in range(NUM_STEPS * accumulate)]
        if shapes:
            batches = [b[: 16 - 4 * (i % 3)].contiguous() for i, b in enumerate(batches)]
        run = hand_loop if by_hand else train_step
        losses, averages, explanation = run(
            called,
            ddp,
            module,
            optimizers,
            batches,
            accumulate=accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=grad_scaler,
            schedulers=schedulers,
            average=average,
            mode=mode,
            by_bucket=by_bucket,
        )
        synchronize()
        end = {name: _local(value.detach()).clone() for name, value in module.state_dict().items()}
        end |= {f"average of {name}": _local(value) for name, value in averages.items()}
        end |= {f"loss {i}": loss for i, loss in enumerate(losses)}
        if grad_scaler is not None:
            end["scale"] = torch.tensor(grad_scaler.get_scale())
        ends.append(end)
        explained = explanation or explained
    return compare(ends[0], ends[1], bits and mode == "captured", explained, mode, falls_back)


def shard_children(module: nn.Module, low: bool) -> None:
    """One unit per block or child, and one for the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import lockstep

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for child in module.blocks if hasattr(module, "blocks") else module.children():
        lockstep.fully_shard(child, mp_policy=policy)
    lockstep.fully_shard(module, mp_policy=policy)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compare(
    right: dict[str, Tensor], found: dict[str, Tensor], bits: bool, explained: str, mode: str, falls_back: bool
) -> dict[str, Any]:
    worst, worst_error, different = "", 0.0, 0
    for name, value in right.items():
        mine = found[name].to(value.device)
        different += not torch.equal(mine, value)
        largest = value.double().abs().max().item() or 1.0
        error = (mine.double() - value.double()).abs().max().item() / largest
        if not error <= worst_error:
            worst, worst_error = name, error
    ran = "calls: 0 as a program" not in explained
    on_cpu = not IS_GPU and mode == "captured"
    ok = worst_error <= TOLERANCE and (not bits or different == 0) and (ran != falls_back or on_cpu)
    return {"ok": ok, "worst": [worst, worst_error], "different": different, "of": len(right), "explained": explained}


def hand_loop(
    called: Any,
    ddp: Any,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Any],
    *,
    accumulate: int,
    clip_norm: float | None,
    clip_value: float | None,
    scaler: Any,
    schedulers: list[Any],
    average: float | None,
    mode: str,
    by_bucket: bool,
) -> tuple[list[Tensor], dict[str, Tensor], str]:
    losses = []
    averages = {name: p.detach().clone() for name, p in module.named_parameters()} if average else {}
    for index, batch in enumerate(batches):
        is_last = (index + 1) % accumulate == 0
        if index % accumulate == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        ddp_syncs = getattr(ddp, "require_backward_grad_sync", None)
        if ddp_syncs is not None:
            ddp.require_backward_grad_sync = is_last
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(is_last)
        loss = called(batch.to(DEVICE))
        share = loss / accumulate if accumulate > 1 else loss
        (scaler.scale(share) if scaler is not None else share).backward()
        losses.append(loss.detach())
        if not is_last:
            continue
        if scaler is not None and (clip_norm or clip_value):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        if clip_value:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip_value)
        for optimizer in optimizers:
            scaler.step(optimizer) if scaler is not None else optimizer.step()
        if scaler is not None:
            scaler.update()
        with torch.no_grad():
            for name, value in averages.items():
                value.lerp_(module.get_parameter(name), 1 - average)  # type: ignore[operator]
        for scheduler in schedulers:
            scheduler.step()
    return losses, averages, ""


def train_step(
    called: Any,
    ddp: Any,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Any],
    *,
    schedulers: list[Any],
    average: float | None,
    mode: str,
    by_bucket: bool,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor], str]:
    import lockstep

    step = lockstep.TrainStep(
        called,
        optimizers,
        lambda m, b: m(b),
        scheduler=schedulers or None,
        average=average,
        mode=mode,
        update_by_bucket=by_bucket,
        **options,
    )
    losses = [step(batch) for batch in batches]
    averages = {}
    if average:
        averaged = step.averaged_state_dict()
        averages = {name: averaged[name] for name, _ in module.named_parameters()}
    return losses, averages, str(step.explain())


# ---------------------------------------------------------------- times

SIZES = {  # symbols, context, width, layers, heads; batch
    "22 M": ((6000, 256, 512, 6, 8), 8),
    "191 M": ((37888, 1024, 1024, 12, 16), 8),
}
if not IS_GPU:
    SIZES = dict.fromkeys(SIZES, ((64, 16, 32, 2, 2), 2))
SUBJECTS: dict[str, dict[str, Any]] = {
    "compiled alone": {},
    "reduce-overhead alone": {"compile_mode": "reduce-overhead"},
    "lockstep compiled": {"wrap": True},
    "lockstep captured": {"wrap": True, "mode": "captured"},
    "lockstep captured, forced": {"wrap": True, "mode": "captured", "forced": True},
    "lockstep eager captured": {"wrap": True, "mode": "captured", "compiled": False},
    "lockstep eager": {"wrap": True, "mode": "loop", "compiled": False},
    "lockstep eager, by bucket": {"wrap": True, "mode": "loop", "compiled": False, "by_bucket": True},
    "lockstep eager captured, by bucket": {"wrap": True, "mode": "captured", "compiled": False, "by_bucket": True},
}
MEMORY_ONLY = ("lockstep eager", "lockstep eager, by bucket", "lockstep eager captured, by bucket")


class Subject:
    """One way to run the step of a GPT; the batch is on the device already."""

    def __init__(
        self,
        size: str,
        *,
        wrap: bool = False,
        mode: str = "",
        forced: bool = False,
        compiled: bool = True,
        compile_mode: str | None = None,
        by_bucket: bool = False,
    ) -> None:
        import lockstep

        shape, batch = SIZES[size]
        torch.manual_seed(0)
        self.module = GPT(*shape).to(DEVICE)
        give_own_code(self.module)
        self.batch = torch.randint(shape[0], (batch, shape[1] + 1), device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.compile_mode = compile_mode
        self.step: Any = None
        model: Any = lockstep.DDP(self.module) if wrap else self.module
        if forced:
            force_collective(model)
        self.model = torch.compile(model, mode=compile_mode) if compiled else model
        if mode:
            self.step = lockstep.TrainStep(
                self.model, self.optimizer, _autocast_loss, mode=mode, update_by_bucket=by_bucket
            )
        for _ in range(8):
            self.run()
        synchronize()

    def run(self) -> None:
        if self.step is not None:
            self.step(self.batch)
            return
        if self.compile_mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        loss = _autocast_loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, num_steps: int) -> float:
        def steps() -> None:
            for _ in range(num_steps):
                self.run()

        return device_seconds(steps) / num_steps

    def host_seconds(self, num_steps: int) -> float:
        total = 0.0
        for _ in range(num_steps):
            synchronize()
            began = time.perf_counter()
            self.run()
            total += time.perf_counter() - began
        return total / num_steps


def _autocast_loss(model: Any, batch: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(batch)


def times(size: str, names: list[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Step times, interleaved; what cannot be made is left out with its traceback."""
    prepare()
    lockstep_ddp()
    subjects, failed, notes = {}, {}, {}
    for name in names:
        began = time.time()
        try:
            subjects[name] = Subject(size, **SUBJECTS[name])
            if subjects[name].step is not None:
                notes[name] = str(subjects[name].step.explain())
            notes[name] = notes.get(name, "") + f" (ready after {time.time() - began:.0f} s)"
        except Exception:
            failed[name] = traceback.format_exc()[-2500:]
    measured = interleave({name: lambda s=s: s.seconds(num_steps) for name, s in subjects.items()}, num_rounds)
    host = interleave({name: lambda s=s: s.host_seconds(num_steps) for name, s in subjects.items()}, 3)
    return {"times": measured, "host_times": host, "failed": failed, "notes": notes}


def peak_memory(size: str, name: str) -> int:
    """Peak bytes that a process keeps from others; what a program holds does not count as in use."""
    prepare()
    lockstep_ddp()
    subject = Subject(size, **SUBJECTS[name])
    if not IS_GPU:
        return 1
    torch.cuda.empty_cache()
    reset_peak()
    for _ in range(3):
        subject.run()
    synchronize()
    return torch.cuda.max_memory_reserved()
