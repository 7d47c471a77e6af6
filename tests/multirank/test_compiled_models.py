"""Models of many kinds, compiled: gradients of the uncompiled single process, and every bucket from the graph.

Each model trains for several steps on several ranks and is compared, parameter by parameter and step by step, with
the plain module on the whole batch.  A compiled model whose buckets were all left to the hooks would pass that too, so
every test also says how many graphs there are and which buckets came out of them.

A limit of torch 2.13: flex_attention refuses inputs that require gradients on the CPU, so its model detaches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from multirank.compare import assert_close, assert_identical, gradients_of, state_of
from multirank.harness import inductor_cache, lockstep_only, run_ranks
from multirank.models import (
    CASES,
    NUM_SAMPLES,
    SEQUENCE,
    VOCABULARY,
    Batch,
    Case,
    ConvNet,
    next_token_loss,
    reference_backward,
    regression_batch,
    shard,
    squared_error,
    token_batch,
)
from multirank.test_compiled_features import Pair, count_graph_windows

pytestmark = [pytest.mark.multirank, lockstep_only]

NUM_STEPS = 4
PRELOAD = (
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.debugging",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)
# bfloat16 keeps 8 bits, and compilers fuse what autocast rounds in between.
BRAIN = {"dtype": torch.float32, "tolerance": 3e-2, "bucket_cap_mb": 0.00015}


# ---------------------------------------------------------------- models


class Halves(nn.Module):
    """Two linear layers with something in between, which subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Halves):
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False, **self.options)
        return h


class SelectivelyCheckpointed(Checkpointed):
    options = {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}


class FlexAttention(nn.Module):
    """The operator is in the graph, and what it attends to is detached: on the CPU it has no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.body(self.token(tokens))
        q = h.detach().unflatten(-1, (2, -1)).transpose(1, 2)
        attended = flex_attention(q, q, q, score_mod=nearer_is_better)
        return self.head(torch.tanh(h + attended.transpose(1, 2).flatten(2)))


def nearer_is_better(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - (query - key).abs()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.5 * x * x * gradient  # not the derivative, so that autograd's own would be noticed


class WithFunction(Halves):
    def between(self, h: Tensor) -> Tensor:
        return Cubed.apply(torch.tanh(h))


class WithCond(Halves):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:  # type: ignore[override]
        weight, h = self.first.weight, self.first(x)
        h = torch.cond(flag[0] > 0, lambda h: (h @ weight).sin(), lambda h: (h @ weight).cos(), (h,))
        return self.second(h @ weight.t())


class MutatesBuffers(Halves):
    """Counts its calls in a buffer and lets the count into the result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("shift", torch.zeros(16))

    def between(self, h: Tensor) -> Tensor:
        self.num_calls += 1
        self.shift = self.shift * 0.5 + self.num_calls
        return torch.tanh(h + 0.01 * self.shift)


class Peculiar(Halves):
    """The same module twice, a static method, and an attribute that the forward sets."""

    def __init__(self) -> None:
        super().__init__()
        twice = nn.Linear(16, 16)
        self.body = nn.Sequential(twice, nn.Tanh(), twice)
        self.last_hidden: Tensor | None = None

    @staticmethod
    def squash(h: Tensor) -> Tensor:
        return torch.sigmoid(h)

    def between(self, h: Tensor) -> Tensor:
        self.last_hidden = self.squash(self.body(h))
        return self.last_hidden


class AnyLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 16)
        self.position = nn.Embedding(SEQUENCE + 4, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(torch.tanh(self.body(h)))


class RowsChosenByData(Halves):
    """How many rows pass the extra layer is known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)

    def between(self, h: Tensor) -> Tensor:
        rows = (h[:, 0] > 0).nonzero().squeeze(1)
        return torch.tanh(h.index_add(0, rows, self.extra(h[rows])))


class WidthChosenByData(Halves):
    """How much of a table is used is a number in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 16))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:  # type: ignore[override]
        num_rows = int((flag[0] + 3).item())
        torch._check(num_rows >= 1)
        torch._check(num_rows <= 9)
        return self.second(torch.tanh(self.first(x) + self.table.narrow(0, 0, num_rows).sum(0)))


class Breaks(Halves):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


class BreaksWithoutGrad(Halves):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            scale = h.abs().mean(1, keepdim=True)
            torch._dynamo.graph_break()
            scale = scale + self.second.weight.abs().mean()
        return self.second(h / scale)


class InAutocast(Halves):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(self.first(x))
            if self.breaks:
                torch._dynamo.graph_break()
            return self.second(h).float()


class BreaksInAutocast(InAutocast):
    breaks = True


class Echo(Halves):
    """Gives its input back where it is asked to, or a constant: a graph with nothing in it."""

    def forward(self, x: Tensor, echo: str = "") -> Tensor:  # type: ignore[override]
        if echo:
            return x if echo == "input" else torch.ones(3)
        return super().forward(x)


class PartlyFrozen(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.body.requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.body(h))


def channels_last() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)


# ---------------------------------------------------------------- batches and losses


