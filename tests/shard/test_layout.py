"""The layout is pure data: every element has one place, whatever the shapes and the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.shard.layout import ALIGNMENT, FlatLayout, ShardPlan, ShardSpec, UnitLayout, flat_layouts

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[ShardSpec], int]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    specs = [
        ShardSpec(f"p{i}", shape, "float32", 4, draw(st.integers(0, len(shape) - 1))) for i, shape in enumerate(shapes)
    ]
    return specs, draw(st.integers(1, 6))


def strided(base: torch.Tensor, where: tuple[tuple[int, ...], tuple[int, ...], int]) -> torch.Tensor:
    shape, stride, offset = where
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def fill(layout: FlatLayout, parameters: list[torch.Tensor]) -> torch.Tensor:
    ranked = torch.full((layout.num_elements,), float("nan"))
    for parameter, pieces in zip(parameters, layout.pieces, strict=True):
        for piece in pieces:
            strided(ranked, piece.ranked).copy_(strided(parameter, piece.full))
    return ranked


@given(cases())
def test_every_rank_finds_its_chunk_where_torch_chunk_puts_it(case: tuple[list[ShardSpec], int]) -> None:
    specs, world = case
    (layout,) = flat_layouts(specs, world)
    parameters = [torch.randn(spec.shape) for spec in specs]
    ranked = fill(layout, parameters).view(world, -1)
    for rank in range(world):
        for cut, parameter in zip(layout.cuts, parameters, strict=True):
            chunks = parameter.chunk(world, cut.spec.dim)
            mine = strided(ranked[rank], cut.shard(rank))
            if rank < len(chunks):
                assert torch.equal(mine, chunks[rank])
            else:
                assert mine.numel() == 0
                assert mine.shape[cut.spec.dim] == 0


@given(cases())
def test_what_was_cut_is_put_together_again(case: tuple[list[ShardSpec], int]) -> None:
    specs, world = case
    (layout,) = flat_layouts(specs, world)
    parameters = [torch.randn(spec.shape) for spec in specs]
    ranked = fill(layout, parameters)
    full = torch.full((layout.full_elements,), float("nan"))
    for cut, pieces, parameter in zip(layout.cuts, layout.pieces, parameters, strict=True):
        whole = strided(full, cut.full)
        for piece in pieces:
            strided(whole, piece.full).copy_(strided(ranked, piece.ranked))
        assert torch.equal(whole, parameter)


@given(cases())
def test_offsets_are_aligned_and_nothing_overlaps(case: tuple[list[ShardSpec], int]) -> None:
    specs, world = case
    (layout,) = flat_layouts(specs, world)
    end = 0
    for cut in layout.cuts:
        assert cut.offset % ALIGNMENT == cut.full_offset % ALIGNMENT == 0
        assert cut.offset >= end
        end = cut.offset + cut.num_elements
    assert layout.shard_elements >= end
    assert layout.has_padding == (layout.num_elements > sum(spec.num_elements for spec in specs))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6))
def test_a_parameter_that_is_alone_needs_no_copy(rows: int, columns: int, world: int) -> None:
    (layout,) = flat_layouts([ShardSpec("weight", (rows, columns * ALIGNMENT), "float32", 4)], world)
    parameter = torch.randn(rows, columns * ALIGNMENT)
    assert layout.is_direct
    assert torch.equal(fill(layout, [parameter])[: parameter.numel()].view_as(parameter), parameter)


def test_a_unit_has_one_buffer_for_each_dtype() -> None:
    specs = [
        ShardSpec("a", (4,), "float32", 4),
        ShardSpec("b", (4,), "bfloat16", 2),
        ShardSpec("c", (3,), "float32", 4),
    ]
    layouts = flat_layouts(specs, 2)
    assert [[cut.name for cut in layout.cuts] for layout in layouts] == [["a", "c"], ["b"]]


def test_a_scalar_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"temperature of shape \(\) has no dimension 0"):
        ShardSpec("temperature", (), "float32", 4)


def plan(world: int = 4, dim: int = 0) -> ShardPlan:
    block = UnitLayout("blocks.0", flat_layouts([ShardSpec("blocks.0.weight", (10, 64), "float32", 4, dim)], world))
    root = UnitLayout("", flat_layouts([ShardSpec("head.weight", (3, 64), "float32", 4)], world))
    return ShardPlan((block, root))


def test_the_digest_is_of_the_layout() -> None:
    assert plan().digest == plan().digest
    assert len({plan().digest, plan(world=2).digest, plan(dim=1).digest}) == 3


def test_the_plan_counts_bytes_and_prints_as_a_table() -> None:
    cut = plan()
    assert cut.full_bytes == (10 + 3) * 64 * 4
    assert cut.shard_bytes == (3 + 1) * 64 * 4  # three rows, and one, on the rank that has most
    assert cut.largest_full_bytes == 10 * 64 * 4
    assert cut.unit_of("head.weight").name == ""
    text = str(cut)
    assert text.startswith(f"shards {cut.digest[:12]}: 2 units, 2 parameters, 1.00 KiB per rank of 3.25 KiB")
    assert "(root)" in text
    assert "blocks.0.weight" in text
    with pytest.raises(KeyError, match="nothing"):
        cut.unit_of("nothing")
