"""``lockstep precompile`` with scripts as people write them, and as they should not."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launching import LOCKSTEP, run_command

ROOT = Path(__file__).parents[2]

# The compiler is left out: what is tested is the way of a script, not what is compiled.
HEAD = """
import argparse, copy, os, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import lockstep
from lockstep import torch_private

torch_private.compile_program = lambda graph, *_: graph
torch_private.save_compiled = lambda: (b"graphs", 1)
torch_private.compiled_libraries = dict

def loss(model, batch):
    return model(batch).square().mean()

def made(width=4, mode="graph", cycles=False, **options):
    torch.manual_seed(0)
    model = lockstep.DDP(nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100) if cycles else None
    return lockstep.TrainStep(model, optimizer, loss, mode=mode, scheduler=schedule, **options)
"""


def precompile(tmp_path: Path, body: str, *words: str, world: int = 3, script: str = "train.py") -> Any:
    path = tmp_path / script
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body))
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [*LOCKSTEP, "precompile", path, "--world", str(world), "--out", tmp_path / "out", *words]
    return run_command(command, env=environment, cwd=tmp_path, limit_s=300.0)


def artifacts(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").glob("*"))


def test_a_script_with_arguments_variables_groups_objects_and_workers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    body = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DataLoader, TensorDataset
    import beside

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, required=True)
        options = parser.parse_args()
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        for name in ("TORCHELASTIC_RUN_ID", "ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
            os.environ[name]
        assert (rank, local, world) == (0, 0, 3)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))  # begins the process group
        assert dist.get_world_size(mesh.get_group("data")) == 3
        dist.barrier()
        dist.monitored_barrier()
        told = [None] * world
        dist.all_gather_object(told, {"rank": rank})
        assert told == [{"rank": 0}] * 3, told
        told = ["a", None]
        dist.broadcast_object_list(told, src=0)
        assert told == ["a", None]
        dist.broadcast_object_list(told, src=2)
        gathered = [None] * world
        dist.gather_object("here", gathered, dst=0)
        assert gathered == ["here"] * 3
        mine = [None]
        dist.scatter_object_list(mine, ["first", "second", "third"], src=0)
        assert mine == ["first"]
        pair = dist.new_group([0, 1], backend="gloo")
        assert dist.get_world_size(pair) == 2
        dist.new_group([1, 2])
        counts = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(counts, torch.ones(1))
        dist.all_reduce(torch.ones(1), group=pair)
        step = made(beside.WIDTH)
        loader = DataLoader(TensorDataset(torch.ones(64, beside.WIDTH)), batch_size=4, num_workers=1)
        for index, (batch,) in enumerate(loader):
            if index == options.steps:
                break
            step(batch)
            print("step", index)
        raise AssertionError("is left before")

    if __name__ == "__main__":
        main()
    """
    done = precompile(tmp_path, body, "--", "--steps", "12")
    assert done.exit_code == 0, done
    assert done.lines[:2] == ["step 0", "step 1"]
    assert "step 3" not in done.lines
    assert artifacts(tmp_path) == ["step-0.lockstep"]


def test_a_module_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "package" / "train.py").write_text(
        HEAD
        + textwrap.dedent("""
        from .beside import WIDTH
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            step = made(width=WIDTH)
            while True:
                step(torch.ones(2, int(sys.argv[1])))
        """)
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    words = ["precompile", "-m", "package.train", "--world", "2", "--out", tmp_path / "out", "--", "5"]
    done = run_command([*LOCKSTEP, *words], env=environment, cwd=tmp_path, limit_s=300.0)
    assert done.exit_code == 0, done
    assert artifacts(tmp_path) == ["step-0.lockstep"]


def test_several_steps_are_all_waited_for(tmp_path: Path) -> None:
    body = """
    dist.init_process_group("nccl", init_method="tcp://10.1.2.3:1", rank=0, world_size=3)
    one, other, never, looping = made(cycles=True), made(7), made(8), made(mode="loop")
    for index in range(30):
        one(torch.ones(2, 4))
        looping(torch.ones(2, 4))
        if index % 2:
            other(torch.ones(2, 7))
    sys.exit(0)
    """
    done = precompile(tmp_path, body)
    assert done.exit_code == 1
    assert artifacts(tmp_path) == ["step-0.lockstep", "step-1.lockstep", "step-3.lockstep"]
    assert "TrainStep 2 of the script: Nothing was compiled that could be saved, of this step" in done.errors


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raise ValueError('no data')", 1, "the script raised ValueError"),
        ("sys.exit(5)", 5, "the script ended by sys.exit(5)"),
    ],
)
def test_a_script_that_ends_early_leaves_what_was_made(end: str, status: int, words: str, tmp_path: Path) -> None:
    body = f"dist.init_process_group()\nstep = made()\nfor _ in range(2): step(torch.ones(2, 4))\n{end}\n"
    done = precompile(tmp_path, body)
    assert done.exit_code == status, done
    assert words in done.errors
    assert artifacts(tmp_path) == ["step-0.lockstep"]


def test_a_script_that_catches_everything_is_left_all_the_same(tmp_path: Path) -> None:
    body = """
    dist.init_process_group()
    step = made()
    while True:
        try:
            step(torch.ones(2, 4))
        except:
            print("once more")
    """
    done = precompile(tmp_path, body)
    assert done.exit_code == 0, done
    assert done.lines.count("once more") == 3
    assert artifacts(tmp_path) == ["step-0.lockstep"]


def test_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lockstep.cli.precompile import precompile as command

    (tmp_path / "out").write_text("a file")
    (tmp_path / "train.py").write_text("")
    assert command([str(tmp_path / "train.py"), "--world", "2", "--out", str(tmp_path / "out")]) == 2
    assert "out cannot be a folder" in capsys.readouterr().err
