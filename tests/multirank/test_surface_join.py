"""Uneven inputs under join: the ranks still training get the right mean, and all end with the last one's model.

The reference plays all ranks in one process: at each step the ranks that still have inputs contribute, and the
sum is divided by the initial world or by the number of contributors.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from multirank.compare import Tensors, assert_close, assert_identical, gradients_of, state_of
from multirank.harness import expect_errors, lockstep_only, run_ranks, torch_fails
from multirank.models import CASES, shard
from multirank.steps import DTYPE, WORLD, descend, local_batch, wrapped

UNEVEN = [(2, 3, 5), (5, 3, 2), (4, 1, 4)]


def train_uneven(name: str, num_inputs: tuple[int, ...], divide: bool, options: dict[str, Any]) -> Any:
    """Gradients of this rank's own steps, and the state after everybody has joined."""
    case, rank = CASES[name], dist.get_rank()
    options = dict(options)
    hook, window = options.pop("hook", None), options.pop("window", 1)
    ddp = wrapped(case.module(DTYPE), **{**case.ddp_options, **options})
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    gradients = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(num_inputs[rank]):
            closes = step % window == window - 1
            with contextlib.nullcontext() if closes else ddp.no_sync():
                case.loss(ddp, local_batch(case, step)).backward()
            if closes:
                gradients.append(gradients_of(ddp))
                descend(ddp)
                ddp.zero_grad()
    return gradients, state_of(ddp)


def buffer_leader(step: int, num_inputs: tuple[int, ...]) -> int:
    """Under join the buffers come from the highest rank that still has inputs."""
    return max(rank for rank, num in enumerate(num_inputs) if step < num)


def reference_uneven(
    name: str, num_inputs: tuple[int, ...], divide: bool, window: int = 1
) -> tuple[list[Tensors], dict[str, torch.Tensor]]:
    case = CASES[name]
    replicas = [case.module(DTYPE) for _ in range(WORLD)]
    gradients: list[Tensors] = []
    for step in range(max(num_inputs)):
        active = [rank for rank in range(WORLD) if step < num_inputs[rank]]
        copy_buffers(replicas, active, buffer_leader(step, num_inputs))
        for rank in active:
            case.loss(replicas[rank], shard(case.batch(step, DTYPE), rank, WORLD)).backward()
        if step % window != window - 1:
            continue
        mean = mean_gradients([replicas[rank] for rank in active], WORLD if divide else len(active))
        gradients.append(mean)
        for rank in active:
            for parameter_name, parameter in replicas[rank].named_parameters():
                parameter.grad = mean[parameter_name]
            descend(replicas[rank])
            replicas[rank].zero_grad()
    return gradients, state_of(replicas[buffer_leader(max(num_inputs) - 1, num_inputs)])


def copy_buffers(replicas: list[nn.Module], active: list[int], leader: int) -> None:
    for buffer_name, buffer in replicas[leader].named_buffers():
        for rank in active:
            replicas[rank].get_buffer(buffer_name).copy_(buffer)


def mean_gradients(replicas: list[nn.Module], divisor: int) -> Tensors:
    mean: dict[str, torch.Tensor | None] = {}
    for name, _ in replicas[0].named_parameters():
        own = [replica.get_parameter(name).grad for replica in replicas]
        parts = [gradient for gradient in own if gradient is not None]
        mean[name] = torch.stack(parts).sum(0) / divisor if parts else None
    return mean


def assert_uneven(values: list[Any], expected: tuple[list[Tensors], Any], what: str) -> None:
    gradients, final = expected
    for rank, (own_gradients, state) in enumerate(values):
        for step, own in enumerate(own_gradients):
            assert_close(own, gradients[step], f"{what}: rank {rank}, step {step}")
        assert_identical(state, values[0][1], f"{what}: final model of rank {rank} against rank 0")
    assert max(len(own) for own, _ in values) == len(gradients)
    assert_close(values[0][1], final, f"{what}: final model")


