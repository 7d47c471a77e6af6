"""Communication hooks: torch's own, unchanged, and a user's, on the wrapper's buckets.

Every test knows what the gradients must be: the exact mean where a hook is exact (or made exact, as PowerSGD
is with enough rank), the mean within the precision of what travelled, the mean of a subgroup, or each rank's
own. Hooks that update parameters or synchronise buffers are in test_surface_hooks_effects.py.

Two of torch's hooks are missing because they fail with every wrapper, torch's own included: quantization
reads the future of an all-gather in a form that only NCCL gives; batched PowerSGD, once it compresses, hands a
matrix to a function that takes only stacks of matrices (torch 2.13). Its uncompressed steps are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from multirank.compare import Tensors, assert_close, assert_identical, gradients_of
from multirank.harness import SUBJECT, expect_errors, run_ranks, torch_fails
from multirank.models import CASES, shard
from multirank.steps import NUM_STEPS, WORLD, assert_steps, local_batch, rank_steps, reference_steps, wrapped

MLP_CASE = CASES["mlp"]
FLOAT = torch.float32
# What each number format keeps, relative to the largest element of a bucket.
HALF, BRAIN = 4e-3, 3e-2

Hook = Callable[[Any, Any], torch.futures.Future]


# Torch refuses annotations that are strings, which they all are in this file; so these hooks have none.


def then_hook(state, bucket):
    """A user's hook: sums in place, divides in a callback."""
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def set_buffer_hook(state, bucket):
    """Puts another tensor into the bucket, as hooks that rescale or mask do, and reduces that."""
    bucket.set_buffer(bucket.buffer() * 1.0)
    return default_hooks.allreduce_hook(None, bucket)


