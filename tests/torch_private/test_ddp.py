"""What torch's wrapper is made of: one test for each private name, which says what torch has moved."""

from __future__ import annotations

import gc

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_TorchDDP() -> None:
    gc.collect()  # models of tests before this one
    assert hasattr(private.TorchDDP, "_active_ddp_module")
    assert private.TorchDDP._get_active_ddp_module() is None


def test_BufferCommHookLocation() -> None:
    assert {m.name for m in private.BufferCommHookLocation} == {"PRE_FORWARD", "POST_FORWARD"}


def test_BuiltinCommHookType() -> None:
    assert {"ALLREDUCE", "FP16_COMPRESS"} <= set(private.BuiltinCommHookType.__members__)


def test_GradBucket() -> None:
    methods = {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}
    assert methods <= set(dir(private.GradBucket))


def test_MixedPrecision() -> None:
    config = private.MixedPrecision(param_dtype=torch.bfloat16)
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (torch.bfloat16, None, None)


def test_WatchedJoin() -> None:
    from torch.distributed.algorithms.join import Join

    assert "_get_num_nonjoined_procs" in vars(Join)
    assert callable(private.WatchedJoin._get_num_nonjoined_procs)


def test_as_overlapped_optimizer() -> None:
    optimizer = private.as_overlapped_optimizer(torch.optim.SGD, None, 0.1)
    assert callable(optimizer.register_ddp)


def test_cast_forward_inputs() -> None:
    args, kwargs = private.cast_forward_inputs(torch.bfloat16, torch.zeros(1), x=torch.zeros(1))
    assert args[0].dtype == kwargs["x"].dtype == torch.bfloat16


def test_in_backward_optimizer_handles() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = torch.nn.Parameter(torch.zeros(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert private.in_backward_optimizer_handles(parameter)


def test_inputs_to_device() -> None:
    args, kwargs = private.inputs_to_device((torch.zeros(1),), {"x": [torch.zeros(1)]}, torch.device("cpu"), False)
    assert args[0][0].device.type == kwargs[0]["x"][0].device.type == "cpu"
