"""Constructor options that change which gradients travel, with whom, and how they are packed.

Compared with one process on the whole batch, or on the batch of the group that is meant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from multirank.compare import Tensors, assert_close, assert_identical, gradients_of, state_of
from multirank.harness import expect_errors, run_ranks, subject_class
from multirank.models import CASES, shard
from multirank.steps import (
    DTYPE,
    WORLD,
    assert_steps,
    descend,
    local_batch,
    rank_steps,
    reference_steps,
    wrapped,
)

MLP_CASE = CASES["mlp"]


# Packing: the same gradients, whatever the buckets


PACKINGS: dict[str, dict[str, Any]] = {
    "list_of_caps": {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.0005, 0.002, 0.004]},
    "tiny_cap": {"bucket_cap_mb": 1e-6},
    "batched_copy": {"batched_grad_copy": True},
    "batched_copy_views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "no_buffer_sync": {"forward_sync_buffers": False},
    "dim": {"dim": 0},
}


def train_packed(name: str) -> list[Tensors]:
    return rank_steps(wrapped(MLP_CASE.module(DTYPE), **PACKINGS[name]), MLP_CASE)


@pytest.mark.parametrize("name", PACKINGS)
def test_packing_does_not_change_gradients(name: str) -> None:
    values = run_ranks(WORLD, train_packed, name)
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD), name)


def train_with_batched_copy_over_no_sync() -> Tensors:
    ddp = wrapped(MLP_CASE.module(DTYPE), batched_grad_copy=True)
    with ddp.no_sync():
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0)).backward()
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, 1)).backward()
    return gradients_of(ddp)


def test_batched_copy_keeps_accumulated_gradients() -> None:
    values = run_ranks(WORLD, train_with_batched_copy_over_no_sync)
    module = MLP_CASE.module(DTYPE)
    for step in range(2):
        MLP_CASE.loss(module, MLP_CASE.batch(step, DTYPE)).backward()
    assert_steps([[v] for v in values], [gradients_of(module)], "batched copy over no_sync")


# Groups


def train_in_groups(how: str) -> list[Tensors]:
    """Four ranks as two replicas of two: each pair trains alone."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if how == "process_group":
        options: dict[str, Any] = {"process_group": pairs[rank // 2]}
    else:
        options = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))["data"]}
    ddp = wrapped(MLP_CASE.module(DTYPE), **options)
    steps: list[Tensors] = []
    for step in range(2):
        ddp.zero_grad()
        batch = MLP_CASE.batch(10 * (rank // 2) + step, DTYPE)
        MLP_CASE.loss(ddp, shard(batch, rank % 2, 2)).backward()
        steps.append(gradients_of(ddp))
    return steps


@pytest.mark.parametrize("how", ["process_group", "device_mesh"])
def test_ranks_reduce_within_their_group(how: str) -> None:
    values = run_ranks(4, train_in_groups, how)
    for pair in range(2):
        expected = []
        for step in range(2):
            module = MLP_CASE.module(DTYPE)
            MLP_CASE.loss(module, MLP_CASE.batch(10 * pair + step, DTYPE)).backward()
            expected.append(gradients_of(module))
        assert_steps(values[2 * pair : 2 * pair + 2], expected, f"pair {pair}")


def group_and_mesh_together() -> None:
    mesh = init_device_mesh("cpu", (2,))
    wrapped(MLP_CASE.module(DTYPE), process_group=dist.group.WORLD, device_mesh=mesh)


def test_a_group_and_a_mesh_together_are_refused() -> None:
    for error in expect_errors(2, [0, 1], group_and_mesh_together).values():
        assert "process_group" in error.text
        assert "device_mesh" in error.text


# What the wrapper leaves alone


IGNORED = ["layers.2.weight", "layers.0.bias"]


def train_with_ignored() -> tuple[Tensors, dict[str, torch.Tensor]]:
    module = MLP_CASE.module(DTYPE)
    with torch.no_grad():
        module.layers[0].bias.fill_(float(dist.get_rank()))
    subject_class()._set_params_and_buffers_to_ignore_for_model(module, IGNORED)
    ddp = wrapped(module)
    before = state_of(ddp)
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0)).backward()
    return gradients_of(ddp), before


def test_ignored_parameters_are_neither_broadcast_nor_reduced() -> None:
    values = run_ranks(WORLD, train_with_ignored)
    replicas = []
    for rank in range(WORLD):
        module = MLP_CASE.module(DTYPE)
        with torch.no_grad():
            module.layers[0].bias.fill_(float(rank))
        assert_close(values[rank][1], state_of(module), f"weights of rank {rank} after wrapping")
        MLP_CASE.loss(module, shard(MLP_CASE.batch(0, DTYPE), rank, WORLD)).backward()
        replicas.append(gradients_of(module))
    for rank in range(WORLD):
        expected = {
            name: own if name in IGNORED else torch.stack([r[name] for r in replicas]).mean(0)
            for name, own in replicas[rank].items()
        }
        assert_close(values[rank][0], expected, f"gradients of rank {rank}")


