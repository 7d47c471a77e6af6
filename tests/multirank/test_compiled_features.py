"""What a wrapped model can do uncompiled it can do compiled, with its buckets out of the compiled backward.

Every check trains a compiled wrapped model next to a twin, and compares gradients parameter by parameter after every
backward.  The twin is the plain module on the whole batch or, where the ranks' own numbers matter (compression, uneven
inputs), an uncompiled wrapper.  ``delivered`` says whether the buckets really came out of a graph.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

from multirank.compare import assert_close, assert_identical, gradients_of, state_of
from multirank.harness import lockstep_only, run_ranks
from multirank.models import CASES, MLP, Block, Branches, Case, regression_batch, shard, squared_error

pytestmark = [pytest.mark.multirank, lockstep_only]

PRELOAD = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging")
DTYPE = torch.float64
ONE_EACH = 0.00001  # MiB, so small that every parameter has a bucket of its own


class Pair:
    """A compiled wrapped module and its twin."""

    def __init__(
        self,
        build: Callable[[], nn.Module] = MLP,
        way: str = "wrap_then_compile",
        *,
        eager_twin: bool = False,
        compile_options: dict[str, Any] | None = None,
        dtype: torch.dtype = DTYPE,
        **options: Any,
    ) -> None:
        import lockstep

        self.case = Case("", build, regression_batch, squared_error)
        self.dtype = dtype
        self.module, self.plain = self.case.module(dtype), self.case.module(dtype)
        options = {"bucket_cap_mb": 0.001, **options}
        compile_options = {"backend": backend(), "fullgraph": True, **(compile_options or {})}
        self.ddp, self.model = wrap_and_compile(way, self.module, options, compile_options)
        self.eager_twin = eager_twin
        self.twin: Any = lockstep.DDP(self.plain, **options) if eager_twin else self.plain

    def losses(self, step: int, scale: float = 1.0) -> list[Tensor]:
        batch = self.case.batch(step, self.dtype)
        mine = shard(batch, dist.get_rank(), dist.get_world_size())
        theirs = mine if self.eager_twin else batch
        return [scale * self.case.loss(self.model, mine), scale * self.case.loss(self.twin, theirs)]

    def backward(self, step: int, scale: float = 1.0) -> None:
        for loss in self.losses(step, scale):
            loss.backward()

    def zero(self, step: int) -> None:
        for module in (self.module, self.plain):
            module.zero_grad(set_to_none=step % 3 != 2)

    def compare(self, step: int, tolerance: float | None = None) -> None:
        gradients = {name.replace("_orig_mod.", ""): g for name, g in gradients_of(self.module).items()}
        assert_close(gradients, gradients_of(self.plain), f"step {step}", tolerance)

    def descend(self) -> None:
        for module in (self.module, self.plain):
            torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05).step()

    def step(self, step: int, tolerance: float | None = None) -> None:
        self.zero(step)
        self.backward(step)
        self.compare(step, tolerance)
        self.descend()

    def steps(self, num: int, first: int = 0, tolerance: float | None = None) -> Pair:
        for step in range(first, first + num):
            self.step(step, tolerance)
        return self

    def delivered(self) -> dict[str, int]:
        """For each parameter, how many windows in a row its bucket came out of a graph alone."""
        windows = {slot.name: b.num_clean_windows for b in self.ddp.reducer.buckets for slot in b.slots}
        return {name.replace("_orig_mod.", ""): num for name, num in windows.items()}

    def require_delivered(self, num: int, *names: str) -> None:
        delivered = self.delivered()
        assert len(self.ddp.reducer.buckets) > 1
        left = {name: delivered[name] for name in names or delivered if delivered[name] != num}
        assert not left, f"expected {num} windows out of a graph: {left}"


CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def backend() -> str:
    return os.environ.get("LOCKSTEP_TEST_COMPILER", "aot_eager")


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ---------------------------------------------------------------- the ways to compile


WHOLE = ["wrap_then_compile", "compile_then_wrap", "compile_in_place", "compile_a_caller"]
BY_BLOCK = ["blocks_then_wrap", "wrap_then_blocks", "replaced_blocks"]


def wrap_and_compile(way: str, module: Any, options: dict[str, Any], how: dict[str, Any]) -> tuple[Any, Any]:
    """The wrapper, and what to call."""
    import lockstep

    if way == "blocks_then_wrap":
        for block in module.layers:
            block.compile(**how)
    elif way == "replaced_blocks":
        for index, block in enumerate(module.layers):
            module.layers[index] = torch.compile(block, **how)
    ddp = lockstep.DDP(torch.compile(module, **how) if way == "compile_then_wrap" else module, **options)
    if way == "wrap_then_compile":
        return ddp, torch.compile(ddp, **how)
    if way == "compile_a_caller":
        # The wrapper's own frame is left to Python, which is a break in a function around it.
        return ddp, torch.compile(lambda *args: ddp(*args) * 1.0, **{**how, "fullgraph": False})
    if way == "compile_in_place":
        ddp.compile(**how)
    elif way == "wrap_then_blocks":
        for block in module.layers:
            block.compile(**how)
    return ddp, ddp


class Stack(nn.Module):
    """Blocks of one class, which share compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.squeeze(1))


