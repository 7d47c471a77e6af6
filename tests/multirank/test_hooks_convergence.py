"""The demo's GPT still learns with compressed gradients, within a margin per hook, and sends few bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The first test waits for the benchmark.
pytestmark = pytest.mark.timeout(1600)

ROOT = Path(__file__).parents[2]
# How far above the uncompressed loss a hook may end after 80 steps: about twice what was seen when the margins were
# set (0, 5, 23 and 37 %), so they catch a hook that got worse. Top-k is slow to learn here; docs/hooks.md says so.
MARGIN = {"bf16": 0.03, "int8": 0.10, "topk 0.1": 0.40, "topk 0.01": 0.60}
# And even the slowest must have learned: this far below the loss of the first step.
LEARNED = 0.9
# Against a hang only: it takes a minute on two idle cores, and many on busy ones.
LIMIT_S = 1500
FEWER_BYTES = {"bf16": 2.0, "int8": 3.8, "topk 0.1": 6.5, "topk 0.01": 60.0}
# bf16 only rounds (hooks/test_ranks.py holds it to that), and the other top-k is the same hook with fewer elements.
CHOSEN = ("int8", "topk 0.1")
HOOKS = [pytest.param(hook, marks=[] if hook in CHOSEN else pytest.mark.soak) for hook in MARGIN]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the hooks that are asked for in this run of the tests."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [item.callspec.params for item in ours]
    hooks = [hook for hook in MARGIN if {"hook": hook} in asked] or CHOSEN
    file = tmp_path_factory.mktemp("convergence") / "results.json"
    command = [sys.executable, "benchmarks/hooks_convergence.py", "--steps", "80", "--json", str(file)]
    command += ["--hooks", *hooks]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_loss_stays_near_the_uncompressed_one(results: dict[str, Any], hook: str) -> None:
    plain = results["none"]
    assert plain["held_out_loss"] < 0.75 * plain["losses"][0], "the uncompressed run itself learned nothing"
    assert results[hook]["held_out_loss"] < (1 + MARGIN[hook]) * plain["held_out_loss"]
    assert results[hook]["held_out_loss"] < LEARNED * plain["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_fewer_bytes_travel(results: dict[str, Any], hook: str) -> None:
    assert results[hook]["bytes_uncompressed"] == pytest.approx(results["none"]["bytes_on_wire"], rel=1e-3)
    assert results[hook]["bytes_uncompressed"] >= FEWER_BYTES[hook] * results[hook]["bytes_on_wire"]


@pytest.mark.slow
def test_all_ranks_end_with_the_same_weights(results: dict[str, Any]) -> None:
    assert {hook: result["ranks_equal"] for hook, result in results.items()} == dict.fromkeys(results, True)
