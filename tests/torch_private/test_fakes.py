"""Tensors without data: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_fake_mode_for() -> None:
    mode = private.fake_mode_for([torch.ones(1)])
    assert private.fake_mode_for([private.fake_tensor(torch.ones(1), mode)]) is mode


def test_fake_tensor() -> None:
    real = torch.ones(2)
    fake = private.fake_tensor(real, private.fake_mode_for([real]))
    assert (fake.shape, fake.device, fake.is_meta) == (real.shape, real.device, False)
    assert private.fake_tensor(fake, None) is fake


def test_fake_copy() -> None:
    norm = torch.nn.BatchNorm1d(2)
    mode = private.fake_mode_for([])
    with private.run_on_fakes(mode):
        private.fake_copy(norm, mode)(torch.ones(3, 2))
    assert norm.num_batches_tracked.item() == 0


def test_run_on_fakes() -> None:
    real = torch.ones(2)
    mode = private.fake_mode_for([real])
    with private.run_on_fakes(mode):
        assert (private.fake_tensor(torch.ones(2), mode) + real).fake_mode is mode
    assert not mode.allow_non_fake_inputs


def test_saved_tensor_hooks_wait() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda t: t):
        with private.saved_tensor_hooks_wait():
            x.exp()
        assert seen == []
        x.exp()
        assert len(seen) == 1


def test_tracing_context_of_a_part() -> None:
    from torch._dynamo.backends.common import aot_autograd

    answers = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        with private.tracing_context_of_a_part() as with_fakes:
            answers.append(with_fakes())
            compiled = aot_autograd(fw_compiler=lambda g, _: g)(graph, inputs)
            answers.append(with_fakes())
            answers.append(type(compiled(*inputs)[0]).__name__)
        return compiled

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1)).item() == 2.0
    assert answers == [False, True, "FakeTensor"]
    with private.tracing_context_of_a_part() as with_fakes:
        assert not with_fakes()