@pytest.mark.parametrize("divide", [True, False], ids=["initial_world", "contributors"])
@pytest.mark.parametrize("num_inputs", UNEVEN, ids=str)
def test_uneven_inputs(num_inputs: tuple[int, ...], divide: bool) -> None:
    values = run_ranks(WORLD, train_uneven, "mlp", num_inputs, divide, {})
    assert_uneven(values, reference_uneven("mlp", num_inputs, divide), "mlp")


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
        {"static_graph": True},
        {"hook": default_hooks.allreduce_hook},
    ],
    ids=["views", "one_bucket", "static_graph", "comm_hook"],
)
def test_uneven_inputs_with_options(options: dict[str, Any]) -> None:
    values = run_ranks(WORLD, train_uneven, "mlp", UNEVEN[0], True, options)
    assert_uneven(values, reference_uneven("mlp", UNEVEN[0], True), "mlp")


@torch_fails("a joined rank repeats what it last used, so an unused parameter gets a gradient of zeros")
@pytest.mark.parametrize("divide", [True, False], ids=["initial_world", "contributors"])
@pytest.mark.parametrize("num_inputs", UNEVEN, ids=str)
def test_uneven_inputs_with_unused_parameters(num_inputs: tuple[int, ...], divide: bool) -> None:
    values = run_ranks(WORLD, train_uneven, "branches", num_inputs, divide, {})
    assert_uneven(values, reference_uneven("branches", num_inputs, divide), "branches")


@pytest.mark.parametrize("num_inputs", UNEVEN, ids=str)
def test_uneven_inputs_with_buffers(num_inputs: tuple[int, ...]) -> None:
    values = run_ranks(WORLD, train_uneven, "cnn_batch_statistics", num_inputs, True, {})
    assert_uneven(values, reference_uneven("cnn_batch_statistics", num_inputs, True), "batch norm")


@pytest.mark.parametrize("name", ["mlp", "cnn_batch_statistics"])
@pytest.mark.parametrize("num_inputs", [(2, 4, 6), (6, 2, 4)], ids=str)
def test_uneven_inputs_with_no_sync(name: str, num_inputs: tuple[int, ...]) -> None:
    """Windows of two micro-steps, so ranks join between windows."""
    values = run_ranks(WORLD, train_uneven, name, num_inputs, True, {"window": 2})
    gradients, final = reference_uneven(name, num_inputs, True, window=2)
    if name == "mlp":
        assert_uneven(values, (gradients, final), "no_sync under join")
    else:
        # Buffers travel only with the first forward after a synchronised one; the gradients do not depend on
        # them, so here the parameters alone are judged.
        parameters = {n for n, _ in CASES[name].module().named_parameters()}
        only = [(own, {n: t for n, t in state.items() if n in parameters}) for own, state in values]
        assert_uneven(only, (gradients, {n: t for n, t in final.items() if n in parameters}), "no_sync")


def train_even_without_join() -> Any:
    case = CASES["mlp"]
    ddp = wrapped(case.module(DTYPE))
    gradients = []
    with ddp.join(enable=False):
        for step in range(3):
            case.loss(ddp, local_batch(case, step)).backward()
            gradients.append(gradients_of(ddp))
            descend(ddp)
            ddp.zero_grad()
    return gradients, state_of(ddp)


def test_join_can_be_switched_off() -> None:
    values = run_ranks(WORLD, train_even_without_join)
    assert_uneven(values, reference_uneven("mlp", (3, 3, 3), True), "join off")


def train_again_after_join() -> Any:
    """The wrapper works as before once the context has been left, and in a second context."""
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = wrapped(case.module(DTYPE))
    for num_inputs in ((1, 2, 3), (3, 1, 2)):
        with ddp.join():
            for step in range(num_inputs[rank]):
                case.loss(ddp, local_batch(case, step)).backward()
                ddp.zero_grad()
    case.loss(ddp, local_batch(case, 0)).backward()
    return [gradients_of(ddp)], state_of(ddp)


