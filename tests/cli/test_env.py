"""``lockstep env``."""

from __future__ import annotations

import json
import platform

import pytest
import torch

import lockstep
from launching import LOCKSTEP, run_command
from lockstep.cli.env import is_tested_torch


def test_json_holds_what_is_true_here() -> None:
    done = run_command([*LOCKSTEP, "env", "--json"], env={"LOCKSTEP_BACKEND": "gloo", "UNRELATED_SECRET": "hidden"})
    assert done.exit_code == 0, done
    facts = json.loads(done.output)
    assert facts["versions"]["lockstep"] == lockstep.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["torch_tested"]["inside"] is is_tested_torch(torch.__version__)
    assert facts["backends"]["gloo"]["usable"] is True
    assert facts["backends"]["nccl"]["usable"] is (torch.cuda.is_available())
    assert set(facts["backends"]) == {"gloo", "nccl", "mpi", "ucc"}
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert 1 <= facts["cores"]["usable"] <= facts["cores"]["in_machine"]
    assert facts["variables"]["LOCKSTEP_BACKEND"] == "gloo"
    assert "UNRELATED_SECRET" not in facts["variables"]


def test_table_shows_versions_and_backends() -> None:
    done = run_command([*LOCKSTEP, "env"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done
    for word in (torch.__version__, lockstep.__version__, "gloo", "nccl", "cores", "GPUs"):
        assert word in done.output


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.14.0", False), ("3.0.0a0+git12", False)],
)
def test_tested_range(version: str, inside: bool) -> None:
    assert is_tested_torch(version) is inside
