"""The safetensors format, written and read here: eight bytes of length, a JSON header, the tensors one after the other.

It is ours so that a file is digested and synced while it is written, and so that every number of a header is checked
against the file before any memory is asked for.  The library reads what this writes, and the other way round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.disk import NewFile, memory_of, opened, read_into
from lockstep.errors import CheckpointDamaged

MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# The format has no name for these: their bytes are stored, and the manifest knows what they are.
_AS_BYTES = (torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NAMES, *_AS_BYTES)}


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype for the manifest; one that cannot be stored is an error."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a tensor of dtype {dtype} cannot be stored; known: {', '.join(sorted(DTYPES))}")
    return name


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    num_bytes: int


# ---------------------------------------------------------------- write


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Describe tensors that lie one after the other, in this order."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        dtype, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            dtype, shape = "U8", [num_bytes]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def ordered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Order tensors by the size of their elements, so that each is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def write(file: NewFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors of any device, one at a time through the host's memory."""
    tensors = ordered(tensors)
    file.write(header(tensors, metadata))
    for tensor in tensors.values():
        here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        file.write(memory_of(here))


# ---------------------------------------------------------------- read


class TensorFile:
    """The header of one file, validated; tensors are read when they are asked for."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        self.path = path
        with opened(path, num_bytes) as descriptor:
            size = os.fstat(descriptor).st_size
            self.metadata, self.tensors = self._parse(descriptor, size)

    def _refuse(self, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self.path}: {why}.", file=self.path)

    def _parse(self, descriptor: int, size: int) -> tuple[dict[str, str], dict[str, Stored]]:
        if size < 8:
            raise self._refuse(f"{size} bytes are too few for a header")
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise self._refuse(f"it claims a header of {length:,} bytes, in a file of {size:,}")
        text = bytearray(length)
        read_into(descriptor, memoryview(text), 8, self.path)
        try:
            entries = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"its header cannot be read ({error})") from None
        if not isinstance(entries, dict):
            raise self._refuse("its header is not an object")
        metadata = entries.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._refuse("its metadata is not a table of texts")
        return metadata, self._places(entries, 8 + length, size)

    def _places(self, entries: dict[str, Any], data_begin: int, size: int) -> dict[str, Stored]:
        """Check that the tensors cover the rest of the file, without gap or overlap."""
        places = {name: self._place(name, entry, data_begin) for name, entry in entries.items()}
        position = data_begin
        for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
            if place.begin != position:
                raise self._refuse(f"the tensor {name!r} begins at {place.begin}, where {position} was expected")
            position += place.num_bytes
        if position != size:
            raise self._refuse(f"its tensors end at {position:,}, and the file at {size:,}")
        return places

    def _place(self, name: str, entry: Any, data_begin: int) -> Stored:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._refuse(f"the entry of {name!r} is not a dtype, a shape and offsets")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        shape, offsets = entry["shape"], entry["data_offsets"]
        if dtype is None or not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
            raise self._refuse(f"the entry of {name!r} makes no sense: {str(entry)[:200]}")
        num_bytes = offsets[1] - offsets[0]
        if num_bytes != prod(shape) * dtype.itemsize:
            raise self._refuse(f"{name!r} claims the shape {shape} in {num_bytes:,} bytes")
        return Stored(dtype, tuple(shape), data_begin + offsets[0], num_bytes)

    def read(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read one tensor, into ``out`` where that is given (contiguous, on the CPU)."""
        place = self.tensors[name]
        tensor = torch.empty(tuple(shape), dtype=dtype) if out is None else out
        assert tensor.numel() * tensor.element_size() == place.num_bytes
        with opened(self.path) as descriptor:
            read_into(descriptor, memory_of(tensor), place.begin, self.path)
        return tensor

    def holds(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Tell whether the tensor is there, as the manifest says it is."""
        place = self.tensors.get(name)
        if place is None or place.num_bytes != prod(shape) * dtype.itemsize:
            return False
        if dtype not in _NAMES:
            return place.dtype is torch.uint8
        return place.dtype is dtype and place.shape == tuple(shape)


def is_sizes(value: Any) -> bool:
    """Tell whether this is a list of whole numbers from 0 to 2**63."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
