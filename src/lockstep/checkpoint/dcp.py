"""To and from ``torch.distributed.checkpoint`` (DCP), each in one process.

What DCP writes is pickled.  Reading it here runs no code: the metadata is read by an unpickler that knows DCP's own
classes and nothing else, and tensors and values by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.collect import Collected
from lockstep.checkpoint.disk import opened, read_into, read_small, remove_tree, sync_directory
from lockstep.checkpoint.loading import latest
from lockstep.checkpoint.protocol import Save
from lockstep.checkpoint.ranks import alone
from lockstep.checkpoint.reading import Reader
from lockstep.checkpoint.snapshot import take_snapshot
from lockstep.checkpoint.tensorfile import DTYPES
from lockstep.checkpoint.tree import decode, encode
from lockstep.errors import CheckpointDamaged, NoCheckpoint
from lockstep.state_dict import plain_key

_METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *DTYPES},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


# ---------------------------------------------------------------- to DCP


def export_dcp(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write a checkpoint (the latest one of a folder) as a new DCP directory, and return that.

    It holds ``{"model", "optimizer", "scheduler", "scaler", "data", "extra", "step"}``, as far as they were saved; the
    optimizer's state goes by parameter name, as ``torch.distributed.checkpoint.state_dict`` has it.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    place, final = latest(path), Path(target).absolute()
    if place is None:
        raise NoCheckpoint(f"There is no checkpoint in {path}.")
    if os.path.lexists(final):
        raise FileExistsError(f"{final} exists; give a new directory")
    reader = Reader(place)
    reader.verify()
    state = {key: decode(tree, reader.tensor) for key, tree in reader.shared().items() if key != "plan"}
    partial = final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")
    try:
        save_dcp({**state, "step": reader.manifest.step}, checkpoint_id=str(partial), no_dist=True)
        os.rename(partial, final)
        sync_directory(final.parent)
    finally:
        remove_tree(partial)
    return final


# ---------------------------------------------------------------- from DCP


def import_dcp(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
) -> Path:
    """Save what a DCP directory holds as a checkpoint in the folder ``path``, and return that.

    ``model_key`` and ``optimizer_key`` say where they are in the saved state ("app.model" for nested ones); the rest is
    found in ``extra`` when it is loaded.  The optimizer's state must go by parameter name.
    """
    state = _read_state(Path(source).absolute())
    model, optimizer = _take(state, model_key), _take(state, optimizer_key)
    if not isinstance(model, dict) or not model:
        raise ValueError(f"{source} has no model at {model_key!r}; it has {sorted(state)}")
    collected = Collected()
    named = {plain_key(key): value for key, value in model.items()}
    collected.shared["model"] = encode(named, "model", _into(collected))
    if isinstance(optimizer, dict) and optimizer:
        collected.shared["optimizer"] = encode(_by_name(optimizer), "optimizer", _into(collected))
    collected.shared |= {"extra": encode(state, "extra", _into(collected)), "plan": None}
    collected.own = {"rng": {}, "per_rank": {}}
    snapshot = take_snapshot(collected, step, 0, 1, copies=False, compares=False)
    return Save(Path(path).absolute(), snapshot, alone(), keep=None).run()


def _into(collected: Collected) -> Callable[[str, torch.Tensor], str]:
    return lambda place, tensor: collected.take(place, tensor, collected.of_rank_zero)


def _take(state: dict[str, Any], dotted: str) -> Any:
    """Take what is at a path out of nested dicts."""
    *outer, last = dotted.split(".")
    for key in outer:
        state = state.get(key, {})
    return state.pop(last, None)


def _by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Check that an optimizer's state goes by parameter name."""
    groups = optimizer.get("param_groups")
    if isinstance(groups, dict):  # a list whose items were saved one by one
        groups = [groups[number] for number in sorted(groups)]
    if not groups or any(not isinstance(name, str) for group in groups for name in group.get("params", [0])):
        raise ValueError(
            "the optimizer's state goes by positions; save it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which names parameters"
        )
    state = {plain_key(name): values for name, values in optimizer.get("state", {}).items()}
    return {
        "state": state,
        "param_groups": [{**group, "params": [plain_key(name) for name in group["params"]]} for group in groups],
    }


class _MetadataUnpickler(pickle.Unpickler):
    """Knows DCP's own classes; anything else is refused, and so nothing can be run."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise CheckpointDamaged(
                f"{self._path} asks for {module}.{name}, which the metadata of DCP has no use for.", file=self._path
            )
        return super().find_class(module, name)


def _read_state(directory: Path) -> dict[str, Any]:
    """Read everything in a DCP directory, nested as it was saved."""
    path = directory / _METADATA
    try:
        metadata = _MetadataUnpickler(read_small(path, _MAX_METADATA_BYTES), path).load()
        items = {(index.fqn, _sizes(index.offset)): info for index, info in metadata.storage_data.items()}
        entries, places = metadata.state_dict_metadata, metadata.planner_data or {}
        state: dict[str, Any] = {}
        for name, entry in entries.items():
            value = _read_tensor(directory, name, entry, items) if hasattr(entry, "chunks") else None
            if value is None:
                value = _read_item(directory, items[name, None])
            _put(state, places.get(name, (name,)), value)
    except CheckpointDamaged:
        raise
    except Exception as error:
        raise CheckpointDamaged(f"{path} cannot be read ({type(error).__name__}: {error}).", file=path) from error
    return _lists(state)


def _sizes(size: Any) -> tuple[int, ...] | None:
    return None if size is None else tuple(size)


def _read_tensor(directory: Path, name: str, entry: Any, items: dict[Any, Any]) -> torch.Tensor:
    whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="meta")
    parts = []
    for chunk in entry.chunks:
        part = _read_item(directory, items[name, tuple(chunk.offsets)])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != tuple(chunk.sizes) or part.dtype != whole.dtype:
            raise ValueError(f"the piece of {name} at {tuple(chunk.offsets)} is not what the metadata says")
        parts.append((chunk, part))
    if sum(part.numel() for _, part in parts) < whole.numel():
        raise ValueError(f"the pieces of {name} do not cover its shape {tuple(whole.shape)}")
    result = torch.empty_like(whole, device="cpu")
    for chunk, part in parts:
        result[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    return result


def _read_item(directory: Path, info: Any) -> Any:
    """Read one stored value; tensors and plain values only."""
    name, offset, length = str(info.relative_path), int(info.offset), int(info.length)
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in this directory")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} was written with a transformation, which is not supported")
    with opened(directory / name) as descriptor:
        if not 0 <= offset <= offset + length <= os.fstat(descriptor).st_size:
            raise CheckpointDamaged(f"{directory / name} is shorter than its metadata says.", file=directory / name)
        data = bytearray(length)
        read_into(descriptor, memoryview(data), offset, directory / name)
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _put(state: dict[Any, Any], place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value


def _lists(state: Any) -> Any:
    """Turn dicts whose keys are 0, 1, 2, ... back into the lists that they were."""
    if not isinstance(state, dict):
        return state
    inner = {key: _lists(value) for key, value in state.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner
