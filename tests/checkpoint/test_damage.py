"""Damage: whatever happened to the files, it is refused before any tensor is used, and the last good one is offered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockstep
from checkpoint.runs import Run
from lockstep.checkpoint.disk import digest_of
from lockstep.checkpoint.manifest import Manifest
from lockstep.errors import CheckpointDamaged, NoCheckpoint

FIRST, SECOND = "step-00000002", "step-00000004"
FILES = ("manifest.json", "state.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run."""
    folder, run = tmp_path_factory.mktemp("saved") / "checkpoints", Run()
    run.train(2)
    run.save(folder)
    run.train(2)
    run.save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True))


def refused(folder: Path, file: str) -> CheckpointDamaged:
    """Loading is refused by the name of the file, and changes nothing."""
    run = Run(seed=5)
    before = run.bits()
    with pytest.raises(CheckpointDamaged) as caught:
        run.load(folder)
    assert file in str(caught.value)
    assert caught.value.file is not None
    assert caught.value.file.name == Path(file).name
    assert run.bits() == before
    return caught.value


def falls_back(folder: Path, to: str) -> None:
    damage = refused_offer(folder)
    assert damage.last_complete == folder / to
    assert f"The last complete checkpoint is {folder / to}" in str(damage)
    run = Run(seed=5)
    assert run.load(folder, fallback=True).path == folder / to


def refused_offer(folder: Path) -> CheckpointDamaged:
    with pytest.raises(CheckpointDamaged) as caught:
        Run(seed=5).load(folder)
    return caught.value


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_flipped_byte(saved: Path, file: str, place: float, flip: int) -> None:
    path = saved / SECOND / file
    data = path.read_bytes()
    changed = bytearray(data)
    changed[int(place * len(data))] ^= flip
    try:
        path.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=file) as caught:
            Run(seed=5).load(saved)
        assert caught.value.last_complete == saved / FIRST
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("cut", [0, 1, 0.5, -1], ids=["to 0", "to 1", "half", "by 1"])
def test_truncated(folder: Path, file: str, cut: float) -> None:
    path = folder / SECOND / file
    size = path.stat().st_size
    os.truncate(path, int(size * cut) if isinstance(cut, float) else cut % size)
    refused(folder, f"{SECOND}/{file}")
    falls_back(folder, FIRST)


@pytest.mark.parametrize("file", FILES)
def test_grown(folder: Path, file: str) -> None:
    with (folder / SECOND / file).open("ab") as stream:
        stream.write(b"\0")
    refused(folder, f"{SECOND}/{file}")


@pytest.mark.parametrize("file", FILES)
def test_missing(folder: Path, file: str) -> None:
    (folder / SECOND / file).unlink()
    refused(folder, f"{SECOND}/{file}")
    falls_back(folder, FIRST)


@pytest.mark.parametrize("file", FILES)
def test_from_another_step(folder: Path, file: str) -> None:
    shutil.copyfile(folder / FIRST / file, folder / SECOND / file)
    text = str(refused(folder, f"{SECOND}/{file}"))
    if file == "manifest.json":
        assert f"the manifest of '{FIRST}'" in text


def test_a_file_says_where_it_comes_from(folder: Path) -> None:
    """Of the same size, so that it takes the digest to see it."""
    first, second = (folder / step / "rank-00000.safetensors" for step in (FIRST, SECOND))
    assert first.stat().st_size == second.stat().st_size
    shutil.copyfile(first, second)
    assert "from another save, of step 2" in str(refused(folder, f"{SECOND}/rank-00000.safetensors"))


def test_a_whole_checkpoint_under_another_name(folder: Path) -> None:
    shutil.rmtree(folder / SECOND)
    shutil.copytree(folder / FIRST, folder / SECOND)
    refused(folder, f"{SECOND}/manifest.json")


@pytest.mark.parametrize("file", FILES)
def test_a_link_in_the_place_of_a_file(folder: Path, tmp_path: Path, file: str) -> None:
    path = folder / SECOND / file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in str(refused(folder, f"{SECOND}/{file}"))


def test_a_link_in_the_place_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / SECOND).rename(tmp_path / SECOND)
    (folder / SECOND).symlink_to(tmp_path / SECOND)
    refused(folder, SECOND)
    falls_back(folder, FIRST)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_not_a_file(folder: Path, make: Callable[[Path], None]) -> None:
    path = folder / SECOND / "state.json"
    path.unlink()
    make(path)
    refused(folder, f"{SECOND}/state.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step-00000004",
        '{"checkpoint": "../../etc", "serial": 2}\n',
        '{"checkpoint": "step-00000009", "serial": 9}\n',
    ],
    ids=["empty", "other form", "path traversal", "missing checkpoint"],
)
def test_latest_is_damaged(folder: Path, text: str) -> None:
    (folder / "latest").write_text(text)
    refused(folder, "latest")
    falls_back_from_latest(folder)


