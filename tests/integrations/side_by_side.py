"""Run one training program twice, on Lockstep and on torch's own DDP, and compare what came out.

The programs in ``programs/`` know nothing of Lockstep: ``lockstep run`` starts them on it, torchrun on torch's class.
Importing a library takes longer than training a tiny model, so a program trains several cases in one launch and
records each.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import LOCKSTEP, TORCHRUN, run_command

PROGRAMS = Path(__file__).parent / "programs"
WORLD = 2
LAUNCHERS = {
    "lockstep.ddp": [*LOCKSTEP, "run", "--nproc", str(WORLD)],
    "torch.nn.parallel.distributed": [*TORCHRUN, "--standalone", "--nproc-per-node", str(WORLD)],
}


def require(*libraries: str) -> None:
    """Skip a module whose libraries are not there; importing them here would cost seconds in every collection."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[integrations]'", allow_module_level=True)


def launch_on_both(program: str, folder: Path, *arguments: str, limit_s: float = 280) -> dict[str, Path]:
    """Where each side wrote to, by the module its wrapper comes from."""
    folders = {}
    for number, (wrapper, launcher) in enumerate(LAUNCHERS.items()):
        out = folder / str(number)  # of one length on both sides, as paths end up in checkpoints
        out.mkdir(parents=True, exist_ok=True)
        command = [*launcher, PROGRAMS / program, out, *arguments]
        done = run_command(command, cwd=out, env={"HF_HUB_OFFLINE": "1"}, limit_s=limit_s)
        assert done.exit_code == 0, f"{wrapper}: {done}"
        folders[wrapper] = out
    return folders


@dataclass(frozen=True)
class SideBySide:
    """What every rank of both sides recorded: ``by_wrapper[wrapper][rank][case]``."""

    by_wrapper: dict[str, list[dict[str, dict[str, Any]]]]

    @classmethod
    def of(cls, program: str, folder: Path, limit_s: float = 280) -> SideBySide:
        folders = launch_on_both(program, folder, limit_s=limit_s)
        return cls(
            {
                wrapper: [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]
                for wrapper, out in folders.items()
            }
        )

    def check(self, case: str) -> None:
        """The case ran under both wrappers, and all ranks of both end with the same parameters, bit by bit.

        With two ranks every order of summation gives the same bits, so buckets may differ between the sides.
        """
        final = {}
        for wrapper, ranks in self.by_wrapper.items():
            for rank, recorded in enumerate(ranks):
                assert case in recorded, f"{wrapper}, rank {rank}: {case} was not run, only {list(recorded)}"
                assert "error" not in recorded[case], f"{wrapper}, rank {rank}: {recorded[case]['error']}"
                assert recorded[case]["wrapper"] == wrapper
            final[wrapper] = ranks[0][case]["parameters"]
            for recorded in ranks[1:]:
                compare_parameters(recorded[case]["parameters"], final[wrapper])
            assert all(torch.isfinite(value).all() for value in final[wrapper].values())
            start = ranks[0][case]["start"]
            moved = [name for name in start if not torch.equal(start[name], final[wrapper][name])]
            assert moved, "nothing was trained, so nothing is proved"
        ours, theirs = final.values()
        compare_parameters(ours, theirs)


def compare_parameters(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if not torch.equal(ours[name], value):
            raise AssertionError(f"{name} differs by up to {(ours[name] - value).abs().max().item():.3g}")
