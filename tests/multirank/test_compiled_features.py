"""What a wrapped model can do uncompiled it can do compiled, with its buckets out of the compiled backward.

Every check trains a compiled wrapped model next to a twin, and compares gradients parameter by parameter after every
backward.  The twin is the plain module on the whole batch or, where the ranks' own numbers matter (compression, uneven
inputs), an uncompiled wrapper.  ``require_delivered`` says that the buckets really came out of a graph.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import distributed as torch_ddp

from multirank.compare import assert_close, assert_identical, gradients_of, state_of
from multirank.harness import expect_errors, inductor_cache, lockstep_only, run_ranks
from multirank.models import CASES, MLP, Batch, Block, Branches, Case, regression_batch, shard, squared_error

pytestmark = [pytest.mark.multirank, lockstep_only]

PRELOAD = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging")
DTYPE = torch.float64
ONE_EACH = 0.00001  # MiB, so small that every parameter has a bucket of its own
VIEWS = [{"gradient_as_bucket_view": view} for view in (None, True, False)]
MODES = [{"static_graph": True}, {"find_unused_parameters": True}]


def count_graph_windows(ddp: Any) -> Counter[str]:
    """For each parameter, how many windows in a row its bucket came out of a graph; counted from now on."""
    counts: Counter[str] = Counter()
    step, end_window = ddp.step, ddp.step._end_window

    def count_and_end() -> None:
        for bucket in step.reducer.buckets if step.kind.name == "FULL" else ():
            for slot in bucket.slots:
                counts[slot.name] = counts[slot.name] + 1 if bucket.left_in_graph else 0
        end_window()

    step._end_window = count_and_end
    return counts


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
        prepare: Callable[[Any], dict[str, Any]] = lambda module: {},
        **options: Any,
    ) -> None:
        import lockstep

        self.case = Case("", build, regression_batch, squared_error)
        self.dtype, self.eager_twin = dtype, eager_twin
        self.module, self.plain = self.case.module(dtype), self.case.module(dtype)
        options = {"bucket_cap_mb": 0.001, **options}
        how = {"backend": backend(), "fullgraph": True, **(compile_options or {})}
        self.ddp, self.model = wrap_and_compile(way, self.module, {**options, **prepare(self.module)}, how)
        self.twin: Any = lockstep.DDP(self.plain, **options) if eager_twin else self.plain
        self.num_windows: Counter[str] = count_graph_windows(self.ddp)

    def mine(self, step: int) -> Batch:
        return shard(self.case.batch(step, self.dtype), dist.get_rank(), dist.get_world_size())

    def losses(self, step: int) -> list[Tensor]:
        theirs = self.mine(step) if self.eager_twin else self.case.batch(step, self.dtype)
        return [self.case.loss(self.model, self.mine(step)), self.case.loss(self.twin, theirs)]

    def backward(self, step: int, scale: float = 1.0) -> None:
        for loss in self.losses(step):
            (scale * loss).backward()

    def compare(self, what: str, tolerance: float | None = None) -> None:
        gradients = {name.replace("_orig_mod.", ""): g for name, g in gradients_of(self.module).items()}
        assert_close(gradients, gradients_of(self.plain), what, tolerance)

    def each(self, num: int, first: int = 0, tolerance: float | None = None) -> Iterator[int]:
        """The steps: cleared before the body (both ways in turn), compared and followed by an update after it."""
        for step in range(first, first + num):
            for module in (self.module, self.plain):
                module.zero_grad(set_to_none=step % 3 != 2)
            yield step
            self.compare(f"step {step}", tolerance)
            for module in (self.module, self.plain):
                torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05).step()

    def steps(self, num: int, first: int = 0, tolerance: float | None = None) -> Pair:
        for step in self.each(num, first, tolerance):
            self.backward(step)
        return self

    def delivered(self) -> dict[str, int]:
        """For each parameter, how many windows in a row its bucket came out of a graph alone."""
        return {slot.name.replace("_orig_mod.", ""): self.num_windows[slot.name] for slot in self.ddp.reducer.slots}

    def require_delivered(self, num: int, *names: str) -> None:
        delivered = self.delivered()
        assert len(self.ddp.reducer.buckets) > 1
        left = {name: delivered[name] for name in names or delivered if delivered[name] != num}
        assert not left, f"expected {num} windows out of a graph: {left}"
        if num > 0:
            launched = {slot.name: b.left_in_graph for b in self.ddp.reducer.buckets for slot in b.slots}
            assert all(launched[n] for n in launched if not names or n in names), launched


def backend() -> str:
    return os.environ.get("LOCKSTEP_TEST_COMPILER", "aot_eager")


def wrap_and_compile(way: str, module: Any, options: dict[str, Any], how: dict[str, Any]) -> tuple[Any, Any]:
    """The wrapper, and what to call."""
    import lockstep

    if way == "replaced_blocks":
        for index, block in enumerate(module.layers):
            module.layers[index] = torch.compile(block, **how)
    for block in module.layers if way == "blocks_then_wrap" else ():
        block.compile(**how)
    ddp = lockstep.DDP(torch.compile(module, **how) if way == "compile_then_wrap" else module, **options)
    for block in module.layers if way == "wrap_then_blocks" else ():
        block.compile(**how)
    if way == "compile_in_place":
        ddp.compile(**how)
    if way == "compile_a_caller":
        # The wrapper's own frame is left to Python, which is a break in a function around it.
        return ddp, torch.compile(lambda *args: ddp(*args) * 1.0, **{**how, "fullgraph": False})
    return ddp, torch.compile(ddp, **how) if way == "wrap_then_compile" else ddp


class Stack(nn.Module):  # blocks of one class, which share compiled code
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.squeeze(1))


def check_every_way_to_compile() -> None:
    whole = ["wrap_then_compile", "compile_then_wrap", "compile_in_place", "compile_a_caller"]
    for name in (*whole, "blocks_then_wrap", "wrap_then_blocks", "replaced_blocks"):
        torch._dynamo.reset()
        pair = (Pair(MLP, name) if name in whole else Pair(Stack, name, bucket_cap_mb=ONE_EACH)).steps(4)
        pair.require_delivered(4, *(n for n in pair.delivered() if n.startswith("layers")))
        assert {record.strategy for record in pair.ddp._graphs} == {"graph"}, name


def check_accumulate_views() -> None:
    for view in (None, True, False):
        pair = Pair(gradient_as_bucket_view=view).steps(1)
        before = dict(torch._dynamo.utils.counters["stats"])
        for window, num_micro_steps in zip(pair.each(4), [1, 4, 8, 4], strict=True):
            objects: set[int] = set()
            for micro_step in range(num_micro_steps):
                with contextlib.nullcontext() if micro_step == num_micro_steps - 1 else pair.ddp.no_sync():
                    pair.backward(10 * window + micro_step, 1 / num_micro_steps)
                objects |= {id(p.grad) for p in pair.module.parameters()}
            assert len(objects) == 6, "the tensor in .grad was replaced"
        assert torch._dynamo.utils.counters["stats"] == before, "no_sync compiled something anew"
        pair.require_delivered(5)
        own_memory = [p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in pair.module.layers[4].parameters()]
        assert own_memory == [view is False] * 2


def check_leave_gradients() -> None:
    """What lies in .grad from the step before is folded in, once."""
    pair = Pair().steps(1)
    for step in range(4):
        pair.backward(step)
        pair.compare(f"step {step}")
    pair.require_delivered(5)
    with pair.ddp.no_sync():
        pair.losses(2)[0].backward()
    with pytest.warns(UserWarning, match="layers"):
        torch.optim.SGD(pair.module.parameters(), lr=0.0).step()


# Torch refuses annotations that are strings, which they all are in this file; so these hooks have none.


def noting_hook(nodes, bucket):
    """A user's hook, which says which node of the backward it runs in."""
    node = torch._C._current_autograd_node()
    nodes.append(None if node is None else node.name())
    return summing_hook(None, bucket).then(lambda future: future.value() / dist.get_world_size())


