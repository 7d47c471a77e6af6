from __future__ import annotations

import pytest
import torch

from lockstep.hooks import TopKState
from lockstep.hooks.topk import _pack, _unpack


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_a_bad_ratio_is_named(ratio: float) -> None:
    with pytest.raises(ValueError, match="got"):
        TopKState(ratio=ratio)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_kept", [1, 2, 3, 5, 64])
def test_a_packed_row_unpacks_to_itself(dtype: torch.dtype, num_kept: int) -> None:
    values = torch.randn(num_kept).to(dtype)
    positions = torch.randperm(1000)[:num_kept]
    row = _pack(values, positions)
    assert row.numel() % 16 == 0
    got_values, got_positions = _unpack(row, num_kept, dtype)
    assert torch.equal(got_values, values)
    assert torch.equal(got_positions, positions)
