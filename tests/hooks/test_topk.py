from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.hooks import TopKState
from lockstep.hooks.topk import ChunkLayout, _pack, _unpack


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_a_bad_ratio_is_named(ratio: float) -> None:
    with pytest.raises(ValueError, match="got"):
        TopKState(ratio=ratio)


@pytest.mark.parametrize("chunk_size", [0, 2**15 + 1])
def test_a_chunk_that_int16_cannot_address_is_refused(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {chunk_size}"):
        TopKState(chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_elements", [1, 3, 1000, 2**15 + 1])
def test_a_packed_row_unpacks_to_itself(dtype: torch.dtype, num_elements: int) -> None:
    layout = ChunkLayout.of(num_elements, chunk_size=2**15, ratio=0.01)
    values = torch.randn(layout.num_chunks, layout.num_kept).to(dtype)
    places = torch.randint(layout.chunk, values.shape)
    places[0, 0] = layout.chunk - 1
    row = _pack(values, places)
    assert row.numel() % 16 == 0
    got_values, got_places = _unpack(row, layout, dtype)
    assert torch.equal(got_values, values)
    assert torch.equal(got_places, places)


@given(num_elements=st.integers(1, 10**6), chunk_size=st.integers(1, 2**15), ratio=st.floats(1e-6, 1.0))
def test_chunks_hold_the_bucket_and_send_the_ratio(num_elements: int, chunk_size: int, ratio: float) -> None:
    layout = ChunkLayout.of(num_elements, chunk_size, ratio)
    assert 0 <= layout.padded_elements - num_elements < layout.chunk
    assert 1 <= layout.num_kept <= layout.chunk
    assert abs(layout.num_kept - ratio * layout.chunk) <= 1
