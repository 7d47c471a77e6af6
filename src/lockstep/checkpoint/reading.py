"""Reading: a checkpoint is verified file by file before anything of it is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import folder as folders
from lockstep.checkpoint.disk import digest_of, digest_of_file, opened, read_small
from lockstep.checkpoint.manifest import MAX_BYTES, STATE, Manifest, Piece, state_of, tensors_of
from lockstep.checkpoint.tensorfile import DTYPES, TensorFile
from lockstep.errors import CheckpointDamaged


@dataclass(frozen=True)
class Region:
    """A block of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Reader:
    """One checkpoint, opened; its manifest is valid, and each file is verified before its content is handed out."""

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self.directory = directory
        if manifest is None:
            candidate = folders.look_at(directory)
            if candidate.damage is not None:
                raise candidate.damage
            assert candidate.manifest is not None
            manifest = candidate.manifest
        self.manifest = manifest
        self._files: dict[int, TensorFile] = {}
        self._verified: set[str] = set()
        for name, (num_bytes, _) in manifest.files.items():
            with opened(directory / name, num_bytes):
                pass  # it is there, a file, and of its size

    # ---------------------------------------------------------------- verify

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare files with their digests; all of them for None."""
        for name in sorted(self.manifest.files if names is None else set(names)):
            if name in self._verified:
                continue
            num_bytes, digest = self.manifest.files[name]
            if digest_of_file(self.directory / name, num_bytes) != digest:
                raise self._changed(name)
            if name.endswith(".safetensors"):
                self._open(int(name.removeprefix("rank-").removesuffix(".safetensors")))
            self._verified.add(name)

    def _changed(self, name: str) -> CheckpointDamaged:
        path = self.directory / name
        return CheckpointDamaged(
            f"{path} is not the file that was saved: its digest differs{self._origin(name)}.", path
        )

    def _origin(self, name: str) -> str:
        """Say where a file comes from, if it says so itself."""
        path = self.directory / name
        try:
            if name.endswith(".safetensors"):
                mark: Any = TensorFile(path).metadata
            else:
                mark = json.loads(read_small(path, MAX_BYTES))
            save_id, step, rank = str(mark["save_id"]), str(mark["step"])[:20], int(mark["rank"])
        except (CheckpointDamaged, ValueError, KeyError, TypeError, RecursionError):
            return ""
        if save_id != self.manifest.save_id:
            return f" (it says that it is from another save, of step {step})"
        return "" if name in (STATE, tensors_of(rank), state_of(rank)) else f" (it says that it is rank {rank}'s)"

    def _open(self, rank: int) -> None:
        """Read the header of a verified file and hold it against the manifest."""
        name = tensors_of(rank)
        file = TensorFile(self.directory / name, self.manifest.files[name][0])
        expected = {}
        for tensor, entry in self.manifest.tensors.items():
            for piece in entry.pieces:
                if piece.rank == rank:
                    expected[tensor] = (DTYPES[entry.dtype], piece.sizes)
        wrong = [key for key, (dtype, sizes) in expected.items() if not file.holds(key, dtype, sizes)]
        wrong += sorted(file.tensors.keys() - expected.keys())
        if wrong:
            raise CheckpointDamaged(
                f"{file.path} does not hold what the manifest says, first {wrong[0]!r}.", file=file.path
            )
        self._files[rank] = file

    def files_for(self, tensors: Iterable[tuple[str, Region | None]]) -> set[str]:
        """Name the files that hold these parts of these tensors; None for all of a tensor."""
        ranks = set()
        for name, region in tensors:
            for piece in self.manifest.tensors[name].pieces:
                if region is None or _common(region, piece) is not None:
                    ranks.add(piece.rank)
        return {tensors_of(rank) for rank in ranks}

    # ---------------------------------------------------------------- state

    def shared(self) -> dict[str, Any]:
        """Return the tree that all ranks share."""
        return self._json(STATE, "shared")

    def own(self, rank: int) -> dict[str, Any]:
        """Return the tree that a rank saved for itself."""
        return self._json(state_of(rank), "own")

    def _json(self, name: str, key: str) -> dict[str, Any]:
        path = self.directory / name
        num_bytes, digest = self.manifest.files[name]
        data = read_small(path, MAX_BYTES, num_bytes)
        if digest_of(data) != digest:
            raise self._changed(name)
        try:
            content = json.loads(data)[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise CheckpointDamaged(f"{path} has no {key!r}.", file=path)
        self._verified.add(name)
        return content

    # ---------------------------------------------------------------- tensors

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into the host's memory."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.fill(out, name, (0,) * len(entry.shape))
        return out

    def fill(self, out: torch.Tensor, name: str, offsets: Sequence[int]) -> None:
        """Read the part of a tensor that begins at ``offsets`` and has the shape of ``out``, on any device."""
        entry = self.manifest.tensors[name]
        dtype, region = DTYPES[entry.dtype], Region(tuple(offsets), tuple(out.shape))
        straight = out.device.type == "cpu" and out.is_contiguous() and out.dtype is dtype
        with torch.no_grad():
            for piece in entry.pieces:
                common = _common(region, piece)
                if common is None:
                    continue
                file = self._files[piece.rank]
                if straight and piece.offsets == region.offsets and piece.sizes == region.sizes:
                    file.read(name, dtype, piece.sizes, out.detach())
                    continue
                read = file.read(name, dtype, piece.sizes)
                out[_slices(common, region.offsets)].copy_(read[_slices(common, piece.offsets)])


def _common(region: Region, piece: Piece) -> Region | None:
    """Return the block that both have; a tensor without dims has one element in common with itself."""
    offsets, sizes = [], []
    for a, m, b, n in zip(region.offsets, region.sizes, piece.offsets, piece.sizes, strict=True):
        begin, end = max(a, b), min(a + m, b + n)
        if begin >= end:
            return None
        offsets.append(begin)
        sizes.append(end - begin)
    return Region(tuple(offsets), tuple(sizes)) if prod(sizes) else None


def _slices(block: Region, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - start, begin - start + size)
        for begin, size, start in zip(block.offsets, block.sizes, origin, strict=True)
    )