def falls_back_from_latest(folder: Path) -> None:
    assert refused_offer(folder).last_complete == folder / SECOND
    assert Run().load(folder, fallback=True).path == folder / SECOND


def test_the_latest_checkpoint_is_gone(folder: Path) -> None:
    shutil.rmtree(folder / SECOND)
    assert refused(folder, "latest").last_complete == folder / FIRST


def test_without_latest_the_newest_counts(folder: Path) -> None:
    """A process may be killed between the rename that completes a checkpoint and the update of `latest`."""
    (folder / "latest").unlink()
    assert Run().load(folder).path == folder / SECOND


def test_all_are_damaged(folder: Path) -> None:
    for step in (FIRST, SECOND):
        (folder / step / "state.json").unlink()
    assert "no other complete checkpoint" in str(refused(folder, f"{SECOND}/state.json"))
    with pytest.raises(CheckpointDamaged):
        Run().load(folder, fallback=True)


def forge(directory: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file on purpose, and the manifest with it: every digest is right."""
    content = json.loads((directory / file).read_bytes())
    change(content)
    data = json.dumps(content).encode()
    (directory / file).write_bytes(data)
    manifest = Manifest.read(directory)
    files = {**manifest.files, file: (len(data), digest_of(data))}
    (directory / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "not a tree": ("state.json", lambda tree: tree.update(shared=[])),
    "no model": ("state.json", lambda tree: tree["shared"].pop("model")),
    "the model is a list": ("state.json", lambda tree: tree["shared"].update(model=[])),
    "unknown kind": ("state.json", lambda tree: tree["shared"]["extra"].update(x={"$": "pickle", "v": "gASV"})),
    "a plan that is none": ("state.json", lambda tree: tree["shared"].update(plan="[]")),
    "groups are numbers": ("state.json", lambda tree: tree["shared"]["optimizer"].update(param_groups=[1])),
    "params are numbers": (
        "state.json",
        lambda tree: tree["shared"]["optimizer"]["param_groups"][0].update(params=[0]),
    ),
    "no random numbers": ("rank-00000.json", lambda tree: tree["own"].pop("rng")),
    "random numbers of another shape": (
        "rank-00000.json",
        lambda tree: tree["own"]["rng"]["python"]["v"][1]["v"].pop(),
    ),
    "random numbers of a kind": (
        "rank-00000.json",
        lambda tree: tree["own"]["rng"].update(numpy={"key": [1], "pos": 0}),
    ),
    "a tensor by its number": ("state.json", lambda tree: tree["shared"]["model"]["0.weight"].update(v=3)),
    "own tensors by numbers": ("rank-00000.json", lambda tree: tree["own"]["rng"]["torch"].update(v=0)),
    "bad bytes": ("rank-00000.json", lambda tree: tree["own"]["per_rank"].update(x={"$": "bytes", "v": "?"})),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_state_is_refused(folder: Path, name: str) -> None:
    file, change = FORGED[name]
    forge(folder / SECOND, file, change)
    refused(folder, f"{SECOND}/{file}")


def test_forged_names_of_tensors_fit_nothing(folder: Path) -> None:
    def point_elsewhere(tree: dict[str, Any]) -> None:
        tree["shared"]["model"]["0.weight"]["v"] = "../../secret"

    forge(folder / SECOND, "state.json", point_elsewhere)
    with pytest.raises(ValueError, match=r"it has no tensor '\.\./\.\./secret'"):
        Run().load(folder)


def test_forged_values_in_the_place_of_tensors_fit_nothing(folder: Path) -> None:
    def put_values(tree: dict[str, Any]) -> None:
        tree["shared"]["model"]["0.weight"] = 1.5
        tree["shared"]["optimizer"]["state"]["0.bias"] = None

    forge(folder / SECOND, "state.json", put_values)
    run = Run(seed=5)
    before = run.bits()
    with pytest.raises(ValueError, match=r"0.weight is a tensor in the model.*\n.*for 0.bias is no state there"):
        run.load(folder)
    assert run.bits() == before


def test_verify_reads_everything(folder: Path) -> None:
    lockstep.checkpoint.verify(folder)
    path = folder / SECOND / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    lockstep.checkpoint.verify(folder / FIRST)
    with pytest.raises(CheckpointDamaged, match=FIRST):
        lockstep.checkpoint.verify(folder)


def test_there_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / FIRST):
        with pytest.raises(NoCheckpoint, match="no checkpoint"):
            lockstep.checkpoint.load(path, Run().model)
        assert lockstep.checkpoint.load(path, Run().model, missing_ok=True) is None
        assert lockstep.checkpoint.latest(path) is None
    with pytest.raises(FileNotFoundError):
        lockstep.checkpoint.verify(tmp_path)
