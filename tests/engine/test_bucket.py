"""A parameter's place in its bucket: memory order, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.engine.bucket import Slot, flatten_gradient, is_dense


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.empty(5, 0), True),
        (torch.empty(()), True),
        (torch.empty(3, 8)[:, ::2], False),
        (torch.empty(3, 1).expand(3, 4), False),
    ],
)
def test_dense_means_one_block_without_gaps(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def test_gradients_are_flattened_in_the_parameters_memory_order() -> None:
    weight = nn.Parameter(torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    slot = Slot("conv", weight, "Conv2d", 0)
    row_major = weight.detach().contiguous()
    expected = weight.detach().permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(flatten_gradient(row_major, slot, weight), expected)
    assert torch.equal(flatten_gradient(weight.detach().clone(), slot, weight), expected)
    assert torch.equal(flatten_gradient(None, slot, weight), torch.zeros(24))
