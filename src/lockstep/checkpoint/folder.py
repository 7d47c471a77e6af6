"""A folder of checkpoints: which are there, which is the latest, what a dead save left behind.

latest                              the name of the newest one, replaced atomically
step-00000120/                      a checkpoint; complete, since it was renamed to this when it was
.step-00000120.<save id>.partial/   one that is being saved, or that a dead process left
.step-00000080.<save id>.removed/   one that is being removed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.disk import is_in_use, read_small, remove_tree, replace_file, sync_directory
from lockstep.checkpoint.manifest import MANIFEST, Manifest
from lockstep.checkpoint.moments import Moment, reached
from lockstep.errors import CheckpointDamaged

LATEST = "latest"
_NAME = re.compile(r"step-[0-9]{8,19}(\.[0-9]{1,9})?")
_LITTER = re.compile(r"\.step-[0-9]{8,19}(\.[0-9]{1,9})?\.[0-9a-f]{16}\.(partial|removed)|\.latest\.partial")


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a checkpoint in a folder may have this name."""
    return _NAME.fullmatch(name) is not None


def is_a_checkpoint(path: Path) -> bool:
    """Tell whether a path stands for one checkpoint, and not for a folder of them."""
    return os.path.lexists(path / MANIFEST) or is_checkpoint_name(path.name)


def partial_name(name: str, save_id: str) -> str:
    """Name the directory in which a checkpoint is being saved."""
    return f".{name}.{save_id}.partial"


@dataclass(frozen=True)
class Candidate:
    """A directory that has the name of a checkpoint; ``damage`` if its manifest cannot be used."""

    path: Path
    manifest: Manifest | None
    damage: CheckpointDamaged | None


def candidates(folder: Path) -> list[Candidate]:
    """List the checkpoints in a folder, the newest first, and those whose manifest cannot be used last."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if is_checkpoint_name(entry.name):
                found.append(look_at(Path(entry.path)))
    return sorted(found, key=lambda c: (c.manifest is not None, c.manifest.serial if c.manifest else 0), reverse=True)


def look_at(path: Path) -> Candidate:
    """Read the manifest of one checkpoint."""
    try:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointDamaged(f"{path} is not a directory of its own.", file=path)
        manifest = Manifest.read(path)
        if is_checkpoint_name(path.name) and manifest.name != path.name:
            raise CheckpointDamaged(f"{path / MANIFEST} is the manifest of {manifest.name!r}.", file=path / MANIFEST)
        return Candidate(path, manifest, None)
    except CheckpointDamaged as damage:
        return Candidate(path, None, damage)


@dataclass(frozen=True)
class Latest:
    """What the file ``latest`` says."""

    name: str
    serial: int


def read_latest(folder: Path) -> Latest | None:
    """Read which checkpoint is the latest; None where nothing was saved yet."""
    path = folder / LATEST
    if not os.path.lexists(path):
        return None
    data = read_small(path, 1000)
    try:
        entry = json.loads(data)
        name, serial = entry["checkpoint"], entry["serial"]
        if data != _latest_bytes(name, serial) or not is_checkpoint_name(name) or serial < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointDamaged(f"{path} does not name a checkpoint.", file=path) from None
    return Latest(name, serial)


def write_latest(folder: Path, name: str, serial: int) -> None:
    """Let ``latest`` name another checkpoint."""
    replace_file(folder / LATEST, _latest_bytes(name, serial))
    reached(Moment.LATEST_REPLACED, folder / LATEST)


def _latest_bytes(name: str, serial: int) -> bytes:
    # Of this form and no other, so that a changed byte shows.
    return (json.dumps({"checkpoint": name, "serial": int(serial)}) + "\n").encode()


def next_place(folder: Path, step: int) -> tuple[str, int]:
    """Choose the name and the serial of the next checkpoint; a step that was saved before gets a number behind it."""
    there = candidates(folder)
    serial = 1 + max((c.manifest.serial for c in there if c.manifest), default=0)
    with contextlib.suppress(CheckpointDamaged):
        latest = read_latest(folder)
        serial = max(serial, 1 + latest.serial if latest else 0)
    name, number = f"step-{step:08d}", 0
    while os.path.lexists(folder / name):
        number += 1
        name = f"step-{step:08d}.{number}"
    return name, serial


def remove_litter(folder: Path) -> None:
    """Remove what dead saves left; only while the folder is locked, when there can be no other save."""
    for entry in list(os.scandir(folder)):
        if _LITTER.fullmatch(entry.name):
            remove_tree(Path(entry.path))


def remove_old(folder: Path, keep: int, newest: str) -> None:
    """Keep the newest ``keep`` checkpoints, and for now those that someone reads.

    Each is renamed before it is taken apart, so that half of one never has the name of a checkpoint.
    """
    whole = [c for c in candidates(folder) if c.manifest is not None]
    for candidate in whole[keep:]:
        assert candidate.manifest is not None
        if candidate.path.name == newest or is_in_use(candidate.path):
            continue
        aside = folder / f".{candidate.path.name}.{candidate.manifest.save_id}.removed"
        os.rename(candidate.path, aside)
        sync_directory(folder)
        reached(Moment.OLD_SET_ASIDE, aside)
        remove_tree(aside)
        reached(Moment.OLD_REMOVED, aside)
