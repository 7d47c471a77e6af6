"""The manifest: what a checkpoint consists of, so that anything else can be refused.

It lists every file with size and digest, and every tensor with the pieces it was written in, each with its place in the
whole: so a tensor that was sharded over some ranks can be read by any other number of them.  Its own digest covers the
rest, and its bytes are canonical, so that there is no byte of it that could change unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import digest_of, read_small
from lockstep.checkpoint.tensorfile import DTYPES, is_sizes
from lockstep.errors import CheckpointDamaged

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MAX_BYTES = 512 << 20
MAX_WORLD = 1_000_000
_MOST_TANGLED = 1000  # pieces that only a comparison of each with each can tell apart; no sharding makes such
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAVE_ID = re.compile(r"[0-9a-f]{16}")


def tensors_of(rank: int) -> str:
    """Name the file with the tensors that a rank wrote."""
    return f"rank-{rank:05d}.safetensors"


def state_of(rank: int) -> str:
    """Name the file with what a rank has for itself."""
    return f"rank-{rank:05d}.json"


def file_names(world: int) -> set[str]:
    """Name all files of a checkpoint but the manifest."""
    return {STATE, *(name(rank) for rank in range(world) for name in (tensors_of, state_of))}


@dataclass(frozen=True)
class Piece:
    """A block of a tensor that one rank wrote."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, in pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> list[Any]:
        return [self.dtype, list(self.shape), [[p.rank, list(p.offsets), list(p.sizes)] for p in self.pieces]]

    @staticmethod
    def from_json(data: Any, world: int) -> TensorEntry:
        """Read an entry that may have been written by anybody; ValueError if it makes no sense."""
        if not isinstance(data, list) or len(data) != 3:
            raise ValueError("is not a dtype, a shape and pieces")
        dtype, shape, pieces = data
        if not isinstance(dtype, str) or dtype not in DTYPES or not is_sizes(shape) or not isinstance(pieces, list):
            raise ValueError("has no known dtype, shape or pieces")
        read = []
        for piece in pieces:
            if not isinstance(piece, list) or len(piece) != 3 or not is_sizes(piece[1]) or not is_sizes(piece[2]):
                raise ValueError("has a piece that is not a rank, offsets and sizes")
            if type(piece[0]) is not int or not 0 <= piece[0] < world:
                raise ValueError(f"has a piece of rank {piece[0]!r}, in a world of {world}")
            read.append(Piece(piece[0], tuple(piece[1]), tuple(piece[2])))
        entry = TensorEntry(dtype, tuple(shape), tuple(read))
        entry.check_covered()
        return entry

    def check_covered(self, shown: Callable[[int], int] = lambda rank: rank) -> None:
        """Raise ValueError unless the pieces cover the tensor, without gap or overlap."""
        num_elements = 0
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.shape) or any(
                offset + size > whole
                for offset, size, whole in zip(piece.offsets, piece.sizes, self.shape, strict=True)
            ):
                rank = shown(piece.rank)
                raise ValueError(f"has a piece of rank {rank} that lies outside its shape {list(self.shape)}")
            num_elements += prod(piece.sizes)
        if num_elements != prod(self.shape) or not self.pieces:
            ranks = sorted({shown(piece.rank) for piece in self.pieces})
            raise ValueError(
                f"has {prod(self.shape):,} elements, and the pieces of rank(s) {ranks} have {num_elements:,}"
            )
        if _overlap(self.pieces):
            raise ValueError("has pieces that overlap")


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Tell whether two pieces have an element in common; pieces that some dim keeps apart need not be compared."""
    rows = [[piece for piece in pieces if prod(piece.sizes)]]
    while rows:
        row = rows.pop()
        if len(row) < 2:
            continue
        for dim in range(len(row[0].sizes)):
            parts = _apart(row, dim)
            if len(parts) > 1:
                rows += parts
                break
        else:
            # No cut through the whole keeps any of them apart, as it does in every grid.
            if len(row) > _MOST_TANGLED or any(_meet(a, b) for number, a in enumerate(row) for b in row[:number]):
                return True
    return False


def _apart(pieces: Sequence[Piece], dim: int) -> list[list[Piece]]:
    """Sort pieces into parts that have nothing in common along a dim."""
    parts: list[list[Piece]] = []
    end = -1
    for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
        if piece.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(piece)
        end = max(end, piece.offsets[dim] + piece.sizes[dim])
    return parts


def _meet(a: Piece, b: Piece) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(begin < other + n and other < begin + m for begin, m, other, n in spans)


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint consists of."""

    name: str
    save_id: str
    serial: int  # counts the saves into a folder
    step: int
    world: int
    versions: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]  # size and digest
    tensors: Mapping[str, TensorEntry]

    def to_bytes(self) -> bytes:
        """Render it, in the one way that it is read back in."""
        body = {
            "format": FORMAT,
            "name": self.name,
            "save_id": self.save_id,
            "serial": self.serial,
            "step": self.step,
            "world": self.world,
            "versions": dict(self.versions),
            "files": {name: list(entry) for name, entry in self.files.items()},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        return _canonical({**body, "digest": digest_of(_canonical(body))})

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Read and validate the manifest in a directory."""
        path = directory / MANIFEST
        data = read_small(path, MAX_BYTES)
        try:
            return _parse(data)
        except (ValueError, RecursionError, OverflowError) as error:
            raise CheckpointDamaged(f"{path} {error}.", file=path) from None


def _parse(data: bytes) -> Manifest:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("cannot be read") from None
    if not isinstance(body, dict):
        raise ValueError("is not a manifest")
    if body.get("format") != FORMAT:
        raise ValueError(f"has the format {str(body.get('format'))[:40]!r}, and this version reads {FORMAT}")
    digest = body.pop("digest", None)
    if digest != digest_of(_canonical(body)) or _canonical({**body, "digest": digest}) != data:
        raise ValueError("was changed after it was written: its digest does not match")
    kinds = {"format": int, "name": str, "save_id": str, "serial": int, "step": int, "world": int}
    kinds |= {"versions": dict, "files": dict, "tensors": dict}
    if set(body) != set(kinds) or any(type(body[key]) is not kind for key, kind in kinds.items()):
        raise ValueError("has missing or unknown fields")
    world = body["world"]
    if not 0 < world <= MAX_WORLD or body["step"] < 0 or body["serial"] < 0 or not _SAVE_ID.fullmatch(body["save_id"]):
        raise ValueError("has a step, serial, world or save id that makes no sense")
    files = body["files"]
    expected = file_names(world) if len(files) == 2 * world + 1 else set()
    if set(files) != expected:
        odd = sorted(set(files) ^ file_names(min(world, 1000)))[:3]
        raise ValueError(f"lists other files than a world of {world} writes: {odd}")
    for name, entry in files.items():
        good = isinstance(entry, list) and len(entry) == 2 and is_sizes(entry[:1]) and isinstance(entry[1], str)
        if not good or not _DIGEST.fullmatch(entry[1]):
            raise ValueError(f"has no size and digest for {name}")
    tensors = {}
    for name, entry in body["tensors"].items():
        try:
            tensors[name] = TensorEntry.from_json(entry, world)
        except ValueError as error:
            raise ValueError(f"says of the tensor {name!r} that it {error}") from None
    return Manifest(
        body["name"],
        body["save_id"],
        body["serial"],
        body["step"],
        world,
        {str(key): str(value) for key, value in body["versions"].items()},
        {name: (entry[0], entry[1]) for name, entry in files.items()},
        tensors,
    )


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def unite(
    indexes: Iterable[tuple[int, Mapping[str, Any]]], shown: Callable[[int], int] = lambda rank: rank
) -> dict[str, TensorEntry]:
    """Make whole tensors of what each rank says it wrote (name -> dtype, shape, offsets, sizes).

    ``shown`` gives the numbers by which errors name ranks.
    """
    found: dict[str, tuple[str, tuple[int, ...], list[Piece]]] = {}
    for rank, index in indexes:
        for name, (dtype, shape, offsets, sizes) in index.items():
            entry = found.setdefault(name, (dtype, tuple(shape), []))
            if entry[:2] != (dtype, tuple(shape)):
                raise ValueError(
                    f"the tensor {name!r} is {dtype} {list(shape)} on rank {shown(rank)}, and {entry[0]} "
                    f"{list(entry[1])} on rank {shown(entry[2][0].rank)}"
                )
            entry[2].append(Piece(rank, tuple(offsets), tuple(sizes)))
    united = {name: TensorEntry(dtype, shape, tuple(pieces)) for name, (dtype, shape, pieces) in found.items()}
    for name, tensor in united.items():
        try:
            tensor.check_covered(shown)
        except ValueError as error:
            raise ValueError(f"the tensor {name!r} {error}") from None
    return united
