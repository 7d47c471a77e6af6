"""Sharded training on one GPU, world of one on nccl, next to FSDP2; run in a rank by gpu.py.

Parameters are gathered in bf16 and reduced in fp32, one unit per block and the root.  "compiled, not sharded" is the
same model under torch.compile with bf16 autocast: what a sharded one cannot beat.  A world of one copies where others
send, in FSDP2 as here.

With a link, gathers and scatters are forced and take as long as they would at LINK_BYTES_PER_SECOND, on a stream of
their own; FSDP2 scatters nothing in a world of one, so it is not next to these.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forcing import forced_collectives_of_shards
from gpu_compiled import LINK_BYTES_PER_SECOND, _cycles_per_second
from gpu_device import DEVICE, IS_GPU, peak_bytes, prepare, reset_peak, synchronize
from gpu_timing import CONTEXT, NUM_SYMBOLS, Trainer, gpt2
from models import give_own_code
from timing import interleave

SUBJECTS: dict[str, dict[str, Any]] = {
    "FSDP2 eager": {"subject": "torch"},
    "lockstep eager": {"subject": "lockstep"},
    "FSDP2, blocks compiled": {"subject": "torch", "compiled": "blocks"},
    "compiled, not sharded": {"subject": "none", "compiled": "model"},
    "lockstep, one graph": {"subject": "lockstep", "compiled": "model"},
    "lockstep, captured": {"subject": "lockstep", "compiled": "model", "captured": True},
    "lockstep eager, captured": {"subject": "lockstep", "captured": True},
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

    def __init__(
        self,
        subject: str,
        compiled: str | None = None,
        num_steps: int = 1,
        num_warm_up: int = 6,
        captured: bool = False,
        link: EmulatedLink | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.is_sharded = subject != "none"
        self.module = gpt2().to(DEVICE)
        give_own_code(self.module)
        if compiled == "blocks":
            for block in self.module.blocks:
                block.compile()
        self.module = sharded(subject, self.module)
        self.model = torch.compile(self.module) if compiled == "model" else self.module
        for unit in (self.module, *self.module.blocks) if link is not None else ():
            unit.set_custom_all_gather(link)
            unit.set_custom_reduce_scatter(link)
        self._set_up(num_steps)
        self.program = None
        if captured:
            import lockstep

            mode = "captured" if IS_GPU else "loop"
            self.program = lockstep.TrainStep(self.model, self.optimizer, lambda model, batch: model(batch), mode=mode)
        for number in range(num_warm_up):
            before = 0 if link is None else link.num_bytes
            self.step()
            if number == 1 and link is not None:
                self.link_bytes = link.num_bytes - before
        synchronize()
        if captured and IS_GPU and self.program.explain().num_program_calls == 0:
            raise RuntimeError(f"it was not captured: {self.program.explain()}")

    def step(self) -> None:
        if self.program is None:
            super().step()
        else:
            self.program(self.batch)

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
    """Peak allocated bytes in the steps of this process after the first ones.

    A captured program takes its memory when it is captured, so the first steps, which are the loop's, count too.
    """
    prepare()
    reset_peak()
    trainer = ShardTrainer(**SUBJECTS[name])
    if trainer.program is None:
        reset_peak()
    for _ in range(3):
        trainer.step()
    return peak_bytes()


class EmulatedLink:
    """An all-gather or a reduce-scatter of one rank that takes as long as a link of many would."""

    can_be_captured = True

    def __init__(self, stream: Any, cycles_per_byte: float) -> None:
        self._stream = stream
        self._cycles_per_byte = cycles_per_byte
        self.num_bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: torch.Tensor, mine: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.num_bytes += max(output.nbytes, mine.nbytes)
        if not IS_GPU:
            output.copy_(mine)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(max(output.nbytes, mine.nbytes) * self._cycles_per_byte))
            output.copy_(mine)
        for tensor in (output, mine):
            tensor.record_stream(self._stream)
        return _Sent(self._stream)


class _Sent:
    """What the caller waits for; only its stream does."""

    def __init__(self, stream: Any) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())


def link_times(num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Steps with an emulated link, eager and in one graph, next to compute and to communication alone."""
    prepare()
    trainers = {"compute": ShardTrainer("none", "model", num_steps)}
    cycles_per_byte = _cycles_per_second() / LINK_BYTES_PER_SECOND if IS_GPU else 0.0
    stream = torch.cuda.Stream() if IS_GPU else None
    bytes_per_step = {}
    with forced_collectives_of_shards():
        for name in ("lockstep eager", "lockstep, one graph", "lockstep, captured"):
            link = EmulatedLink(stream, cycles_per_byte)
            trainers[name] = ShardTrainer(num_steps=num_steps, link=link, **SUBJECTS[name])
            bytes_per_step[name] = trainers[name].link_bytes
        times = interleave({name: trainer.seconds_per_step for name, trainer in trainers.items()}, num_rounds)
    return {
        "times": times,
        "bytes_per_step": bytes_per_step,
        "link_seconds": {name: num / LINK_BYTES_PER_SECOND for name, num in bytes_per_step.items()},
    }


def cold_step(name: str) -> dict[str, float]:
    """Seconds of the first step and of the second, of a process with an empty compiler cache (see gpu.py)."""
    prepare()
    trainer = ShardTrainer(**SUBJECTS[name], num_warm_up=0)
    synchronize()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        trainer.step()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"first": seconds[0], "second": seconds[1]}


def peak_memory_of_two(name: str) -> dict[str, int]:
    """Two ranks on one GPU over gloo, batch 2: each one's peak in the steps after the first, and what the formula says.

    The formula is that of docs/sharding.md: shards, their gradients and Adam's state, the root and two units whole in
    bf16, one being gathered, one gradient being scattered in fp32; what is left over is activations.
    """
    prepare()
    torch.manual_seed(0)
    trainer = ShardTrainer(**SUBJECTS[name], num_warm_up=0)
    trainer.batch = torch.randint(NUM_SYMBOLS, (2, CONTEXT + 1), device=DEVICE)
    for _ in range(3):
        trainer.step()
    reset_peak()
    for _ in range(3):
        trainer.step()
    sizes = [sum(p.numel() for p in block.parameters()) for block in trainer.module.blocks]
    whole = sum(p.numel() for p in trainer.module.parameters())
    root, unit = whole - sum(sizes), max(sizes)
    shards = 4 * 4 * whole // dist.get_world_size()
    return {"peak": peak_bytes(), "formula": shards + 2 * (root + 2 * unit) + 2 * unit + 4 * max(unit, root)}


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