def blocking_hook(state, bucket):
    """Done before it returns."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(tensor)
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(tensor)
    return future


def full_rank_state(rank: int) -> Any:
    """PowerSGD that loses nothing: enough rank for every matrix, and every matrix compressed."""
    return powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        min_compression_rate=0,
        orthogonalization_epsilon=1e-12,
    )


HOOKS: dict[str, tuple[Callable[[], Any], Hook, float | None]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, None),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, HALF),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook, BRAIN),
    "fp16_wrapped_allreduce": (
        lambda: None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        HALF,
    ),
    "bf16_wrapped_allreduce": (
        lambda: None,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        BRAIN,
    ),
    "power_sgd": (lambda: full_rank_state(24), powerSGD_hook.powerSGD_hook, 1e-3),
    "user_then": (list, then_hook, None),
    "user_set_buffer": (lambda: None, set_buffer_hook, None),
    "user_blocking": (lambda: None, blocking_hook, None),
}
# PowerSGD starts its second and third collective from the callbacks of the first. With several buckets torch
# calls all hooks before it waits, so those follow-ups start in another order on every rank: on gloo they mix up
# the buckets or hang.
FOLLOW_UPS = {"power_sgd"}
ONE_BUCKET = {"bucket_cap_mb": 25}
OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
}


def train_with_hook(name: str, options: dict[str, Any]) -> list[Tensors]:
    make_state, hook, _ = HOOKS[name]
    ddp = wrapped(MLP_CASE.module(), **options)
    ddp.register_comm_hook(make_state(), hook)
    return rank_steps(ddp, MLP_CASE, FLOAT, num_steps=5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", HOOKS)
def test_hook_gives_the_mean(name: str, options: str, request: pytest.FixtureRequest) -> None:
    if name.startswith("bf16"):
        request.applymarker(torch_fails("wants NCCL for bfloat16, though gloo sums it"))
    buckets = ONE_BUCKET if name in FOLLOW_UPS else {}
    values = run_ranks(WORLD, train_with_hook, name, {**buckets, **OPTIONS[options]})
    expected = reference_steps(MLP_CASE.module(), MLP_CASE, WORLD, FLOAT, num_steps=5)
    assert_steps(values, expected, name, HOOKS[name][2])


@pytest.mark.skipif(SUBJECT == "torch", reason="torch's DDP: mixes up the buckets or hangs, see FOLLOW_UPS")
def test_hook_with_follow_up_collectives_on_several_buckets() -> None:
    values = run_ranks(WORLD, train_with_hook, "power_sgd", {})
    expected = reference_steps(MLP_CASE.module(), MLP_CASE, WORLD, FLOAT, num_steps=5)
    assert_steps(values, expected, "power_sgd", HOOKS["power_sgd"][2])


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_compressed_gradients_are_numbers_of_the_smaller_format(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """The reduced gradient comes straight from the wire: a hook that was not called would give other bits."""
    if name == "bf16":
        request.applymarker(torch_fails("wants NCCL for bfloat16, though gloo sums it"))
    for step in run_ranks(WORLD, train_with_hook, name, {})[0]:
        for parameter, gradient in step.items():
            assert gradient is not None
            assert_identical(gradient.to(dtype).float(), gradient, f"{parameter} as {dtype}")


def rank_one_gradients(in_half: bool) -> list[Tensors]:
    ddp = wrapped(MLP_CASE.module(), **ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0)
    hook = powerSGD_hook.powerSGD_hook
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if in_half else hook)
    return rank_steps(ddp, MLP_CASE, FLOAT, num_steps=4)


@pytest.mark.parametrize("in_half", [False, True], ids=["plain", "fp16_wrapped"])
def test_power_sgd_of_rank_one_gives_matrices_of_rank_one(in_half: bool) -> None:
    values = run_ranks(WORLD, rank_one_gradients, in_half)
    for rank in range(WORLD):
        assert_identical(values[rank], values[0], f"rank {rank} against rank 0")
    expected = reference_steps(MLP_CASE.module(), MLP_CASE, WORLD, FLOAT, num_steps=2)
    tolerance = HALF if in_half else None
    assert_steps([steps[:2] for steps in values], expected, "before compression starts", tolerance)
    for step in values[0][2:]:
        for name in ("layers.0.weight", "layers.2.weight", "layers.4.weight"):
            gradient = step[name]
            assert gradient is not None
            singular = torch.linalg.svdvals(gradient.double())
            assert singular[0] > 0
            rounding = HALF if in_half else 1e-5
            assert singular[1] < rounding * singular[0], f"{name} has more than one direction"


ENUMERATED = ["ALLREDUCE", "FP16_COMPRESS", "POWER_SGD", "BATCHED_POWER_SGD_RANK2"]


def train_with_enumerated_hook(name: str) -> list[Tensors]:
    ddp = wrapped(MLP_CASE.module())
    register_ddp_comm_hook(DDPCommHookType[name], ddp, state=dist.group.WORLD)
    return rank_steps(ddp, MLP_CASE, FLOAT)


@pytest.mark.parametrize("name", ENUMERATED)
def test_hook_registered_by_torchs_enumeration(name: str) -> None:
    """PowerSGD starts to compress after a thousand steps here, so its first ones are exact."""
    values = run_ranks(WORLD, train_with_enumerated_hook, name)
    tolerance = HALF if name == "FP16_COMPRESS" else None
    assert_steps(values, reference_steps(MLP_CASE.module(), MLP_CASE, WORLD, FLOAT), name, tolerance)


def train_with_builtin_hook(name: str, options: dict[str, Any]) -> list[Tensors]:
    ddp = wrapped(MLP_CASE.module(), **options)
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return rank_steps(ddp, MLP_CASE, FLOAT)


@pytest.mark.parametrize("options", ["copies", "views"])
@pytest.mark.parametrize(("name", "tolerance"), [("ALLREDUCE", None), ("FP16_COMPRESS", HALF)])
def test_builtin_hook(name: str, tolerance: float | None, options: str) -> None:
    values = run_ranks(WORLD, train_with_builtin_hook, name, OPTIONS[options])
    assert_steps(values, reference_steps(MLP_CASE.module(), MLP_CASE, WORLD, FLOAT), name, tolerance)


def local_gradients(rank: int, world: int, num_steps: int) -> list[Tensors]:
    """The gradients of one rank's shard at the initial weights."""
    steps: list[Tensors] = []
    for step in range(num_steps):
        module = MLP_CASE.module()
        MLP_CASE.loss(module, shard(MLP_CASE.batch(step), rank, world)).backward()
        steps.append(gradients_of(module))
    return steps


def gradients_at_initial_weights(ddp: Any, num_steps: int) -> list[Tensors]:
    steps: list[Tensors] = []
    for step in range(num_steps):
        ddp.zero_grad()
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step, FLOAT)).backward()
        steps.append(gradients_of(ddp))
    return steps


def train_with_noop() -> list[Tensors]:
    ddp = wrapped(MLP_CASE.module())
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    return gradients_at_initial_weights(ddp, NUM_STEPS)


def test_noop_hook_leaves_each_rank_its_own_gradient() -> None:
    values = run_ranks(WORLD, train_with_noop)
    for rank in range(WORLD):
        for step, gradients in enumerate(local_gradients(rank, WORLD, NUM_STEPS)):
            assert_close(values[rank][step], gradients, f"rank {rank}, step {step}")


def train_with_local_sgd() -> tuple[list[Tensors], int]:
    subgroup, _ = dist.new_subgroups(group_size=2)
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    ddp = wrapped(MLP_CASE.module())
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return gradients_at_initial_weights(ddp, 4), state.iter


def test_post_local_sgd_reduces_globally_then_in_subgroups() -> None:
    """Also shows that is_last is true once per step: the hook counts steps by it."""
    world = 4
    values = run_ranks(world, train_with_local_sgd)
    own = [local_gradients(rank, world, 4) for rank in range(world)]
    for rank in range(world):
        assert values[rank][1] == 2
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        for step in range(4):
            members = range(world) if step < 2 else pair
            expected = {
                name: torch.stack([own[member][step][name] for member in members]).mean(0) for name in own[0][step]
            }
            assert_close(values[rank][0][step], expected, f"rank {rank}, step {step}")