def summing_hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


POWER = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5, "random_seed": 3}
HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "power": (lambda: powerSGD_hook.PowerSGDState(None, **POWER), powerSGD_hook.powerSGD_hook),
    "sum": (list, summing_hook),
    "user": (list, noting_hook),
}


def pair_with_hook(name: str) -> tuple[Pair, Any]:
    make_state, hook = HOOKS[name]
    pair = Pair(eager_twin=True, dtype=torch.float32)
    state = make_state()
    pair.ddp.register_comm_hook(state, hook)
    pair.twin.register_comm_hook(make_state(), hook)
    return pair, state


def check_comm_hooks() -> None:
    for name in HOOKS:
        pair, state = pair_with_hook(name)
        pair.steps(6).require_delivered(6)
        if name == "user":
            assert len(state) == 6 * len(pair.ddp.reducer.buckets)
            later = state[len(pair.ddp.reducer.buckets) :]  # the first window is left to the hooks
            assert set(later) == {"CompiledFunctionBackward"}, "the hook ran outside of the compiled backward"


class OnOneRank(Branches):  # rank 1 passes the side branch, rank 0 does not
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.stem(x))
        return self.head(h + self.side(h) if dist.get_rank() == 1 else h)


def check_unused_parameters() -> None:
    pair = Pair(OnOneRank, eager_twin=True, find_unused_parameters=True, bucket_cap_mb=ONE_EACH).steps(4)
    pair.require_delivered(4, "head.weight", "stem.weight")
    assert pair.module.never.weight.grad is None
    assert pair.module.side[0].weight.grad is not None
    # Chosen by data, so that each rank breaks its graph at other places.
    pair = Pair(Branches, find_unused_parameters=True, compile_options={"fullgraph": False})
    pair.case = CASES["branches"]
    pair.steps(4)