def test_training_goes_on_after_join() -> None:
    values = run_ranks(WORLD, train_again_after_join)
    case = CASES["mlp"]
    module = case.module(DTYPE)
    case.loss(module, case.batch(0, DTYPE)).backward()
    assert_uneven(values, ([gradients_of(module)], state_of(module)), "after join")


def throw_early() -> None:
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = wrapped(case.module(DTYPE))
    with ddp.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            case.loss(ddp, local_batch(case, step)).backward()


def test_throw_on_early_termination_reaches_every_rank() -> None:
    errors = expect_errors(WORLD, range(WORLD), throw_early)
    for error in errors.values():
        assert "RuntimeError" in error.base_names
        assert "exhausted" in error.text


def join_with_zero(num_inputs: tuple[int, ...], options: dict[str, Any]) -> Any:
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = wrapped(case.module(DTYPE), **options)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    gradients = []
    with Join([ddp, optimizer]):
        for step in range(num_inputs[rank]):
            optimizer.zero_grad()
            case.loss(ddp, local_batch(case, step)).backward()
            gradients.append(gradients_of(ddp))
            optimizer.step()
    return gradients, state_of(ddp)


@torch_fails("a joined rank steps its share of the parameters with its old gradients")
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("num_inputs", UNEVEN, ids=str)
def test_join_together_with_zero_redundancy_optimizer(num_inputs: tuple[int, ...], view: bool) -> None:
    values = run_ranks(WORLD, join_with_zero, num_inputs, {"gradient_as_bucket_view": view})
    assert_uneven(values, reference_uneven("mlp", num_inputs, True), "join with ZeRO")


def joinable_properties() -> tuple[bool, str, bool, bool]:
    ddp = wrapped(CASES["mlp"].module(DTYPE))
    hook = ddp.join_hook(divide_by_initial_world_size=False)
    return (
        ddp.join_process_group is ddp.process_group,
        str(ddp.join_device),
        callable(hook.main_hook),
        callable(hook.post_hook),
    )


def test_the_wrapper_is_joinable_by_name() -> None:
    assert run_ranks(2, joinable_properties) == [(True, "cpu", True, True)] * 2


def evaluate_between(num_inputs: tuple[int, ...]) -> Any:
    """A forward without gradients in every iteration has no backward, so nobody mirrors one."""
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = wrapped(case.module(DTYPE))
    gradients = []
    with ddp.join():
        for step in range(num_inputs[rank]):
            case.loss(ddp, local_batch(case, step)).backward()
            gradients.append(gradients_of(ddp))
            descend(ddp)
            ddp.zero_grad()
            with torch.no_grad():
                case.loss(ddp, local_batch(case, step))
    return gradients, state_of(ddp)


@lockstep_only
@pytest.mark.parametrize("num_inputs", UNEVEN[:2], ids=str)
def test_an_evaluation_under_join(num_inputs: tuple[int, ...]) -> None:
    values = run_ranks(WORLD, evaluate_between, num_inputs)
    assert_uneven(values, reference_uneven("mlp", num_inputs, True), "an evaluation under join")


def two_forwards(num_inputs: tuple[int, ...]) -> None:
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = wrapped(case.module(DTYPE))
    with ddp.join():
        for step in range(num_inputs[rank]):
            (case.loss(ddp, local_batch(case, step)) + case.loss(ddp, local_batch(case, step))).backward()
            descend(ddp)
            ddp.zero_grad()


def test_two_forwards_of_one_backward_under_join_while_all_have_data() -> None:
    run_ranks(2, two_forwards, (3, 3))


@lockstep_only
def test_two_forwards_of_one_backward_under_join_when_a_rank_has_no_data() -> None:
    """Ranks without data mirror one backward for each forward: an error on all, not collectives that do not match."""
    for error in expect_errors(3, [0, 1, 2], two_forwards, (1, 3, 3), limit_s=300).values():
        assert "every forward must be followed by its backward" in error.text
