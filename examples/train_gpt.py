"""Train a small GPT on the characters of a bundled text, on as many ranks as the environment says.

    lockstep run --nproc 2 examples/train_gpt.py       # two ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py  # the same through torch's launcher
    python examples/train_gpt.py                       # a world of one
    lockstep run --nproc 2 examples/train_gpt.py --compile
    lockstep run --nproc 2 examples/train_gpt.py --shard   # the model and its optimizer cut over the ranks
    lockstep run --nproc 2 examples/train_gpt.py --step graph     # the whole step as one program; on a GPU: captured
    lockstep run --nproc 2 --max-restarts 3 examples/train_gpt.py --checkpoint out/checkpoints   # survives kill -9

At the end it prints the plan, how much communication was exposed and a sample of the text the model writes,
and saves an HTML report with the loss curve and one step's timeline per rank.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import lockstep
from lockstep import Timeline, write_report

TEMPERATURE = 0.6  # below 1: the sample keeps to what the model is sure of
DATA = Path(__file__).parent / "data" / "tales.txt"


# The model


class Block(nn.Module):
    """Attention to earlier characters, then a small network at each place; both added to the stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.attention_in(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, num_symbols: int, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.context = context
        self.symbols, self.places = nn.Embedding(num_symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_symbols, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.symbols.weight  # tied: one parameter, used at both ends

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss where targets are given, otherwise the scores of each next symbol."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        scores = self.head(self.norm(self.blocks(self.symbols(inputs) + self.places(places))))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write_text(model: GPT, start: Tensor, num_symbols: int, generator: torch.Generator) -> Tensor:
    """Continue ``start``, one sampled symbol after the other."""
    text = start
    for _ in range(num_symbols):
        scores = model(text[None, -model.context :])[0, -1]
        chances = (scores / TEMPERATURE).softmax(0).cpu()
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator).to(text.device)])
    return text


# The world


def join_world() -> torch.device:
    """Enter the launcher's process group, or a world of one; returns the device this rank computes on."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks:
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


# The run


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character GPT on several ranks.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bucket-cap-mb", type=float, default=1.0, help="size of a bucket of gradients")
    parser.add_argument("--compile", action="store_true", help="compile the model; each bucket leaves inside its graph")
    parser.add_argument("--shard", action="store_true", help="cut the model over the ranks, one unit per block")
    steps = ("auto", "loop", "compiled", "graph", "captured")
    parser.add_argument("--step", choices=steps, default="auto", help="how lockstep.TrainStep runs the step")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints: save there, go on from the latest")
    parser.add_argument("--save-every", type=int, default=25, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt"), help="folder of the report")
    options = parser.parse_args()
    for name in ("steps", "batch", "context", "width", "layers", "heads", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1 is needed")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rise for a few steps, then fall along a cosine to a tenth."""
    warmup = min(20, options.steps // 10 + 1)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


class Reporter:
    """Progress on rank 0: a bar on a terminal, plain lines elsewhere, silence on the other ranks."""

    def __init__(self, num_steps: int, rank: int) -> None:
        console = Console()
        self.num_steps, self.visible, self.fancy = num_steps, rank == 0, rank == 0 and console.is_terminal
        self.every = max(1, num_steps // 20)
        numbers = TextColumn("{task.fields[numbers]}")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), numbers, TimeRemainingColumn())
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("training", total=num_steps, numbers="")

    def showing(self) -> AbstractContextManager[object]:
        return self.progress if self.fancy else nullcontext()

    def step_done(self, num_done: int, loss: float, tokens_per_second: float) -> None:
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        if self.fancy:
            self.progress.update(self.task, completed=num_done, numbers=numbers)
        elif self.visible and (num_done % self.every == 0 or num_done in (1, self.num_steps)):
            print(f"step {num_done:4d}/{self.num_steps}  {numbers}", flush=True)


def resume(
    ddp: Any,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    losses: Tensor,
    options: argparse.Namespace,
) -> int:
    """Go on from the latest checkpoint, if there is one; the number of steps that are done."""
    if not options.checkpoint:
        return 0
    own = {"data": generator}
    loaded = lockstep.checkpoint.load(options.checkpoint, ddp, optimizer, per_rank=own, missing_ok=True, fallback=True)
    if loaded is None:
        return 0
    if "losses" in loaded.per_rank:  # a rank that is new has none
        num_kept = min(loaded.step, len(losses))
        losses[:num_kept] = loaded.per_rank["losses"][:num_kept]
    if dist.get_rank() == 0:
        print(f"resumed from {loaded.path}, after step {loaded.step}", flush=True)
    return loaded.step


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


