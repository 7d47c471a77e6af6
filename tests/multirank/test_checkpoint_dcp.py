"""Both ways between our checkpoints and those of torch.distributed.checkpoint, sharded on either side."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lockstep
from lockstep.errors import CheckpointDamaged
from multirank.checkpoint_runs import whole_state
from multirank.compare import assert_identical
from multirank.harness import lockstep_only, run_ranks
from multirank.test_checkpoint_sharded import build, save, step

pytestmark = lockstep_only


def save_with_dcp(folder: Path) -> dict[str, Any]:
    model, optimizer = build("sharded", seed=0)
    for number in range(2):
        step(model, optimizer, number)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "epoch": 3}, checkpoint_id=str(folder))
    return whole_state(model, optimizer)


def load_with_dcp(folder: Path) -> dict[str, Any]:
    model, optimizer = build("sharded", seed=4)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole_state(model, optimizer)


def load_ours(folder: Path) -> tuple[dict[str, Any], Any]:
    model, optimizer = build("sharded", seed=4)
    loaded = lockstep.checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    return whole_state(model, optimizer), loaded.extra


def test_to_dcp(tmp_path: Path) -> None:
    saved = run_ranks(3, save, tmp_path / "ours", "sharded")[0]["saved"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = lockstep.checkpoint.export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "ours"]
    for rank, state in enumerate(run_ranks(2, load_with_dcp, made)):
        assert_identical(state, saved, f"rank {rank}")
    with pytest.raises(FileExistsError):
        lockstep.checkpoint.export_dcp(tmp_path / "ours", tmp_path / "dcp")


def test_from_dcp(tmp_path: Path) -> None:
    saved = run_ranks(3, save_with_dcp, tmp_path / "dcp")[0]
    made = lockstep.checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "ours", step=2)
    assert made == tmp_path / "ours" / "step-00000002"
    for rank, (state, extra) in enumerate(run_ranks(2, load_ours, tmp_path / "ours")):
        assert_identical(state, saved, f"rank {rank}")
        assert extra == {"epoch": 3}


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("bomb went off",)


def test_a_bomb_does_not_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": nn.Linear(2, 2).state_dict(), "x": Bomb()}, checkpoint_id=str(source), no_dist=True)
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        lockstep.checkpoint.import_dcp(source, tmp_path / "ours", step=0)
    (source / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointDamaged, match=r"asks for posix\.mkdir"):
        lockstep.checkpoint.import_dcp(source, tmp_path / "ours", step=0)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_positions_in_place_of_names_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(ValueError, match="get_optimizer_state_dict"):
        lockstep.checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "ours", step=0)
    with pytest.raises(ValueError, match="no model at 'app"):
        lockstep.checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "ours", step=0, model_key="app.model")
