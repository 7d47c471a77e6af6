"""The demo, with few steps: it trains, and ends with something a person can look at."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from launching import EXAMPLES, LOCKSTEP, Finished, run_command

SMALL = ["--steps", "12", "--batch", "4", "--context", "32", "--width", "32", "--layers", "2", "--lr", "0.01"]


def check(done: Finished, out: Path, num_ranks: int) -> None:
    assert done.exit_code == 0, done
    steps = re.findall(r"step +(\d+)/12  loss (\S+)  ([\d,]+) tokens/s", done.output)
    assert [int(number) for number, _, _ in steps] == list(range(1, 13))  # once each: from rank 0 only
    losses = [float(loss) for _, loss, _ in steps]
    assert losses[-1] < losses[0] - 0.1
    assert "Plan\n" in done.output
    assert re.search(r"blocks.0.\w+.weight|symbols.weight", done.output)
    exposed = re.findall(r"rank (\d+): (\S+) ms of (\S+) ms forward and backward", done.output)
    assert [int(rank) for rank, _, _ in exposed] == list(range(num_ranks))
    assert all(float(waited) >= 0 and float(busy) > 0 for _, waited, busy in exposed)
    assert "The model writes\n" in done.output
    assert f"Report: {out / 'report.html'}" in done.output
    page = (out / "report.html").read_text()
    for rank in range(num_ranks):
        assert f"rank {rank}: backward, " in page


@pytest.mark.multirank
@pytest.mark.slow
def test_demo_on_two_ranks(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "run", "--nproc", "2", EXAMPLES / "train_gpt.py", *SMALL, "--out", tmp_path]
    check(run_command(command, limit_s=400), tmp_path, num_ranks=2)


@pytest.mark.multirank
@pytest.mark.slow
def test_demo_sharded_on_two_ranks(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "run", "--nproc", "2", EXAMPLES / "train_gpt.py", *SMALL, "--out", tmp_path, "--shard"]
    done = run_command(command, limit_s=400)
    check(done, tmp_path, num_ranks=2)
    assert re.search(r"shards \w+: 3 units, 28 parameters, .* per rank of ", done.output)
    page = (tmp_path / "report.html").read_text()
    assert "rank 1: gathered of unit 0, " in page
    assert "rank 1: gather of unit 2, " in page


@pytest.mark.multirank
@pytest.mark.slow
def test_demo_as_one_program(tmp_path: Path) -> None:
    demo = [EXAMPLES / "train_gpt.py", *SMALL, "--step", "graph", "--out", tmp_path]
    done = run_command([*LOCKSTEP, "run", "--nproc", "2", *demo], limit_s=400)
    check(done, tmp_path, num_ranks=2)
    assert "runs one compiled program for the whole step\ncalls: 11 as a program, 1 by the loop" in done.output


@pytest.mark.slow
def test_demo_in_a_single_process(tmp_path: Path) -> None:
    check(
        run_command([sys.executable, EXAMPLES / "train_gpt.py", *SMALL, "--out", tmp_path], limit_s=400),
        tmp_path,
        num_ranks=1,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--steps", "0"], "--steps is 0"), (["--width", "30", "--heads", "4"], "not a multiple of --heads 4")],
)
def test_demo_refuses_options_that_make_no_sense(words: list[str], message: str) -> None:
    done = run_command([sys.executable, EXAMPLES / "train_gpt.py", *words])
    assert done.exit_code == 2
    assert message in done.errors


def test_bundled_text_is_what_its_generator_writes() -> None:
    made = runpy.run_path(str(EXAMPLES / "data" / "make_text.py"))["text"]()
    assert made == (EXAMPLES / "data" / "tales.txt").read_text(encoding="ascii")
