"""The compiled path on one GPU, world of one on nccl; run in a rank by gpu.py.

What is timed is the whole step of a GPT-2 sized model. ``compiled alone`` is the same model under torch.compile without
data parallel, which nobody can beat; the link is emulated by a communication hook that sleeps on a side stream for
as long as the bucket would take.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forcing import num_left_in_graph
from gpu_device import DEVICE, IS_GPU, peak_bytes, prepare, reset_peak, synchronize
from gpu_timing import Trainer, change, gpt2
from models import GPT, give_own_code
from subjects import WRAPPERS, lockstep_ddp
from timing import interleave

LINK_BYTES_PER_SECOND = 60e9
LINK_LATENCY = 3e-5
BACKWARD_SECONDS = 0.012


def emulated_link(bytes_per_second: float) -> Any:
    """A communication hook that takes as long as a link of the given rate, on a stream of its own."""
    stream = torch.cuda.Stream()
    cycles_per_byte = _cycles_per_second() / bytes_per_second

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would compare annotations with its own
        buffer = bucket.buffer()
        stream.wait_stream(torch.cuda.current_stream())
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[torch.cuda.current_device()])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(buffer.nbytes * cycles_per_byte))
            future.set_result(buffer)
        return future

    return hook


def _cycles_per_second() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)


def wrapped(wrapper: str, module: nn.Module, link: bool, **options: Any) -> nn.Module:
    if wrapper == "alone":
        return module
    make = WRAPPERS[wrapper]()
    if link and wrapper == "lockstep":
        options = {"plan": plan_for_link(module), **options}
    ddp = make(module, **options)
    if link:
        ddp.register_comm_hook(None, emulated_link(LINK_BYTES_PER_SECOND))
    return ddp


def plan_for_link(module: nn.Module) -> Any:
    """The plan that a wrapper chooses itself when it has measured a link like this one (here there is none)."""
    lockstep_ddp()
    from lockstep.ddp import setup
    from lockstep.ddp.compilation import LAUNCH_SECONDS
    from lockstep.plan.link import LinkModel
    from lockstep.plan.overlap import Pace, choose_caps, pace_from_total

    specs = setup.specs_of(setup.trainable_slots(module, set()), set())
    link = LinkModel(LINK_LATENCY, LINK_BYTES_PER_SECOND)
    # The head comes first and takes a quarter of the backward; the embeddings are last and take next to none.
    inner = [spec for spec in specs if not spec.name.startswith(("symbols", "places"))]
    marks = pace_from_total(inner, 0.75 * BACKWARD_SECONDS).ready_seconds
    ready = {spec.name: 0.25 * BACKWARD_SECONDS + marks.get(spec.name, 0.75 * BACKWARD_SECONDS) for spec in specs}
    pace = Pace(ready, BACKWARD_SECONDS)
    return choose_caps(specs, pace, link, launch_seconds=LAUNCH_SECONDS["cuda"]).plan


class CompiledTrainer(Trainer):
    def __init__(
        self,
        wrapper: str,
        mode: str | None = None,
        link: bool = False,
        num_steps: int = 1,
        forced: bool = False,
        hook: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.module = gpt2().to(DEVICE)
        # The same code is compiled for each subject; none may find another's graph, or run out of room for its own.
        give_own_code(self.module)
        self.mode = mode
        self.ddp = wrapped(wrapper, self.module, link)
        change(self.ddp, forced, hook)
        self.model = torch.compile(self.ddp, mode=mode)
        self._set_up(num_steps)
        for _ in range(5):
            self.step()
        synchronize()

    def forward_and_backward(self) -> None:
        if self.mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        super().forward_and_backward()


def step_times(
    subjects: dict[str, dict[str, Any]], num_rounds: int, num_steps: int, with_host: bool = False
) -> dict[str, Any]:
    """Device time per step; ``with_host``, also the host's for forward and backward, in rounds of their own."""
    prepare()
    trainers, notes = {}, {}
    for name, options in subjects.items():
        trainers[name] = CompiledTrainer(num_steps=num_steps, **options)
    for name, trainer in trainers.items():
        if hasattr(trainer.ddp, "explain_compilation"):
            notes[name] = str(trainer.ddp.explain_compilation())
    times = interleave({name: trainer.seconds_per_step for name, trainer in trainers.items()}, num_rounds)
    host = {name: t.host_seconds_per_step for name, t in trainers.items() if not subjects[name].get("link")}
    num_bytes = sum(p.numel() * p.element_size() for p in gpt2().parameters())
    return {
        "times": times,
        "host_times": interleave(host, num_rounds) if with_host else {},
        "notes": notes,
        "link_seconds": num_bytes / LINK_BYTES_PER_SECOND,
    }


