"""The manifest: no byte of it can change, no field of it is believed, and tensors are whole or refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.disk import digest_of
from lockstep.checkpoint.manifest import MANIFEST, Manifest, Piece, TensorEntry, _canonical, _overlap, file_names, unite
from lockstep.errors import CheckpointDamaged

GOOD = Manifest(
    "step-00000007",
    "0123456789abcdef",
    3,
    7,
    2,
    {"torch": "2"},
    dict.fromkeys(file_names(2), (100, "0" * 64)),
    {"model/w": TensorEntry("float32", (3, 2), (Piece(0, (0, 0), (2, 2)), Piece(1, (2, 0), (1, 2))))},
)


def read(directory: Path, data: bytes) -> Manifest:
    (directory / MANIFEST).write_bytes(data)
    return Manifest.read(directory)


def test_round_trip(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD.to_bytes()) == GOOD


def test_no_byte_can_change(tmp_path: Path) -> None:
    data = GOOD.to_bytes()
    for position in range(len(data)):
        for flip in (1, 0x20):
            changed = bytearray(data)
            changed[position] ^= flip
            with pytest.raises(CheckpointDamaged, match=MANIFEST):
                read(tmp_path, bytes(changed))


@given(st.integers(0, 5000))
def test_a_part_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    data = GOOD.to_bytes()
    with pytest.raises(CheckpointDamaged):
        read(tmp_path_factory.getbasetemp(), data[: length % len(data)])


def forged(**changes: Any) -> bytes:
    """A manifest with wrong content and the right digest, as somebody might write it on purpose."""
    body = {**json.loads(GOOD.to_bytes()), **changes}
    body.pop("digest")
    return _canonical({**body, "digest": digest_of(_canonical(body))})


FILES = {name: [100, "0" * 64] for name in file_names(2)}
TENSOR = GOOD.tensors["model/w"].to_json()
FORGED: dict[str, dict[str, Any]] = {
    "path traversal": {"files": {**FILES, "../../etc/passwd": [1, "0" * 64]}},
    "absolute path": {"files": {**{k: v for k, v in FILES.items() if k != "state.json"}, "/etc/passwd": [1, "0" * 64]}},
    "missing file": {"files": {k: v for k, v in FILES.items() if k != "rank-00001.json"}},
    "size": {"files": {**FILES, "state.json": [-1, "0" * 64]}},
    "digest": {"files": {**FILES, "state.json": [1, "x"]}},
    "huge world": {"world": 10**12},
    "no world": {"world": 0},
    "boolean": {"world": True},
    "negative step": {"step": -1},
    "other format": {"format": 2},
    "more fields": {"run": "rm -rf"},
    "rank outside": {"tensors": {"w": ["float32", [1], [[7, [0], [1]]]]}},
    "negative rank": {"tensors": {"w": ["float32", [1], [[-1, [0], [1]]]]}},
    "not covered": {"tensors": {"w": ["float32", [3], [[0, [0], [1]]]]}},
    "no pieces": {"tensors": {"w": ["float32", [0], []]}},
    "overlap": {"tensors": {"w": ["float32", [2, 2], [[0, [0, 0], [1, 2]], [1, [0, 0], [1, 2]]]]}},
    "crossing overlap": {"tensors": {"w": ["float32", [2, 2], [[0, [0, 0], [2, 1]], [1, [0, 0], [1, 2]]]]}},
    "outside": {"tensors": {"w": ["float32", [2], [[0, [1], [2]]]]}},
    "dims": {"tensors": {"w": ["float32", [2], [[0, [0, 0], [1, 2]]]]}},
    "dtype": {"tensors": {"w": ["object", [1], [[0, [0], [1]]]]}},
    "100 GB in one byte": {"tensors": {"w": ["float32", [25 << 30], [[0, [0], [1]]]]}},
    "tensors are a list": {"tensors": []},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointDamaged, match=MANIFEST):
        read(tmp_path, forged(**FORGED[name]))


def test_pieces_of_ranks_become_a_tensor() -> None:
    united = unite([(0, {"w": ["float32", [3, 2], [0, 0], [2, 2]]}), (1, {"w": ["float32", [3, 2], [2, 0], [1, 2]]})])
    assert united["w"] == GOOD.tensors["model/w"]
    with pytest.raises(ValueError, match=r"'w' has 6 elements.*rank\(s\) \[0\] have 4"):
        unite([(0, {"w": ["float32", [3, 2], [0, 0], [2, 2]]})])
    with pytest.raises(ValueError, match="on rank 1"):
        unite([(0, {"w": ["float32", [2], [0], [1]]}), (1, {"w": ["float64", [2], [1], [1]]})])


def overlap_by_brute_force(pieces: list[Piece]) -> bool:
    seen: set[tuple[int, ...]] = set()
    for piece in pieces:
        spans = [range(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True)]
        for element in itertools.product(*spans):
            if element in seen:
                return True
            seen.add(element)
    return False


span = st.tuples(st.integers(0, 5), st.integers(0, 3))


@given(st.integers(1, 3).flatmap(lambda dims: st.lists(st.tuples(*[span] * dims), max_size=7)))
def test_pieces_that_overlap_are_found(boxes: list[tuple[tuple[int, int], ...]]) -> None:
    pieces = [Piece(0, tuple(begin for begin, _ in box), tuple(size for _, size in box)) for box in boxes]
    assert _overlap(pieces) == overlap_by_brute_force(pieces)


def test_a_grid_of_many_pieces_is_looked_at_once_and_a_tangle_is_refused() -> None:
    grid = [Piece(0, (row, column), (1, 1)) for row in range(200) for column in range(200)]
    assert not _overlap(grid)
    assert _overlap([*grid, Piece(0, (7, 8), (1, 2))])
    assert _overlap([Piece(0, (0, 0), (9, 9))] * 100_000)


def test_a_pinwheel_has_no_cut_through_the_whole() -> None:
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert not _overlap([Piece(0, *box) for box in wheel])