def delay_the_middle(module: Any) -> dict[str, Any]:
    delayed = [(f"layers.2.{name}", parameter) for name, parameter in module.layers[2].named_parameters()]
    return {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": module.layers[0].weight}


def check_delayed_parameters() -> None:
    Pair(prepare=delay_the_middle).steps(4).require_delivered(4, "layers.4.weight")


class Ignoring(MLP):
    def __init__(self) -> None:
        super().__init__()
        torch_ddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["layers.2.weight"])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.rows((x[:, 0] > 0).long() * 4 + dist.get_rank()))


def check_options() -> None:
    pair = Pair(static_graph=True).steps(4)
    pair.require_delivered(3)  # the first window only watches
    data = pair.ddp._get_ddp_logging_data()
    assert (data["iteration"], data["world_size"], data["num_parameter_tensors"]) == (3, 2, 6)
    for key in ("avg_backward_compute_time", "avg_backward_comm_time", "avg_forward_compute_time"):
        assert 0 < data[key] < 60e9, (key, data[key])
    pair = Pair(Ignoring, eager_twin=True).steps(4)
    assert "layers.2.weight" not in pair.delivered()
    pair.require_delivered(4)
    Pair(Sparse, eager_twin=True, bucket_cap_mb=ONE_EACH).steps(4)
    # Reduces in another dtype than the graph has, so the hooks do it.
    config = torch_ddp._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    Pair(eager_twin=True, dtype=torch.float32, mixed_precision=config).steps(4, tolerance=3e-2)


def step_in_backward(module: Any) -> dict[str, Any]:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    return {}


def check_optimizer_in_backward() -> None:
    pair = Pair(prepare=step_in_backward)
    for step in range(4):
        pair.plain.zero_grad()
        pair.backward(step)
        torch.optim.SGD(pair.plain.parameters(), lr=0.05).step()
        assert_close(state_of(pair.module), state_of(pair.plain), f"parameters after step {step}")
        assert all(p.grad is None for p in pair.module.parameters())
    pair.require_delivered(4)


def check_uneven_inputs() -> None:
    pair = Pair(eager_twin=True)
    for ddp, model in ((pair.ddp, pair.model), (pair.twin, pair.twin)):
        with ddp.join():
            for step in range(3 if dist.get_rank() == 0 else 5):
                ddp.zero_grad(set_to_none=step != 2)
                squared_error(model, pair.mine(step)).backward()
                torch.optim.SGD(ddp.parameters(), lr=0.05).step()
    assert_close(state_of(pair.module), state_of(pair.plain), "parameters")
    if dist.get_rank() == 1:
        pair.compare("the last step")
        pair.require_delivered(5)