def every_way(names: list[str], build: Callable[[], nn.Module], cap: float) -> None:
    for name in names:
        torch._dynamo.reset()
        pair = Pair(build, name, bucket_cap_mb=cap).steps(4)
        compiled = [n for n in pair.delivered() if build is MLP or n.startswith("layers")]
        pair.require_delivered(4, *compiled)


def test_every_way_to_compile_the_whole() -> None:
    run_ranks(2, every_way, WHOLE, MLP, 0.001, preload=PRELOAD)


def test_every_way_to_compile_blocks() -> None:
    run_ranks(2, every_way, BY_BLOCK, Stack, ONE_EACH, preload=PRELOAD)


# ---------------------------------------------------------------- accumulation


def accumulate(view: bool | None) -> None:
    pair = Pair(gradient_as_bucket_view=view).steps(1)
    before = num_graphs()
    for window, num_micro_steps in enumerate([1, 4, 8, 4]):
        pair.zero(window)
        objects: set[int] = set()
        for micro_step in range(num_micro_steps):
            is_last = micro_step == num_micro_steps - 1
            with contextlib.nullcontext() if is_last else pair.ddp.no_sync():
                pair.backward(10 * window + micro_step, 1 / num_micro_steps)
            objects |= {id(p.grad) for p in pair.module.parameters()}
        pair.compare(window)
        assert len(objects) == 6, "the tensor in .grad was replaced"
        pair.descend()
    assert num_graphs() == before, "no_sync compiled something anew"
    pair.require_delivered(5)
    if view is True:
        assert all(p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in list(pair.module.parameters())[-2:])
    if view is False:
        assert all(p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in pair.module.parameters())


@check
def accumulate_views() -> None:
    for view in (None, True, False):
        accumulate(view)


@check
def leave_gradients() -> None:
    """What lies in .grad from the step before is folded in, once."""
    pair = Pair().steps(1)
    for step in range(4):
        pair.backward(step)
        pair.compare(step)
    pair.require_delivered(5)


@check
def step_in_no_sync() -> None:
    pair = Pair().steps(2)
    with pair.ddp.no_sync():
        pair.losses(2)[0].backward()
    with pytest.warns(UserWarning, match="layers"):
        torch.optim.SGD(pair.module.parameters(), lr=0.0).step()


# ---------------------------------------------------------------- communication hooks
# Torch refuses annotations that are strings, which they all are in this file; so the hook has none.


def noting_hook(nodes, bucket):
    """A user's hook, which says which node of the backward it runs in."""
    node = torch._C._current_autograd_node()
    nodes.append(None if node is None else node.name())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, random_seed=3
    )


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "power": (power_state, powerSGD_hook.powerSGD_hook),
    "user": (list, noting_hook),
}