def wrap_different_weights(init_sync: bool) -> dict[str, torch.Tensor]:
    module = MLP_CASE.module(DTYPE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(dist.get_rank())
    return state_of(wrapped(module, init_sync=init_sync))


@pytest.mark.parametrize("init_sync", [True, False])
def test_init_sync(init_sync: bool) -> None:
    values = run_ranks(WORLD, wrap_different_weights, init_sync)
    for rank in range(WORLD):
        module = MLP_CASE.module(DTYPE)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0 if init_sync else rank)
        assert_identical(values[rank], state_of(module), f"weights of rank {rank} with init_sync={init_sync}")


DELAYED = ["layers.4.weight", "layers.4.bias"]


def train_with_delayed() -> list[Tensors]:
    """The last layer's gradients are ready first and wait for those of the first layer."""
    module = MLP_CASE.module(torch.float32)
    parameters = dict(module.named_parameters())
    ddp = wrapped(
        module,
        delay_all_reduce_named_params=[(name, parameters[name]) for name in DELAYED],
        param_to_hook_all_reduce=parameters["layers.0.weight"],
    )
    steps: list[Tensors] = []
    for step in range(3):
        ddp.zero_grad()
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step, torch.float32)).backward()
        dist.barrier()  # torch does not wait for this reduction
        steps.append(gradients_of(ddp))
        descend(ddp)
    return steps


def test_delayed_parameters_are_reduced_too() -> None:
    values = run_ranks(WORLD, train_with_delayed)
    expected = reference_steps(MLP_CASE.module(torch.float32), MLP_CASE, WORLD, torch.float32)
    assert_steps(values, expected, "delayed all-reduce")


def test_delayed_parameters_name_both_arguments() -> None:
    for error in expect_errors(2, [0, 1], delay_without_trigger).values():
        assert "delay_all_reduce_named_params" in error.text
        assert "param_to_hook_all_reduce" in error.text


def delay_without_trigger() -> None:
    module = MLP_CASE.module(DTYPE)
    wrapped(module, delay_all_reduce_named_params=[("layers.0.weight", module.layers[0].weight)])


def skip_unused() -> list[Tensors]:
    case = CASES["branches"]
    ddp = wrapped(case.module(DTYPE), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    steps: list[Tensors] = []
    for step in range(3):
        ddp.zero_grad()
        batch = local_batch(case, step)
        batch["route"] = torch.ones_like(batch["route"])  # the same branch on every rank
        case.loss(ddp, batch).backward()
        steps.append(gradients_of(ddp))
    return steps


def test_skipping_parameters_that_no_rank_uses() -> None:
    values = run_ranks(WORLD, skip_unused)
    case, expected = CASES["branches"], []
    for step in range(3):
        module = case.module(DTYPE)
        batch = case.batch(step, DTYPE)
        batch["route"] = torch.ones_like(batch["route"])
        case.loss(module, batch).backward()
        expected.append(gradients_of(module))
    assert expected[0]["other.weight"] is None
    assert_steps(values, expected, "skip_all_reduce_unused_params")


def switch_process_group() -> list[Tensors]:
    """From the whole world to a pair; the third rank goes on alone."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    ddp = wrapped(MLP_CASE.module(DTYPE))
    steps: list[Tensors] = []
    for step in range(2):
        ddp.zero_grad()
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step)).backward()
        steps.append(gradients_of(ddp))
        ddp._update_process_group(pair if rank < 2 else alone)
    return steps


def test_update_process_group() -> None:
    values = run_ranks(WORLD, switch_process_group)
    own = []
    for rank in range(WORLD):
        module = MLP_CASE.module(DTYPE)
        MLP_CASE.loss(module, shard(MLP_CASE.batch(1, DTYPE), rank, WORLD)).backward()
        own.append(gradients_of(module))
    first = reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD, num_steps=1)[0]
    for rank in range(WORLD):
        members = [0, 1] if rank < 2 else [2]
        second = {name: torch.stack([own[m][name] for m in members]).mean(0) for name in first}
        assert_close(values[rank][0], first, f"rank {rank} in the whole world")
        assert_close(values[rank][1], second, f"rank {rank} in its new group")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_deprecated_broadcast_buffers_still_means_what_it_did(broadcast_buffers: bool) -> None:
    assert run_ranks(2, deprecated_flag, broadcast_buffers) == [(broadcast_buffers, broadcast_buffers)] * 2


def deprecated_flag(value: bool) -> tuple[bool, bool]:
    ddp = wrapped(CASES["cnn_batch_statistics"].module(DTYPE), broadcast_buffers=value)
    return ddp.broadcast_buffers, ddp.will_sync_module_buffers()