def check_local_gradients_by_autograd_grad() -> None:
    pair = Pair().steps(2)
    pair.module.zero_grad()
    local = torch.autograd.grad(squared_error(pair.model, pair.mine(7)), list(pair.module.parameters()))
    expected = torch.autograd.grad(squared_error(pair.plain, pair.mine(7)), list(pair.plain.parameters()))
    torch.testing.assert_close(local, expected)
    assert all(p.grad is None for p in pair.module.parameters())
    pair.steps(3, first=3).require_delivered(5)


def check_hooks_on_parameters() -> None:
    pair = Pair()
    seen: list[Tensor] = []
    handle = pair.module.layers[2].weight.register_hook(lambda g: seen.append(g.clone()))
    (expected,) = torch.autograd.grad(squared_error(pair.plain, pair.mine(0)), [pair.plain.layers[2].weight])
    pair.steps(3).require_delivered(3, "layers.4.weight")
    torch.testing.assert_close(seen[0], expected)
    assert len(seen) == 3
    handle.remove()
    pair.steps(3, first=3).require_delivered(3, "layers.2.weight")


def penalty(module: Any) -> Tensor:
    """A part of the loss that the graph knows nothing of; layers.4.weight is in the middle of a bucket."""
    return 0.3 * module.layers[2].weight.pow(2).sum() + 0.1 * module.layers[4].weight.pow(2).sum()


# The communication hook, the first step and the ranks with a penalty.
PENALTIES: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "begins_on_one_rank": ("", 2, (1,)),
    "from_the_first_step": ("", 0, (0, 1)),
    "from_the_third_step": ("", 2, (0, 1)),
    "on_one_rank": ("", 0, (1,)),
    "with_a_hook_that_sums": ("sum", 0, (0, 1)),
    "with_a_hook_that_compresses": ("power", 0, (0, 1)),
}
# A bucket that has left already is right if sent once more, for a mean and on all ranks; otherwise the step is lost.
LOST_STEPS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "sums": ("sum", 2, (0, 1)),
    "compresses": ("power", 3, (0, 1)),
}


def train_with_penalty(name: str) -> None:
    hook, first, ranks = {**LOST_STEPS, **PENALTIES}[name]
    pair = pair_with_hook(hook)[0] if hook else Pair()
    share = 1.0 if pair.eager_twin else len(ranks) / dist.get_world_size()
    for step in pair.each(6):
        ours, theirs = pair.losses(step)
        is_on = step >= first
        (ours + penalty(pair.module) if is_on and dist.get_rank() in ranks else ours).backward()
        (theirs + share * penalty(pair.plain) if is_on else theirs).backward()
    pair.require_delivered(6, "layers.0.weight")


@pytest.mark.parametrize("name", PENALTIES)
def test_penalty(name: str) -> None:
    run_ranks(2, train_with_penalty, name, preload=PRELOAD)


def lose_a_step(name: str) -> None:
    hook, first, ranks = LOST_STEPS[name]
    pair = pair_with_hook(hook)[0] if hook else Pair()
    for step in range(8):
        pair.module.zero_grad()
        loss = pair.losses(step)[0]
        is_on = step >= first and dist.get_rank() in ranks
        (loss + penalty(pair.module) if is_on else loss).backward()


@pytest.mark.parametrize("name", LOST_STEPS)
def test_penalty_that_comes_too_late(name: str) -> None:
    for error in expect_errors(2, [0, 1], lose_a_step, name, preload=PRELOAD).values():
        assert "from outside" in error.text
        assert "overlap='none'" in error.text
        assert "layers." in error.text


def check_penalty_by_itself() -> None:
    """In a backward of its own, before the model's and in no_sync()."""
    pair = Pair().steps(3)
    for step in pair.each(3):
        losses = pair.losses(step)
        for loss, module in zip(losses, (pair.module, pair.plain), strict=True):
            penalty(module).backward()
            loss.backward()
    for step in pair.each(3):
        with pair.ddp.no_sync():
            for module in (pair.module, pair.plain):
                (0.2 * module.layers[4].weight.pow(2).sum()).backward()
        pair.backward(step)


