"""Saving and loading together: an error on one rank is known on all, and what counts, counts for all."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

import lockstep
from lockstep import torch_private
from lockstep.checkpoint.moments import Moment
from lockstep.testing import inject
from multirank.harness import lockstep_only, run_outcomes, run_ranks
from multirank.test_faults_hangs import shared_pids

pytestmark = lockstep_only
GOOD, BAD = "step-00000001", "step-00000002"


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def attempt(function: Any, *args: Any, **kwargs: Any) -> str:
    """The error of a call, as text."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def save_in_trouble(folder: Path) -> dict[str, Any]:
    """One good save, then one for each kind of trouble on rank 1, each told on all ranks, then a good one."""
    rank = dist.get_rank()
    model, optimizer = build()
    save = lockstep.checkpoint.save
    save(folder, model, optimizer, step=1).wait()
    told = {}
    with inject.fault(Moment.BYTES_WRITTEN, inject.disk_full, rank=1):
        told["disk full"] = attempt(save(folder, model, optimizer, step=2).wait)
    with inject.fault(Moment.PARTIAL_MADE, inject.read_only, rank=0):
        told["read only"] = attempt(save(folder, model, optimizer, step=2).wait)
    handle: list[Any] = []
    extra = {"x": object() if rank == 1 else 1}
    told["state"] = attempt(lambda: handle.append(save(folder, model, optimizer, step=2, extra=extra)))
    if handle:
        told["state"] = attempt(handle[0].wait)
    told["step"] = attempt(save(folder, model, optimizer, step=2 + rank).wait)
    kept = model[1].bias.detach().clone()
    with torch.no_grad():
        model[1].bias[0] += rank
    told["drift"] = attempt(save(folder, model, optimizer, step=2).wait)
    names = sorted(entry.name for entry in folder.iterdir())
    dist.barrier()
    with torch.no_grad():
        model[1].bias.copy_(kept)
    keys = []
    for step in range(2, 6):
        save(folder, model, optimizer, step=step, keep=2).wait()
        dist.barrier()
        keys.append(torch_private.default_store().num_keys())
        dist.barrier()
    return {"told": told, "names": names, "keys": keys, "left": sorted(entry.name for entry in folder.iterdir())}


def test_an_error_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    results = run_ranks(3, save_in_trouble, tmp_path)
    for rank, result in enumerate(results):
        told = result["told"]
        assert "Rank 1: OSError: [Errno 28]" in told["disk full"]
        assert "rank-00001.safetensors" in told["disk full"]
        assert "Rank 0: OSError: [Errno 30]" in told["read only"]
        assert "extra/x is a builtins.object" in told["state"]
        assert told["state"].startswith("TypeError" if rank == 1 else "CheckpointFailed")
        assert "Ranks save different steps" in told["step"]
        assert "rank 2 | step 4" in told["step"]
        assert "Rank 1 holds other values than rank 0 in 1 of 8 tensors" in told["drift"]
        assert "model/1.bias" in told["drift"]
        assert result["names"] == ["latest", GOOD]  # no litter
        assert result["left"] == ["latest", "step-00000004", "step-00000005"]
        assert result["keys"][1:] == result["keys"][1:2] * 3  # keys of earlier saves are removed


def save_once(folder: Path, step: int, seed: int) -> None:
    lockstep.checkpoint.save(folder, *build(seed), step=step).wait()


def load_all(folder: Path, **options: Any) -> Any:
    """What was loaded, or the error; nothing is changed by an error."""
    model, optimizer = build(seed=7)
    before = model[0].weight.clone()
    try:
        loaded = lockstep.checkpoint.load(folder, model, optimizer, **options)
    except Exception as error:
        assert torch.equal(model[0].weight, before)
        return f"{type(error).__name__}: {error}"
    assert loaded is not None
    return loaded.path.name


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def load_damaged(folder: Path) -> dict[str, Any]:
    rank, told = dist.get_rank(), {}
    cases = {
        "flipped": lambda path: flip(path / "rank-00001.safetensors"),
        "own state": lambda path: flip(path / "rank-00002.json"),
        "missing": lambda path: (path / "rank-00000.json").unlink(),
        "swapped": lambda path: swap(path / "rank-00001.safetensors", path / "rank-00002.safetensors"),
        "swapped states": lambda path: swap(path / "rank-00001.json", path / "rank-00002.json"),
    }
    for name, damage in cases.items():
        copy = folder.with_name(name)
        if rank == 0:
            shutil.copytree(folder, copy)
            damage(copy / BAD)
        dist.barrier()
        told[name] = [load_all(copy), load_all(copy, fallback=True)]
    return told


