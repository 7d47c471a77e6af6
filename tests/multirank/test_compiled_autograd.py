"""Compiled autograd would trace the hooks on the parameters: it is refused, and no step goes unreduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from multirank.harness import expect_errors, lockstep_only

pytestmark = [pytest.mark.multirank, lockstep_only]


def compile_backward(gm: torch.fx.GraphModule) -> Any:
    return torch.compile(gm, backend="eager", fullgraph=True)


def train() -> None:
    import lockstep

    ddp = lockstep.DDP(nn.Linear(6, 2))
    loss = ddp(torch.ones(3, 6)).sum()
    with compiled_autograd._enable(compile_backward):
        loss.backward()


def test_it_is_refused() -> None:
    for error in expect_errors(2, [0, 1], train).values():
        assert "Compiled autograd is not compatible" in error.text