# The bucket as a hook sees it


def record_bucket(state, bucket):
    buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
    state.append(
        {
            "index": bucket.index(),
            "is_last": bucket.is_last(),
            "flat": buffer.dim() == 1,
            "shapes agree": [g.shape for g in gradients] == [p.shape for p in parameters],
            "gradients are views": all(start <= g.data_ptr() < end for g in gradients),
            "ids": [id(p) for p in parameters],
            "sum": sum(g.double().sum().item() for g in gradients) - buffer.double().sum().item(),
        }
    )
    return default_hooks.allreduce_hook(None, bucket)


def look_into_buckets(options: dict[str, Any]) -> tuple[list[list[dict[str, Any]]], int]:
    module = MLP_CASE.module()
    names = {id(p): n for n, p in module.named_parameters()}
    ddp = wrapped(module, **options)
    seen: list[dict[str, Any]] = []
    ddp.register_comm_hook(seen, record_bucket)
    steps = []
    for step in range(NUM_STEPS):
        seen.clear()
        ddp.zero_grad()
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step, FLOAT)).backward()
        steps.append([{**bucket, "ids": [names[i] for i in bucket["ids"]]} for bucket in seen])
    return steps, len(names)


@pytest.mark.parametrize("options", ["copies", "views"])
def test_buckets_cover_every_parameter_once_in_order(options: str) -> None:
    for steps, num_parameters in run_ranks(WORLD, look_into_buckets, OPTIONS[options]):
        for buckets in steps[1:]:  # torch lays its buckets out anew after the first step
            assert len(buckets) > 1
            assert [bucket["index"] for bucket in buckets] == list(range(len(buckets)))
            assert [bucket["is_last"] for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
            assert all(b["flat"] and b["shapes agree"] and b["gradients are views"] for b in buckets)
            assert all(abs(bucket["sum"]) < 1e-5 for bucket in buckets), "the buffer holds something else"
            names = [name for bucket in buckets for name in bucket["ids"]]
            assert len(names) == len(set(names)) == num_parameters


def accumulate_with_hook(name: str) -> Tensors:
    make_state, hook, _ = HOOKS[name]
    ddp = wrapped(MLP_CASE.module(), **(ONE_BUCKET if name in FOLLOW_UPS else {}))
    ddp.register_comm_hook(make_state(), hook)
    with ddp.no_sync():
        for step in range(3):
            MLP_CASE.loss(ddp, local_batch(MLP_CASE, step, FLOAT)).backward()
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, 3, FLOAT)).backward()
    return gradients_of(ddp)


@pytest.mark.parametrize("name", ["allreduce", "fp16", "user_then", "power_sgd"])
def test_a_hook_gets_the_whole_window(name: str) -> None:
    values = run_ranks(WORLD, accumulate_with_hook, name)
    module = MLP_CASE.module()
    for step in range(4):
        MLP_CASE.loss(module, MLP_CASE.batch(step)).backward()
    assert_steps([[v] for v in values], [gradients_of(module)], name, HOOKS[name][2])


def train_branches_with_hook() -> list[Tensors]:
    case = CASES["branches"]
    ddp = wrapped(case.module(), **case.ddp_options)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return rank_steps(ddp, case, FLOAT)


def test_hook_with_unused_parameters() -> None:
    values = run_ranks(WORLD, train_branches_with_hook)
    case = CASES["branches"]
    assert_steps(values, reference_steps(case.module(), case, WORLD, FLOAT), "branches")


# Refusals


def failing_hook(state, bucket):
    raise LookupError("the hook lost its table")


def hook_with_wrong_type(state, bucket):
    raise AssertionError("never called")


# As if this file had real annotations and not strings.
hook_with_wrong_type.__annotations__["bucket"] = int


def register(how: str) -> None:
    ddp = wrapped(MLP_CASE.module())
    if how == "failing":
        ddp.register_comm_hook(None, failing_hook)
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0, FLOAT)).backward()
    elif how == "twice":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif how == "not callable":
        ddp.register_comm_hook(None, "allreduce")
    elif how == "wrong type":
        ddp.register_comm_hook(None, hook_with_wrong_type)
    elif how == "zero overlap":
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, zero)


@pytest.mark.parametrize(
    ("how", "type_name", "text"),
    [
        ("failing", "LookupError", "the hook lost its table"),
        ("twice", "RuntimeError", "register_comm_hook"),
        ("not callable", "TypeError", "callable"),
        ("wrong type", "ValueError", "GradBucket"),
        # Torch's own hook refuses gloo; it must get far enough to say so.
        ("zero overlap", "RuntimeError", "Gloo backend using Overlapping DDP with ZeRO"),
    ],
)
def test_hooks_that_cannot_work_are_refused(how: str, type_name: str, text: str) -> None:
    for error in expect_errors(2, [0, 1], register, how).values():
        assert type_name in error.traceback
        assert text in error.traceback