def test_damage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_ranks(3, save_once, folder, 1, 0)
    run_ranks(3, save_once, folder, 2, 3)
    for told in run_ranks(3, load_damaged, folder):
        for error, fallen_back in told.values():
            assert error.startswith("CheckpointDamaged: The checkpoint")
            assert f"The last complete checkpoint is {tmp_path}" in error
            assert fallen_back == GOOD
        assert f"{BAD}/rank-00001.safetensors is not the file that was saved" in told["flipped"][0]
        assert "rank-00002.json" in told["own state"][0]
        assert "rank-00000.json is missing" in told["missing"][0]
        assert "rank-0000" in told["swapped"][0]


def save_and_die(folder: Path, rank: int, number: int) -> None:
    model, optimizer = build()
    lockstep.checkpoint.save(folder, model, optimizer, step=1).wait()
    model, optimizer = build(seed=3)
    with inject.fault(None, inject.kill, number=number, rank=rank), contextlib.suppress(lockstep.errors.LockstepError):
        lockstep.checkpoint.save(folder, model, optimizer, step=2).wait()


def load_and_go_on(folder: Path) -> tuple[str, list[str], float]:
    model, optimizer = build(seed=5)
    loaded = lockstep.checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    weight = model[0].weight[0, 0].item()
    lockstep.checkpoint.save(folder, model, optimizer, step=3).wait()
    return loaded.path.name, sorted(entry.name for entry in folder.iterdir()), weight


def killed_while_saving(folder: Path, rank: int, number: int) -> str:
    outcomes = run_outcomes(3, save_and_die, folder, rank, number)
    assert [outcome.exit_status for outcome in outcomes] == [-9 if r == rank else 0 for r in range(3)]
    results = run_ranks(3, load_and_go_on, folder)
    name, left, _ = results[0]
    assert results == [results[0]] * 3
    assert set(left) == {"latest", GOOD, "step-00000003", name}  # no litter
    model, _ = build(seed=0 if name == GOOD else 3)
    assert results[0][2] == model[0].weight[0, 0].item()
    return name


@pytest.mark.parametrize(("rank", "number", "found"), [(1, 2, GOOD), (2, 6, GOOD), (0, 9, GOOD), (0, 26, BAD)])
def test_killed_while_saving(tmp_path: Path, rank: int, number: int, found: str) -> None:
    assert killed_while_saving(tmp_path, rank, number) == found


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.soak] * (n % 6 > 0)) for n in range(1, 27)])
def test_rank_zero_killed_at_every_moment(tmp_path: Path, number: int) -> None:
    killed_while_saving(tmp_path, 0, number)


def save_while_one_is_stopped(folder: Path, who: int) -> str:
    """A rank stands still before it has written its part; the others say so, and then let it go on."""
    rank, pids = dist.get_rank(), shared_pids()
    model, optimizer = build()
    lockstep.checkpoint.save(folder, model, optimizer, step=1).wait()
    with inject.fault(Moment.FILE_OPENED, inject.stop, rank=who):
        told = attempt(lockstep.checkpoint.save(folder, model, optimizer, step=2).wait)
    if rank == 2:
        os.kill(pids[who], signal.SIGCONT)
    return told


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_stopped_while_saving_is_an_error_at_the_deadline(tmp_path: Path, who: int) -> None:
    told = run_ranks(3, save_while_one_is_stopped, tmp_path, who, env={"LOCKSTEP_HEARTBEAT_TIMEOUT": "4"})
    assert all(text.startswith("CheckpointFailed: ") for text in told), told
    assert f"Rank(s) [{who}] gave no sign of life for 4 s" in told[2]
    assert f"Rank(s) [{who}] are stopped, by SIGSTOP" in told[2]
    assert "had given up rank 0" in told[0] or who != 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", GOOD]