def flagged_batch(generator: torch.Generator) -> Batch:
    """All samples of a batch have the same flag; it differs from step to step."""
    flag = generator.initial_seed() % 3 - 1
    return {**regression_batch(generator), "flag": torch.full((NUM_SAMPLES,), flag)}


def batch_of_some_length(generator: torch.Generator) -> Batch:
    length = 4 + generator.initial_seed() % 5
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def flagged_squared_error(module: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(module(batch["x"], batch["flag"]), batch["y"])


def channels_last_loss(module: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].to(memory_format=torch.channels_last)
    return functional.cross_entropy(module(x), batch["y"])


def autocast_squared_error(module: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.mse_loss(module(batch["x"]).float(), batch["y"])


# ---------------------------------------------------------------- what is expected of each


@dataclass(frozen=True)
class Subject:
    case: Case
    fullgraph: bool = True
    num_graphs: int = 1
    bucket_cap_mb: float = 0.001
    num_steps: int = NUM_STEPS
    dtype: torch.dtype = torch.float64
    tolerance: float | None = None
    compile_options: dict[str, Any] = field(default_factory=dict)
    dynamo_settings: dict[str, Any] = field(default_factory=dict)


def regression(build: Callable[[], nn.Module], loss: Any = squared_error, **options: Any) -> Subject:
    return Subject(Case(build.__name__, build, regression_batch, loss), **options)


CNN = Case("channels_last", channels_last, CASES["cnn_batch_statistics"].make_batch, channels_last_loss)
CNN = replace(CNN, reference_on_whole_batch=False)
LENGTHS = Case("lengths", AnyLength, batch_of_some_length, next_token_loss)
SUBJECTS = {
    "mlp": Subject(CASES["mlp"]),
    "gpt": Subject(CASES["gpt_tied"], bucket_cap_mb=0.005),
    "cnn": Subject(CNN, bucket_cap_mb=0.0005),
    "bert": Subject(CASES["bert"], bucket_cap_mb=0.01),
    "llama": Subject(CASES["llama"], bucket_cap_mb=0.01, tolerance=CASES["llama"].float64_tolerance),
    "checkpoint": regression(Checkpointed),
    "selective_checkpoint": regression(SelectivelyCheckpointed),
    "flex_attention": Subject(Case("flex", FlexAttention, token_batch, next_token_loss), bucket_cap_mb=0.004),
    "autograd_function": regression(WithFunction),
    "cond": Subject(Case("cond", WithCond, flagged_batch, flagged_squared_error)),
    "mutated_buffers": regression(MutatesBuffers),
    "peculiar": regression(Peculiar),
    # Two graphs for five lengths: dynamo traces a second time where it finds a float that it made symbolic in vain.
    "dynamic": Subject(LENGTHS, num_steps=6, num_graphs=2, compile_options={"dynamic": True}),
    "automatic_dynamic": Subject(LENGTHS, num_steps=6, num_graphs=2),
    "rows_by_data": regression(RowsChosenByData, dynamo_settings={"capture_dynamic_output_shape_ops": True}),
    "width_by_data": Subject(
        Case("width", WidthChosenByData, flagged_batch, flagged_squared_error),
        dynamo_settings={"capture_scalar_outputs": True},
    ),
    "breaks": regression(Breaks, fullgraph=False, num_graphs=2, bucket_cap_mb=0.0003),
    "breaks_without_grad": regression(BreaksWithoutGrad, fullgraph=False, num_graphs=2, bucket_cap_mb=0.0003),
    "breaks_in_autocast": regression(BreaksInAutocast, fullgraph=False, num_graphs=2, **BRAIN),
    "autocast_inside": regression(InAutocast, **BRAIN),
    "autocast_outside": regression(Halves, autocast_squared_error, **BRAIN),
    "partly_frozen": regression(PartlyFrozen),
}


# ---------------------------------------------------------------- training


def train(names: list[str], backend: str | None, overlap: str | None = None) -> dict[str, dict[str, Any]]:
    """Train each model on this rank's shards; ``backend`` None trains without a compiler."""
    return {name: train_one(SUBJECTS[name], backend, overlap) for name in names}


def train_one(subject: Subject, backend: str | None, overlap: str | None) -> dict[str, Any]:
    import lockstep

    torch._dynamo.reset()
    ddp = lockstep.DDP(subject.case.module(subject.dtype), bucket_cap_mb=subject.bucket_cap_mb, overlap=overlap)
    counts = count_graph_windows(ddp)
    model: Any = ddp
    if backend is not None:
        model = torch.compile(ddp, backend=backend, fullgraph=subject.fullgraph, **subject.compile_options)

    def backward(batch: Batch) -> None:
        subject.case.loss(model, shard(batch, dist.get_rank(), dist.get_world_size())).backward()

    with torch._dynamo.config.patch(subject.dynamo_settings):
        gradients, states = run_steps(subject, ddp, backward)
    records = ddp._graphs
    return {
        "gradients": gradients,
        "states": states,
        "strategies": [record.strategy for record in records],
        "left_out": {name: why for record in records for name, why in record.left_out.items()},
        "clean_windows": [counts[bucket.slots[0].name] for bucket in ddp.reducer.buckets],
    }


def run_steps(subject: Subject, module: nn.Module, backward: Callable[[Batch], Any]) -> tuple[list[Any], list[Any]]:
    """Gradients and states after each backward."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    gradients, states = [], []
    for step in range(subject.num_steps):
        # Both ways to clear gradients, since one of them leaves gradients to be folded into the next ones.
        optimizer.zero_grad(set_to_none=step != 2)
        backward(subject.case.batch(step, subject.dtype))
        gradients.append(gradients_of(module))
        states.append(state_of(module))
        optimizer.step()
    return gradients, states


def check(name: str, values: list[dict[str, Any]], from_graph: bool = True) -> None:
    """``values`` by rank: gradients right on every rank in every step, and every bucket out of a graph."""
    subject, world = SUBJECTS[name], len(values)
    plain = subject.case.module(subject.dtype)
    expected, _ = run_steps(subject, plain, lambda batch: reference_backward(subject.case, plain, batch, world))
    assert any(g is not None and g.abs().max() > 1e-3 for g in expected[-1].values()), "the reference is dead"
    for rank, value in enumerate(values):
        assert_identical(value["gradients"], values[0]["gradients"], f"{name}: gradients of rank {rank} and rank 0")
        for step, gradients in enumerate(value["gradients"]):
            assert_close(gradients, expected[step], f"{name}: rank {rank}, step {step}", subject.tolerance)
        assert len(value["clean_windows"]) > 1, f"{name}: one bucket only, which shows little"
        assert value["strategies"] == [("graph" if from_graph else "none")] * subject.num_graphs, name
        assert value["left_out"] == {}, name
        num_windows = subject.num_steps if from_graph else 0
        assert value["clean_windows"] == [num_windows] * len(value["clean_windows"]), name


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_gradients_come_out_of_the_graph_and_are_right(name: str) -> None:
    values = run_ranks(2, train, [name], "aot_eager", preload=PRELOAD)
    check(name, [value[name] for value in values])


@pytest.mark.parametrize("world", [1, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_worlds(world: int) -> None:
    names = ["mlp", "gpt"]
    values = run_ranks(world, train, names, "aot_eager", preload=PRELOAD)
    for name in names:
        check(name, [value[name] for value in values])


INDUCTOR = [
    ["gpt", "cnn"],
    ["dynamic", "checkpoint"],
    ["autocast_inside", "breaks", "rows_by_data"],
    pytest.param(["mlp", "mutated_buffers", "autograd_function"], marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("names", INDUCTOR, ids="-".join)
def test_inductor(names: list[str]) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": inductor_cache()}
    values = run_ranks(2, train, names, "inductor", env=env, preload=PRELOAD, limit_s=500)
    for name in names:
        check(name, [value[name] for value in values])


def test_without_overlap_the_hooks_reduce() -> None:
    values = run_ranks(2, train, ["mlp"], "aot_eager", "none", preload=PRELOAD)
    check("mlp", [value["mlp"] for value in values], from_graph=False)


@pytest.mark.parametrize("name", ["cnn", "mutated_buffers"])
def test_buffers_are_those_of_the_uncompiled_wrapper(name: str) -> None:
    compiled, eager = (run_ranks(2, train, [name], backend, preload=PRELOAD) for backend in ("aot_eager", None))
    for rank in range(2):
        for step, state in enumerate(eager[rank][name]["states"]):
            assert_close(compiled[rank][name]["states"][step], state, f"{name}: state of rank {rank} in step {step}")


def freeze_and_unfreeze() -> list[dict[str, int]]:
    pair = Pair(PartlyFrozen, bucket_cap_mb=0.0003)
    delivered = []
    for phase, trains_body in enumerate([False, True, False, True]):
        for module in (pair.module, pair.plain):
            module.body.requires_grad_(trains_body)
        delivered.append(pair.steps(3, first=3 * phase).delivered())
    return delivered


def test_freezing_and_unfreezing_between_steps() -> None:
    for without_body, with_body, frozen_again, back in run_ranks(2, freeze_and_unfreeze, preload=PRELOAD):
        assert without_body == dict.fromkeys(["first.weight", "first.bias", "second.weight", "second.bias"], 3)
        assert set(with_body.values()) == {3, 6}
        assert len(with_body) == 6
        assert frozen_again["second.weight"] == 9, frozen_again
        assert back["second.weight"] == 12, back


def train_around_empty_graphs() -> list[dict[str, int]]:
    pair = Pair(Echo, bucket_cap_mb=0.0003)
    delivered = []
    for phase, echo in enumerate(["input", "constant", "input"]):
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        output = pair.model(x, echo=echo)
        if echo == "input":
            output.sum().backward()
            assert torch.equal(x.grad, torch.ones_like(x))
        else:
            assert torch.equal(output, torch.ones(3))
        delivered.append(pair.steps(2, first=2 * phase).delivered())
    return delivered


def test_an_empty_graph_leaves_the_others_alone() -> None:
    for delivered in run_ranks(2, train_around_empty_graphs, preload=PRELOAD):
        assert [set(d.values()) for d in delivered] == [{2}, {4}, {6}]