def peak_memory(subject: dict[str, Any]) -> int:
    """Peak allocated bytes in the steps of this process after compilation: what training needs."""
    prepare()
    trainer = CompiledTrainer(**subject)
    reset_peak()
    for _ in range(3):
        trainer.step()
    return peak_bytes()


# ---------------------------------------------------------------- gradients


def all_gradients(cases: list[tuple[str | None, bool, str, int]], forced: bool = False) -> list[dict[str, Any]]:
    prepare()
    return [gradients(*case, forced=forced) for case in cases]


def gradients(mode: str | None, autocast: bool, overlap: str, head_width: int, forced: bool) -> dict[str, Any]:
    """Every parameter's gradient against the uncompiled module in fp32: compiled alone, and compiled in the wrapper.

    The wrapper is right when no parameter is further off than twice what compiling alone makes it. The layer norms
    are what a compiler once got wrong when buckets were concatenated in the graph.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    # The second numbers are for trying the code on a CPU.
    symbols, context, num_layers, num_heads = (1024, 256, 4, 8) if IS_GPU else (64, 16, 2, 2)
    base = GPT(symbols, context, num_heads * head_width, num_layers, num_heads).to(DEVICE)
    whole = torch.randint(symbols, (4, context + 1), device=DEVICE)
    mine = whole.chunk(dist.get_world_size())[dist.get_rank()]

    def run(model: nn.Module, module: nn.Module, batch: Tensor, cast: bool) -> dict[str, Tensor]:
        for _ in range(4):
            module.zero_grad()
            if mode is not None:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=cast):
                loss = model(batch)
            loss.backward()
        return {name: p.grad.float().clone() for name, p in module.named_parameters()}

    truth = run(base, base, whole, False)
    found, launched = {}, 0
    for wrapper in ("alone", "lockstep"):
        torch._dynamo.reset()
        module = copy.deepcopy(base)
        # Several buckets in either size of model: with one alone nothing would be launched before the end.
        cap = base.norm.weight.nbytes / 512 if IS_GPU else 0.005
        options = {"bucket_cap_mb": cap, "overlap": overlap} if wrapper == "lockstep" else {}
        model = wrapped(wrapper, module, False, **options)
        change(model, forced and wrapper == "lockstep", hook=False)
        batch = mine if wrapper == "lockstep" else whole
        found[wrapper] = run(torch.compile(model, mode=mode), module, batch, autocast)
        if wrapper == "lockstep":
            launched = num_left_in_graph(model)
    rows = {}
    for name, right in truth.items():
        scale = right.abs().max().item() or 1.0
        rows[name] = [(found[w][name] - right).abs().max().item() / scale for w in ("alone", "lockstep")]
    wrong = {name: row for name, row in rows.items() if not row[1] <= 2 * row[0] + 1e-5}
    worst = max(rows, key=lambda name: rows[name][1])
    return {
        "ok": not wrong and (launched > 1) == (overlap == "graph"),
        "wrong": wrong,
        "worst": [worst, *rows[worst]],
        "num_parameters": len(rows),
        "num_buckets_from_the_graph": launched,
    }