def check_two_forwards_and_two_backwards() -> None:
    pair = Pair()
    for step in pair.each(3):
        for first, second in zip(pair.losses(step), pair.losses(step + 20), strict=True):
            (first + 0.5 * second).backward()
    with torch._functorch.config.patch(donated_buffer=False):  # torch's condition for retain_graph
        for step in (pair := Pair()).each(4):
            for loss in pair.losses(step):
                loss.backward(retain_graph=True)
                (2 * loss).backward()
    pair.require_delivered(8)


def check_two_models_in_turn() -> None:
    """Of one class, so that compiled code may be shared; and with other buckets, for which it must not."""
    for way in ("wrap_then_compile", "compile_then_wrap"):
        pairs = [Pair(way=way), Pair(way=way), Pair(way=way, bucket_cap_mb=ONE_EACH)]
        for step in range(4):
            for pair in pairs:
                pair.steps(1, first=step)
        for step, _ in zip(pairs[0].each(3), pairs[1].each(3), strict=True):  # both in one backward
            for first, second in zip(pairs[0].losses(step), pairs[1].losses(step), strict=True):
                (first * 2 + second).backward()
        for pair, num_windows in zip(pairs, (7, 7, 4), strict=True):
            if pair is not pairs[2] or way == "wrap_then_compile":  # otherwise it is given the graph of other buckets
                pair.require_delivered(num_windows)


def check_compiled_and_not_in_turn() -> None:
    pair = Pair().steps(3)
    compiled, pair.model = pair.model, pair.ddp
    pair.steps(2, first=3)
    pair.model = compiled
    pair.steps(3, first=5).require_delivered(3)


class SharedAcrossBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x))
        torch._dynamo.graph_break()
        return self.head(self.shared(h))


def check_shared_by_two_graphs() -> None:
    for cap in (ONE_EACH, 1.0):
        torch._dynamo.reset()
        pair = Pair(SharedAcrossBreak, bucket_cap_mb=cap, compile_options={"fullgraph": False}).steps(4)
        assert len(pair.ddp._graphs) == 2
        if cap == ONE_EACH:
            pair.require_delivered(4, "head.weight")


def check_failing_backward() -> None:
    """Before the graph has delivered, and after."""
    pair = Pair().steps(2)
    for num_windows, where in ((5, "before"), (8, "after")):
        mine = pair.mine(5)
        mine["x"].requires_grad_(True)
        loss = squared_error(pair.model, mine)
        (loss if where == "before" else mine["x"]).register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        pair.ddp.reset_sync_window()
        dist.barrier()
        pair.steps(3, first=6)
        pair.require_delivered(num_windows)


def check_copies() -> None:
    pair = Pair().steps(2)
    for make in (copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
        twin = make(pair.ddp)
        assert_identical(state_of(twin), state_of(pair.ddp), "state of the copy")
        pair.module, pair.ddp, pair.model = twin.module, twin, torch.compile(twin, backend=backend())
        pair.num_windows = count_graph_windows(twin)
        pair.steps(3).require_delivered(3)


def inductor_options() -> None:
    calls: list[Any] = []
    for how in (
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"joint_custom_post_pass": calls.append, "max_autotune": True}},
    ):
        torch._dynamo.reset()
        Pair(compile_options=how).steps(3).require_delivered(3)
    assert len(calls) == 1, "the user's own pass runs once, on the joint graph"


CHECKS = [value for name, value in globals().items() if name.startswith("check_")]


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__[6:])
def test_compiled(function: Callable[[], None]) -> None:
    run_ranks(2, function, preload=PRELOAD)


def with_inductor(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        torch._dynamo.reset()
        function()


WITH_INDUCTOR = {
    "reduction": [check_accumulate_views, check_leave_gradients, check_comm_hooks],
    "options": [check_options, check_uneven_inputs],
    "passes": [check_two_forwards_and_two_backwards, check_two_models_in_turn, check_failing_backward],
    "settings": [inductor_options, check_optimizer_in_backward],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduction", pytest.param("options", marks=pytest.mark.soak), "passes", "settings"])
def test_compiled_by_inductor(name: str) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": inductor_cache(), "LOCKSTEP_TEST_COMPILER": "inductor"}
    run_ranks(2, with_inductor, WITH_INDUCTOR[name], env=env, preload=PRELOAD, limit_s=500)
