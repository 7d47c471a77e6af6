"""The wrapper in a world of one: its arguments, what it says of itself, and how it stands to torch's class."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

import lockstep

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize("text", ["foo", "[1]", "{}", '"text"', '{"format": 1}'])
def test_a_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match=r"plan= takes a lockstep.Plan or the text that plan.to_json\(\) returned"):
        lockstep.DDP(nn.Linear(2, 2), plan=text)


def test_an_object_that_is_no_plan() -> None:
    with pytest.raises(TypeError, match="plan= takes"):
        lockstep.DDP(nn.Linear(2, 2), plan=Path("plan.json"))  # type: ignore[arg-type]


BAD = {
    "bucket_order": "sorted",
    "overlap": "always",
    "check": "never",
    "gradient_as_bucket_view": "yes",
    "bucket_cap_mb": -1,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_word_names_its_argument(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        lockstep.DDP(nn.Linear(2, 2), **{name: BAD[name]})  # type: ignore[arg-type]


def test_what_is_no_module_and_what_is_no_group() -> None:
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module, got int"):
        lockstep.DDP(3)  # type: ignore[arg-type]
    nobody = torch.distributed.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to those who are not in it
    with pytest.raises(TypeError, match="process_group must be a process group that this rank belongs to, got -100"):
        lockstep.DDP(nn.Linear(2, 2), process_group=nobody)  # type: ignore[arg-type]


def test_a_deprecated_argument_blames_its_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.DDP(nn.Linear(2, 2), broadcast_buffers=True, check_reduction=True)
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)] * 2


def grad_pointers(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]


def test_lazy_buckets_are_not_kept() -> None:
    """With both options, old gradients stay what they were: the buffer of a step belongs to that step."""
    model = lockstep.DDP(nn.Linear(4, 4), gradient_as_bucket_view=True, lazy_bucket_allocation=True)
    assert model.lazy_bucket_allocation is True
    assert model.gradient_as_bucket_view is True
    model(torch.ones(2, 4)).sum().backward()
    kept = [p.grad for p in model.parameters()]
    before = [g.clone() for g in kept if g is not None]
    model.zero_grad()
    model(3 * torch.ones(2, 4)).sum().backward()
    assert all(torch.equal(old, value) for old, value in zip(kept, before, strict=True) if old is not None)
    with pytest.raises(TypeError, match="lazy_bucket_allocation"):
        lockstep.DDP(nn.Linear(2, 2), lazy_bucket_allocation="yes")  # type: ignore[arg-type]


def test_metrics_of_the_last_step() -> None:
    model = lockstep.DDP(nn.Linear(4, 4))
    assert model.metrics() == {}
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        values = model.metrics()
        assert values["lockstep/step"] == step
    assert values["lockstep/bytes"] == 4 * 20
    assert values["lockstep/buckets"] == 1
    assert all(isinstance(value, (int, float)) for value in values.values())


def test_export_says_what_to_export() -> None:
    model = lockstep.DDP(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"export lockstep.unwrap\(model\)"):
        torch.export.export(model, (torch.ones(2, 4),))
    torch.export.export(lockstep.unwrap(model), (torch.ones(2, 4),))


def test_the_active_module_is_restored_for_each_class() -> None:
    model, torchs = lockstep.DDP(nn.Linear(2, 2)), nn.parallel.DistributedDataParallel
    other: Any = object()
    torchs._active_ddp_module = other
    try:
        with model._inside_ddp_forward():
            assert lockstep.DDP._active_ddp_module is model
            assert torchs._active_ddp_module is model
        assert lockstep.DDP._active_ddp_module is None
        assert torchs._active_ddp_module is other
    finally:
        torchs._active_ddp_module = None


def test_the_wrapper_goes_with_its_last_reference() -> None:
    """No part holds its owner, so nothing has to be collected."""
    module = nn.Linear(2, 2)
    model = lockstep.DDP(module)
    model(torch.ones(2, 2)).sum().backward()
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_it_is_joinable_and_torchs_class() -> None:
    model = lockstep.DDP(nn.Linear(2, 2))
    assert isinstance(model, Joinable)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert model._join_config.enable is False


PROGRAM = """
import torch, lockstep
net = torch.nn.Linear(2, 2)
model: torch.nn.parallel.DistributedDataParallel = lockstep.DDP(net)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_type_checkers_take_it_for_torchs_class(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    source = Path(lockstep.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