def not_shared(folder: Path) -> str:
    model, optimizer = build()
    place = folder / ("here" if dist.get_rank() == 0 else "there")
    place.mkdir(parents=True, exist_ok=True)
    return attempt(lambda: lockstep.checkpoint.save(place, model, optimizer, step=1).wait())


def test_a_file_system_that_is_not_shared(tmp_path: Path) -> None:
    """Each host with a disk of its own: rank 1 finds no directory of rank 0's."""
    for text in run_ranks(2, not_shared, tmp_path):
        assert "Rank 1: FileNotFoundError" in text
        assert "on a file system that all ranks share" in text


def test_per_rank_state(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(3, save_own, tmp_path)):
        assert result == {"mine": rank, "list": [rank] * 2}


def save_own(folder: Path) -> Any:
    rank = dist.get_rank()
    model, _ = build()
    per_rank = {"mine": torch.tensor(rank), "list": (rank, rank)}
    lockstep.checkpoint.save(folder, model, step=0, per_rank=per_rank).wait()
    loaded = lockstep.checkpoint.load(folder, model)
    assert loaded is not None
    assert json.loads((folder / "latest").read_text())["checkpoint"] == "step-00000000"
    return {"mine": loaded.per_rank["mine"].item(), "list": list(loaded.per_rank["list"])}


def load_from_a_file(path: Path) -> str:
    model, _ = build()
    return attempt(lockstep.checkpoint.load, path, model, missing_ok=True)


def test_a_folder_that_cannot_be_read_is_told_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, *others = run_ranks(3, load_from_a_file, tmp_path / "file")
    assert first.startswith("NotADirectoryError")
    for told in others:
        assert told.startswith("CheckpointFailed: No checkpoint could be looked for")
        assert "rank 0 | NotADirectoryError" in told


def are_equal(first: Any, second: Any) -> bool:
    (mine, shape), (theirs, other) = tree_flatten(first), tree_flatten(second)
    pairs = zip(mine, theirs, strict=True)
    return shape == other and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


class Stubborn:
    """Takes half of its state, and refuses the rest on rank 1."""

    def __init__(self) -> None:
        self.taken = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["taken"] == [7]:
            self.taken[0], self.half = 7, "there"
            if dist.get_rank() == 1:
                raise RuntimeError("not today")
        else:
            self.taken[0] = state["taken"][0]


def load_stubborn(folder: Path) -> tuple[str, bool]:
    """Save, train on, and try to load: everything is as it was before, on both ranks."""
    model, optimizer = build()
    scheduler, stubborn = torch.optim.lr_scheduler.StepLR(optimizer, 1), Stubborn()
    average, generator = torch.optim.swa_utils.AveragedModel(model), torch.Generator()
    stubborn.taken = [7]
    objects = {"scheduler": scheduler, "extra": {"average": average, "last": stubborn}}
    save = partial(lockstep.checkpoint.save, folder, model, optimizer, per_rank={"data": generator}, **objects)
    save(step=1).wait()
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    stubborn.taken = [0]
    torch.rand(3), torch.rand(3, generator=generator)

    def state() -> Any:
        objects = [part.state_dict() for part in (model, optimizer, scheduler, average)]
        return copy.deepcopy([*objects, vars(stubborn), torch.get_rng_state(), generator.get_state()])

    before = state()
    told = attempt(lockstep.checkpoint.load, folder, model, optimizer, per_rank={"data": generator}, **objects)
    return told, are_equal(state(), before)


def test_an_object_that_refuses_its_state_is_told_on_all_and_nothing_is_changed(tmp_path: Path) -> None:
    (told0, same0), (told1, same1) = run_ranks(2, load_stubborn, tmp_path)
    assert told1 == "RuntimeError: not today"
    assert told0.startswith("CheckpointFailed: The checkpoint was not loaded")
    assert "rank 1 | RuntimeError: not today" in told0
    assert (same0, same1) == (True, True)
