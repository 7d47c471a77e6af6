"""A script in the style of nanoGPT, unchanged: the sync flag by hand, a GradScaler, torch.compile, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.side_by_side import compare_parameters, launch_on_both

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(1200)]


def checkpoints_after(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    checkpoints = []
    for wrapper, out in launch_on_both("nanogpt.py", folder, *arguments).items():
        assert (out / "log.txt").read_text().splitlines()[-1].endswith(f"wrapped by {wrapper}")
        checkpoints.append(torch.load(out / "ckpt.pt", weights_only=True))
    return checkpoints


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    compare_parameters(ours["model"], theirs["model"])
    assert ours["scaler"] == theirs["scaler"]
    assert ours["iter_num"] == theirs["iter_num"]
    for index, state in theirs["optimizer"]["state"].items():
        compare_parameters(ours["optimizer"]["state"][index], state)


def test_nanogpt(tmp_path: Path) -> None:
    """Trained for a while, then resumed from its checkpoint with compilation switched on."""
    first, second = checkpoints_after(tmp_path)
    assert_same(first, second)
    assert "lm_head.weight" in first["model"]  # saved from the unwrapped model: no prefix

    first, second = checkpoints_after(tmp_path, "--init_from=resume", "--max_iters=5", "--compile=True")
    assert_same(first, second)
    assert "_orig_mod.lm_head.weight" in first["model"]  # the compiled module is what was wrapped
    assert first["iter_num"] == 5