@check
def comm_hooks() -> None:
    for name, (make_state, hook) in HOOKS.items():
        pair = Pair(eager_twin=True, dtype=torch.float32)
        states = [make_state(), make_state()]
        pair.ddp.register_comm_hook(states[0], hook)
        pair.twin.register_comm_hook(states[1], hook)
        pair.steps(6)
        pair.require_delivered(6)
        if name == "user":
            assert len(states[0]) == 6 * len(pair.ddp.reducer.buckets)
            assert set(states[0]) == {"CompiledFunctionBackward"}, "the hook ran outside of the compiled backward"


# ---------------------------------------------------------------- options of the wrapper


@check
def static_graph() -> None:
    """The first window only watches."""
    Pair(static_graph=True).steps(4).require_delivered(3)


class OnOneRank(Branches):
    """Rank 1 passes the side branch, rank 0 does not."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.stem(x))
        return self.head(h + self.side(h) if dist.get_rank() == 1 else h)


@check
def unused_on_one_rank() -> None:
    pair = Pair(OnOneRank, eager_twin=True, find_unused_parameters=True, bucket_cap_mb=ONE_EACH).steps(4)
    pair.require_delivered(4, "head.weight", "stem.weight")
    assert pair.module.never.weight.grad is None
    assert pair.module.side[0].weight.grad is not None


@check
def unused_by_data() -> None:
    """Each rank breaks its graph at other places."""
    case = CASES["branches"]
    pair = Pair(Branches, find_unused_parameters=True, compile_options={"fullgraph": False})
    pair.case = case
    pair.steps(4)


@check
def delayed_parameters() -> None:
    pair = Pair()
    names, parameters = ["layers.2.weight", "layers.2.bias"], dict(pair.module.named_parameters())
    options = {
        "bucket_cap_mb": 0.001,
        "delay_all_reduce_named_params": [(name, parameters[name]) for name in names],
        "param_to_hook_all_reduce": parameters["layers.0.weight"],
    }
    how = {"backend": backend(), "fullgraph": True}
    pair.ddp, pair.model = wrap_and_compile("wrap_then_compile", pair.module, options, how)
    pair.steps(4).require_delivered(4, "layers.4.weight")


@check
def ignored_parameters() -> None:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    def build() -> nn.Module:
        module = MLP()
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight"])
        return module

    pair = Pair(build, eager_twin=True).steps(4)
    assert "layers.2.weight" not in pair.delivered()
    pair.require_delivered(4)


@check
def mixed_precision() -> None:
    """It reduces in another dtype than the graph has, so the hooks do it."""
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pair = Pair(eager_twin=True, dtype=torch.float32, mixed_precision=config, compile_options={"fullgraph": False})
    pair.steps(4, tolerance=3e-2)


@check
def optimizer_in_backward() -> None:
    import lockstep

    module, plain = CASES["mlp"].module(DTYPE), CASES["mlp"].module(DTYPE)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    ddp = lockstep.DDP(module, bucket_cap_mb=0.001)
    model = torch.compile(ddp, backend=backend(), fullgraph=True)
    for step in range(4):
        batch = CASES["mlp"].batch(step, DTYPE)
        plain.zero_grad()
        squared_error(model, shard(batch, dist.get_rank(), dist.get_world_size())).backward()
        squared_error(plain, batch).backward()
        torch.optim.SGD(plain.parameters(), lr=0.05).step()
        assert_close(state_of(module), state_of(plain), f"parameters after step {step}")
        assert all(p.grad is None for p in module.parameters())
    assert all(bucket.num_clean_windows for bucket in ddp.reducer.buckets)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.rows((x[:, 0] > 0).long() * 4 + dist.get_rank()))


@check
def sparse_embedding() -> None:
    Pair(Sparse, eager_twin=True, bucket_cap_mb=ONE_EACH, compile_options={"fullgraph": False}).steps(4)


@check
def logging_data() -> None:
    data = Pair().steps(4).ddp._get_ddp_logging_data()
    assert data["iteration"] == 3
    assert data["world_size"] == 2
    assert data["num_parameter_tensors"] == 6
    for key in ("avg_backward_compute_time", "avg_backward_comm_time", "avg_forward_compute_time"):
        assert 0 < data[key] < 60e9, (key, data[key])


@check
def uneven_inputs() -> None:
    pair = Pair(eager_twin=True)
    num_batches = 3 if dist.get_rank() == 0 else 5
    for ddp, model in ((pair.ddp, pair.model), (pair.twin, pair.twin)):
        with ddp.join():
            for step in range(num_batches):
                ddp.zero_grad(set_to_none=step != 2)
                batch = pair.case.batch(step, DTYPE)
                squared_error(model, shard(batch, dist.get_rank(), dist.get_world_size())).backward()
                torch.optim.SGD(ddp.parameters(), lr=0.05).step()
    assert_close(state_of(pair.module), state_of(pair.plain), "parameters")
    if dist.get_rank() == 1:
        pair.compare(5)
        pair.require_delivered(5)


# ---------------------------------------------------------------- what users do with gradients


@check
def local_gradients_by_autograd_grad() -> None:
    pair = Pair().steps(2)
    parameters = list(pair.module.parameters())
    mine = shard(pair.case.batch(7, DTYPE), dist.get_rank(), dist.get_world_size())
    pair.zero(0)
    local = torch.autograd.grad(squared_error(pair.model, mine), parameters)
    expected = torch.autograd.grad(squared_error(pair.plain, mine), list(pair.plain.parameters()))
    for ours, theirs in zip(local, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in parameters)
    pair.steps(3, first=3).require_delivered(5)


@check
def hooks_on_parameters() -> None:
    pair = Pair()
    seen: list[Tensor] = []
    handle = pair.module.layers[2].weight.register_hook(lambda g: seen.append(g.clone()))
    mine = shard(pair.case.batch(0, DTYPE), dist.get_rank(), dist.get_world_size())
    (expected,) = torch.autograd.grad(squared_error(pair.plain, mine), [pair.plain.layers[2].weight])
    pair.steps(3)
    torch.testing.assert_close(seen[0], expected)
    assert len(seen) == 3
    pair.require_delivered(3, "layers.4.weight")
    handle.remove()
    pair.steps(3, first=3).require_delivered(3, "layers.2.weight", "layers.0.weight")


def penalty(module: nn.Module) -> Tensor:
    return 0.3 * module.layers[2].weight.pow(2).sum() + 0.1 * module.layers[4].bias.pow(2).sum()


def train_with_penalty(first: int, ranks: tuple[int, ...]) -> None:
    """A part of the loss that the graph knows nothing of, on some ranks."""
    pair = Pair()
    share = len(ranks) / dist.get_world_size()
    for step in range(6):
        pair.zero(step)
        ours, theirs = pair.losses(step)
        if step >= first:
            ours = ours + penalty(pair.module) if dist.get_rank() in ranks else ours
            theirs = theirs + share * penalty(pair.plain)
        ours.backward()
        theirs.backward()
        pair.compare(step)
        pair.descend()
    pair.require_delivered(6, "layers.0.weight")


@check
def penalty_from_the_first_step() -> None:
    train_with_penalty(0, (0, 1))


@check
def penalty_from_the_third_step() -> None:
    train_with_penalty(2, (0, 1))


@check
def penalty_on_one_rank() -> None:
    train_with_penalty(2, (1,))


# ---------------------------------------------------------------- several forwards, backwards and models


@check
def two_forwards_one_backward() -> None:
    pair = Pair()
    for step in range(4):
        pair.zero(step)
        for first, second in zip(pair.losses(step), pair.losses(step + 20), strict=True):
            (first + 0.5 * second).backward()
        pair.compare(step)
        pair.descend()


@check
def two_backwards_of_one_forward() -> None:
    pair = Pair()
    for step in range(4):
        pair.zero(step)
        for loss in pair.losses(step):
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        pair.compare(step)
        pair.descend()
    pair.require_delivered(8)


@check
def two_models_in_turn() -> None:
    """Of one class, so that they share compiled code; one's output goes into the other's loss."""
    one, two = Pair(), Pair()
    for step in range(4):
        one.step(step)
        two.step(step + 10)
    assert num_graphs() == 1
    for pair in (one, two):
        pair.require_delivered(4)
    for step in range(3):  # both in one backward
        for pair in (one, two):
            pair.zero(step)
        for first, second in zip(one.losses(step), two.losses(step), strict=True):
            (first * 2 + second).backward()
        for pair in (one, two):
            pair.compare(step)
            pair.descend()
    for pair in (one, two):
        pair.require_delivered(7)


class SharedAcrossBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x))
        torch._dynamo.graph_break()
        return self.head(self.shared(h))


@check
def shared_by_two_graphs() -> None:
    for cap in (ONE_EACH, 1.0):
        pair = Pair(SharedAcrossBreak, bucket_cap_mb=cap, compile_options={"fullgraph": False}).steps(4)
        assert len(pair.ddp.backward.graphs) % 2 == 0
        if cap == ONE_EACH:
            pair.require_delivered(4, "head.weight")


@check
def failing_backward() -> None:
    """The hook on the model's input fails after the graph has delivered."""
    pair = Pair().steps(2)

    def fail(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")

    for where in ("before", "after"):
        pair.zero(0)
        mine = shard(pair.case.batch(5, DTYPE), dist.get_rank(), dist.get_world_size())
        mine["x"].requires_grad_(True)
        loss = squared_error(pair.model, mine)
        (loss if where == "before" else mine["x"]).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        pair.ddp.reset_sync_window()
        dist.barrier()
        pair.steps(3, first=6)
    pair.require_delivered(8)


@check
def copies() -> None:
    pair = Pair().steps(2)
    for make in (copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
        twin = make(pair.ddp)
        assert_identical(state_of(twin), state_of(pair.ddp), "state of the copy")
        pair.module, pair.ddp, pair.model = twin.module, twin, torch.compile(twin, backend=backend())
        pair.steps(3)
        assert all(bucket.num_clean_windows == 3 for bucket in twin.reducer.buckets)


# ---------------------------------------------------------------- options of Inductor


def count_calls(calls: list[str], graph: torch.fx.Graph) -> None:
    calls.append(str(len(graph.nodes)))


def inductor_options() -> None:
    calls: list[str] = []
    for how in (
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"joint_custom_post_pass": partial(count_calls, calls)}},
        {"options": {"max_autotune": True}},
    ):
        torch._dynamo.reset()
        Pair(compile_options=how).steps(3).require_delivered(3)
    assert len(calls) == 1, "the user's own pass ran"


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_compiled(function: Callable[[], None]) -> None:
    run_ranks(2, function, preload=PRELOAD)


def with_inductor(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        torch._dynamo.reset()
        function()


REDUCTION = [accumulate_views, leave_gradients, comm_hooks, static_graph, uneven_inputs]
PASSES = [penalty_from_the_third_step, two_forwards_one_backward, two_models_in_turn, failing_backward]


@pytest.mark.slow
@pytest.mark.parametrize(
    "functions",
    [REDUCTION, PASSES, [inductor_options, optimizer_in_backward]],
    ids=["reduction", "passes", "options"],
)
def test_compiled_by_inductor(functions: list[Callable[[], None]], tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "LOCKSTEP_TEST_COMPILER": "inductor"}
    run_ranks(2, with_inductor, functions, env=env, preload=PRELOAD, limit_s=150)