def train(ddp: Any, called: nn.Module, data: Tensor, options: argparse.Namespace) -> Tensor:
    """The training loop; the loss of each step, as the mean over ranks.  A run that is stopped has fewer of them.

    ``called`` is the model, perhaps compiled.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr, weight_decay=0.05)
    # Each rank draws other windows of the text: that is the data parallelism.
    generator = torch.Generator().manual_seed(options.seed + 1 + rank)
    offsets = torch.arange(options.context)
    losses = torch.zeros(options.steps, device=data.device)
    train_step = lockstep.TrainStep(called, optimizer, loss_of, clip_norm=1.0, mode=options.step)
    first = resume(ddp, optimizer, generator, losses, options)
    reporter = Reporter(options.steps, rank)
    with reporter.showing():
        for step in range(first, options.steps):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options)
            starts = torch.randint(len(data) - options.context, (options.batch, 1), generator=generator)
            windows = (starts + offsets).to(data.device)
            loss = losses[step] = train_step((data[windows], data[windows + 1]))
            num_tokens = world * options.batch * options.context
            reporter.step_done(step + 1, loss.item(), num_tokens / (time.perf_counter() - began))
            ends = lockstep.stopping()  # the same answer on all ranks, at the same step
            if options.checkpoint and (ends or (step + 1) % options.save_every == 0):
                own = {"data": generator, "losses": losses}
                lockstep.checkpoint.save(options.checkpoint, ddp, optimizer, step=step + 1, per_rank=own, keep=2)
            if ends:
                losses = losses[: step + 1]
                break
    lockstep.checkpoint.wait()
    if rank == 0:
        print(f"\n{train_step.explain()}")
    dist.all_reduce(losses)
    return losses / world


def gather_timelines(own: Timeline) -> list[Timeline]:
    """Every rank's timeline, on rank 0; nothing on the others."""
    gathered: list[str | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own.to_json(), gathered)
    return [Timeline.from_json(text) for text in gathered or [] if text is not None]


def describe_exposed(timelines: list[Timeline]) -> str:
    lines = []
    for timeline in timelines:
        if not timeline.steps:
            lines.append(f"rank {timeline.rank}: all steps were done before")
            continue
        exposed = median(step.exposed_seconds for step in timeline.steps)
        busy = median(step.seconds("forward") + step.seconds("backward") for step in timeline.steps)
        lines.append(
            f"rank {timeline.rank}: {1e3 * exposed:.2f} ms of {1e3 * busy:.1f} ms forward and backward"
            f" ({100 * exposed / busy if busy else 0:.1f} %)"
        )
    return "\n".join(lines)


def leave_early(num_done: int, options: argparse.Namespace) -> None:
    """The job was stopped; say from where it can go on."""
    if dist.get_rank() == 0:
        kept = f"; saved to {options.checkpoint}" if options.checkpoint else ""
        print(f"stopped after step {num_done}{kept}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def wrap(model: GPT, options: argparse.Namespace) -> Any:
    """The model as it is trained: a copy on every rank, or a part of it on each."""
    if options.shard:
        return lockstep.fully_shard(model, units="auto")
    # With the layout of the run before, sums have the same order, and so the same bits.
    plan = lockstep.checkpoint.plan_of(options.checkpoint, fallback=True) if options.checkpoint else None
    return lockstep.DistributedDataParallel(model, bucket_cap_mb=options.bucket_cap_mb, plan=plan)


def main() -> None:
    options = read_options()
    device = join_world()
    rank, world = dist.get_rank(), dist.get_world_size()
    text = DATA.read_text(encoding="ascii")
    symbols = sorted(set(text))
    number = {symbol: index for index, symbol in enumerate(symbols)}
    data = torch.tensor([number[symbol] for symbol in text], device=device)

    torch.manual_seed(options.seed)
    model = GPT(len(symbols), options.context, options.width, options.layers, options.heads).to(device)
    ddp = wrap(model, options)
    ddp.timeline.precise = True  # for the report: when each bucket's reduction really ended
    called = torch.compile(ddp) if options.compile and options.shard else ddp
    if options.compile and not options.shard:
        ddp.compile()
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    num_parameters = sum(p.numel() for p in model.parameters())
    if rank == 0:
        print(f"{num_parameters:,} parameters, {len(text):,} characters, {ranks} on {device.type}")

    losses = train(ddp, called, data, options)
    if len(losses) < options.steps:
        leave_early(len(losses), options)
        return
    timelines = gather_timelines(ddp.timeline)
    start = torch.tensor([number[symbol] for symbol in "\n\n"], device=device)
    generator = torch.Generator().manual_seed(options.seed)
    if rank == 0 or options.shard:  # all ranks have to gather the parameters, so all of them write the same
        sample = write_text(model, start, 400, generator)
    if rank == 0:
        report = write_report(
            options.out / "report.html",
            losses=losses.tolist(),
            timelines=timelines,
            plan_text=str(ddp.plan),
            title=f"train_gpt: {num_parameters:,} parameters, {ranks}, {options.steps} steps",
        )
        print(f"\nPlan\n{ddp.plan}")
        if options.compile:
            print(f"\nCompiled\n{lockstep.explain(ddp)}")
        print(f"\nExposed communication, median per step\n{describe_exposed(timelines)}")
        print("\nThe model writes\n" + "".join(symbols[i] for i in sample.tolist()).strip())
        print(f"\nReport: {report.resolve()}")
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads still let go of Python objects; a regular exit right now may abort


if __name__ == "__main__":
    main()
