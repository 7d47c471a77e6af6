"""The file format: what is written is read back, by its library too; a hostile header asks for nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.disk import NewFile
from lockstep.checkpoint.tensorfile import DTYPES, TensorFile
from lockstep.errors import CheckpointDamaged

TENSORS = {
    "f32": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "i64": torch.arange(4),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(4, 6).t(),
    "c64": torch.randn(2, dtype=torch.complex64),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    with NewFile(path) as file:
        tensorfile.write(file, tensors, {"step": "3"})
        file.finish()
    return path


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3).to(dtype) for name, dtype in DTYPES.items()} | {"conj": torch.randn(2) * 1j}
    tensors["conj"] = tensors["conj"].conj()
    file = TensorFile(write(tmp_path / "t", tensors))
    assert file.metadata == {"step": "3"}
    for name, tensor in tensors.items():
        read = file.read(name, tensor.dtype, tensor.shape)
        assert file.holds(name, tensor.dtype, tensor.shape)
        assert read.resolve_conj().view(torch.uint8).tolist() == tensor.resolve_conj().view(torch.uint8).tolist()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    read = library.load_file(write(tmp_path / "t", TENSORS))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype is tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    library.save_file(tensors, tmp_path / "t")
    file = TensorFile(tmp_path / "t")
    for name, tensor in tensors.items():
        read = file.read(name, tensor.dtype, tensor.shape)
        assert torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "no object": ([1], b"", None),
    "not JSON": (b"\x80\x04", b"", None),
    "not text": (b"\xff\xfe\xfd", b"", None),
    "deep": (b"[" * 200_000, b"", None),
    "a header of 100 GB": ({}, b"", 100 << 30),
    "a negative length": ({}, b"", (1 << 64) - 1),
    "a header past the end": ({}, b"", 3),
    "100 GB declared": ({"a": {"dtype": "F32", "shape": [25 << 30], "data_offsets": [0, 100 << 30]}}, b"", None),
    "100 GB in no bytes": ({"a": {"dtype": "F32", "shape": [25 << 30], "data_offsets": [0, 8]}}, b"x" * 8, None),
    "overflow": ({"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}, b"", None),
    "negative shape": ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, b"x" * 8, None),
    "huge number": ({"a": {"dtype": "F32", "shape": [1 << 70, 0], "data_offsets": [0, 0]}}, b"", None),
    "overlap": ({"a": ONE, "b": ONE}, b"x" * 8, None),
    "gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, b"x" * 20, None),
    "bytes left over": ({"a": ONE}, b"x" * 9, None),
    "backwards": ({"a": {**ONE, "data_offsets": [8, 0]}}, b"x" * 8, None),
    "unknown dtype": ({"a": {**ONE, "dtype": "PICKLE"}}, b"x" * 8, None),
    "dtype is a list": ({"a": {**ONE, "dtype": ["F32"]}}, b"x" * 8, None),
    "more fields": ({"a": {**ONE, "path": "/etc/passwd"}}, b"x" * 8, None),
    "twice": (b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2), b"x" * 8, None),
    "boolean shape": ({"a": {**ONE, "shape": [True, 2]}}, b"x" * 8, None),
    "metadata": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    header, data, length = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointDamaged, match=str(tmp_path / "t")) as caught:
        TensorFile(raw(tmp_path / "t", header, data, length))
    assert caught.value.file == tmp_path / "t"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_too_short_and_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(write(tmp_path / "t", TENSORS))
    (tmp_path / "folder").mkdir()
    for name, why in (("short", "too few"), ("link", "symbolic link"), ("folder", "not a regular"), ("no", "missing")):
        with pytest.raises(CheckpointDamaged, match=why):
            TensorFile(tmp_path / name)
