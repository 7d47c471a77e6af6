"""What stands around a step: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lockstep import torch_private as private


def test_global_hooks() -> None:
    module, before = torch.nn.modules.module, private.global_hooks()
    for register in (
        module.register_module_forward_pre_hook,
        module.register_module_forward_hook,
        module.register_module_full_backward_pre_hook,
        module.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)
        assert private.global_hooks() != before
        handle.remove()
        assert private.global_hooks() == before
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.global_hooks() != before


def test_modes_around() -> None:
    assert private.modes_around() == []
    with torch.device("cpu"):
        assert private.modes_around() == []
    with TorchFunctionMode(), FlopCounterMode(display=False):
        assert len(private.modes_around()) == 2


def test_noting_seeds() -> None:
    x = torch.ones(2, requires_grad=True)
    with private.noting_seeds() as noted:
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        assert "set_rng_state" in noted
        torch.manual_seed(0)
        assert "manual_seed" in noted
    torch.manual_seed(0)
    assert noted.count("manual_seed") == 1
