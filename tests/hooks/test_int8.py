from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.hooks import Int8State
from lockstep.hooks.int8 import ShardLayout, dequantise, quantise


@given(
    num_elements=st.integers(1, 100_000),
    num_ranks=st.integers(2, 256),
    chunk_size=st.integers(1, 512).map(lambda n: 4 * n),
)
def test_shards_hold_the_bucket_and_little_else(num_elements: int, num_ranks: int, chunk_size: int) -> None:
    layout = ShardLayout.of(num_elements, num_ranks, chunk_size)
    assert layout.padded_elements >= num_elements
    assert layout.padded_elements - num_elements < num_ranks * max(layout.chunk, 4)
    assert layout.chunk <= chunk_size
    assert layout.shard_bytes % 4 == 0


@settings(max_examples=60)
@given(num_elements=st.integers(1, 3000), exponent=st.integers(-45, 37), seed=st.integers(0, 10**6))
def test_what_is_decoded_and_what_is_left_out_make_the_input(num_elements: int, exponent: int, seed: int) -> None:
    layout = ShardLayout.of(num_elements, 2, 64)
    rows = torch.randn(2, layout.shard_elements, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    packed, left_out = quantise(rows.clone(), layout.chunk)
    assert packed.shape == (2, layout.shard_bytes)
    decoded = dequantise(packed, layout)
    torch.testing.assert_close(decoded + left_out, rows, rtol=1e-6, atol=0.0)
    half_level = rows.view(2, -1, layout.chunk).abs().amax(-1, keepdim=True) / 127 / 2
    # Scales of subnormal chunks have few bits, so the bound is only meant for normal floats.
    if exponent > -30:
        assert (left_out.view(2, -1, layout.chunk).abs() <= half_level * 1.001).all()


def test_a_chunk_with_nan_or_inf_decodes_to_nothing_finite_and_its_neighbours_are_untouched() -> None:
    layout = ShardLayout.of(128, 1, 64)
    for bad in (float("nan"), float("inf"), float("-inf")):
        rows = torch.ones(1, 128)
        rows[0, 3] = bad
        decoded = dequantise(quantise(rows, 64)[0], layout)
        assert not torch.isfinite(decoded[0, :64]).any()
        assert torch.equal(decoded[0, 64:], torch.ones(64))


@pytest.mark.parametrize("chunk_size", [0, 2, 1023])
def test_a_bad_chunk_size_is_named(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4, got {chunk_size}"):
        Int8State(chunk_size=chunk_size)


def test_a_bad_scheme_is_named() -> None:
    with pytest.raises(ValueError, match="'ring'"):
        Int8State(scheme="ring")
