"""Compiled once, loaded by all ranks or by none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launching import LOCKSTEP, run_command
from multirank.artifact_script import make, train
from multirank.harness import lockstep_only, run_outcomes, run_ranks
from multirank.words import Words

pytestmark = [pytest.mark.multirank, lockstep_only]

PRELOAD = ("torch._inductor.compile_fx", "torch.fx.experimental.proxy_tensor")
LIMIT_S = 600.0  # several cold starts of a compiler, on a machine that may be busy
SCRIPT = Path(__file__).with_name("artifact_script.py")
ROOT = Path(__file__).parents[2]


def counted_builds() -> list[str]:
    """The libraries that the C++ compiler is asked to build from now on; it also reads a header, for its version."""
    from torch._inductor.cpp_builder import CppBuilder

    built: list[str] = []
    original = CppBuilder.build

    def build(self: Any) -> Any:
        target = self.get_target_file_path()
        if target.endswith((".so", ".o")):
            built.append(target)
        return original(self)

    CppBuilder.build = build  # type: ignore[method-assign]
    return built


def run_step(mode: str, path: str, directory: str, saves: str = "", **options: Any) -> dict[str, Any]:
    """Train with an artifact or without, in a cache that all ranks share."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    torch.set_num_threads(1)
    built = counted_builds()
    step = make(mode, path, **options)
    ends = train(step)
    counts = torch._dynamo.utils.counters["inductor"]
    found = {
        "ends": ends,
        "misses": counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"],
        "hits": counts["fxgraph_cache_hit"],
        "built": len(built),
        "text": str(step.explain()),
        "digests": [program.digest for program in getattr(step._runner, "programs", [])],
    }
    if saves:
        found["digest"] = step.save(saves)
    return found


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["ends"], other["ends"], strict=True))


def test_an_artifact_made_in_one_process_starts_four_ranks_without_compiling(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = run_command(
        [*LOCKSTEP, "precompile", SCRIPT, "--world", "4", "--out", artifacts], env=environment, limit_s=LIMIT_S
    )
    assert done.exit_code == 0, done
    path = artifacts / "step-0.lockstep"
    assert f"{path}" in done.output
    alone = run_ranks(4, run_step, "graph", "", str(tmp_path / "cold"), preload=PRELOAD, limit_s=LIMIT_S)
    loaded = run_ranks(4, run_step, "graph", str(path), str(tmp_path / "warm"), preload=PRELOAD, limit_s=LIMIT_S)
    num_programs = len(alone[0]["digests"])
    assert num_programs == 2  # the first micro-step, and the one with the update
    assert sum(rank["misses"] for rank in alone) == num_programs  # ranks of a host take turns
    for mine, theirs in zip(loaded, alone, strict=True):
        assert (mine["misses"], mine["hits"], mine["built"]) == (0, num_programs, 0), mine["text"]
        assert mine["digests"] == theirs["digests"] == loaded[0]["digests"]
        assert f"since it was loaded: {num_programs} graphs found, 0 compiled here" in mine["text"]
        assert same_bits(mine, theirs)
    assert all(f"digest {digest}" in done.output for digest in loaded[0]["digests"])


@pytest.mark.parametrize("mode", ["compiled"])
def test_ranks_save_what_they_compiled_with_the_plan_they_chose(mode: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step.lockstep")
    options = {"cap": None}  # bucket sizes are chosen by measuring the link, and may be others in another run
    first = run_ranks(2, run_step, mode, "", str(tmp_path / "cold"), path, preload=PRELOAD, limit_s=LIMIT_S, **options)
    assert len(first[0]["digest"]) == 64
    assert first[1]["digest"] == ""
    loaded = run_ranks(2, run_step, mode, path, str(tmp_path / "warm"), preload=PRELOAD, limit_s=LIMIT_S, **options)
    for mine, theirs in zip(loaded, first, strict=True):
        assert (mine["misses"], mine["built"]) == (0, 0), mine["text"]
        assert mine["hits"] == theirs["hits"] + theirs["misses"]
        assert same_bits(mine, theirs)


def test_an_artifact_of_a_sharded_model(tmp_path: Path) -> None:
    """What is compiled for rank 0 is found by the ranks whose shards are as large as its own."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "TEST_SHARDED": "1"}
    done = run_command(
        [*LOCKSTEP, "precompile", SCRIPT, "--world", "2", "--out", tmp_path], env=environment, limit_s=LIMIT_S
    )
    assert done.exit_code == 0, done
    path, warm = str(tmp_path / "step-0.lockstep"), str(tmp_path / "warm")
    options = {"sharded": True, "preload": PRELOAD, "limit_s": LIMIT_S}
    loaded = run_ranks(2, run_step, "graph", path, warm, **options)
    by_loop = run_ranks(2, run_step, "loop", "", warm, **options)
    for mine, right in zip(loaded, by_loop, strict=True):
        assert (mine["misses"], mine["hits"], mine["built"]) == (0, 2, 0), mine["text"]
        torch.testing.assert_close(mine["ends"], right["ends"])


# ---------------------------------------------------------------- all ranks, or none


def pretend_to_compile() -> list[bytes]:
    """Leave the compiler out: what would be loaded, and programs as they were traced."""
    from lockstep import torch_private

    found: list[bytes] = []
    torch_private.compile_program = lambda graph, *_: graph
    torch_private.save_compiled = lambda: (b"graphs", 1)
    torch_private.compiled_libraries = dict
    torch_private.load_compiled = lambda graphs, libraries: found.append(graphs) or 1
    return found


def save_one(path: str) -> None:
    pretend_to_compile()
    torch.set_num_threads(1)
    step = make("graph")
    train(step, 4)
    step.save(path)


def load_one(paths: list[str], digests: list[str | None], width: list[int]) -> dict[str, Any]:
    """Each rank with a file, a digest and a model of its own."""
    loaded, words, rank = pretend_to_compile(), Words(), dist.get_rank()
    torch.set_num_threads(1)
    options = {"digest": digests[rank]} if paths[rank] else {}
    step = make("graph", paths[rank], width=width[rank], **options)
    ends = train(step, 6)
    explanation = step.explain()
    return {
        "num loaded": len(loaded),
        "warnings": words.warnings,
        "text": str(explanation),
        "programs": explanation.num_program_calls,
        "ends": ends,
    }


def load_on(paths: list[Any], digests: list[str | None] | None = None, width: int = 16) -> list[dict[str, Any]]:
    world = len(paths)
    return run_ranks(
        world, load_one, [str(p) for p in paths], digests or [None] * world, [width] * world, preload=PRELOAD
    )


def assert_nobody_loads(ranks: list[dict[str, Any]], *words: str) -> None:
    for rank in ranks:
        assert rank["num loaded"] == 0
        assert rank["programs"] == 4  # compiled as usual
        (warning,) = rank["warnings"]
        assert "All ranks compile, as without it." in warning
        for word in words:
            assert word in warning
            assert word in rank["text"]


def test_all_load_or_none(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.lockstep", tmp_path / "bad.lockstep"
    run_ranks(3, save_one, str(good), preload=PRELOAD)
    content = bytearray(good.read_bytes())
    content[len(content) // 2] ^= 4
    bad.write_bytes(content)
    assert [rank["num loaded"] for rank in load_on([good] * 3)] == [1, 1, 1]
    assert_nobody_loads(load_on([good, bad, good]), "rank 1 | ", "was changed or cut after it was written")
    assert_nobody_loads(load_on([good, good, ""]), "rank 2 | was given no artifact")
    assert_nobody_loads(load_on([good, tmp_path / "none", good]), "rank 1 | ", "cannot be read: No such file")
    assert_nobody_loads(load_on([good] * 3, [None, "0" * 64, None]), "rank 1 | ", "was asked for")
    # What is the same on all ranks is said once.
    assert_nobody_loads(load_on([good] * 3, width=24), "parameter first.weight: made for [16, 6]", "here [24, 6]")
    assert_nobody_loads(load_on([good] * 2), "number of ranks: made for 3, here 2")


def test_two_files_that_are_both_whole(tmp_path: Path) -> None:
    one, other = tmp_path / "one.lockstep", tmp_path / "other.lockstep"
    run_ranks(2, save_one, str(one), preload=PRELOAD)
    from lockstep.program.artifact import Artifact, read

    found = read(one)
    Artifact(found.facts, found.plan, found.programs, b"other graphs", {}).write(other)
    assert_nobody_loads(load_on([one, other]), "rank 0 | ready ", "rank 1 | ready ")


def end_before_the_first_call(path: str) -> None:
    pretend_to_compile()
    torch.set_num_threads(1)
    step = make("graph", path)
    if dist.get_rank() == 1:
        os._exit(7)
    train(step, 2)


def test_a_rank_that_is_killed_before_it_has_said_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "step.lockstep"
    run_ranks(2, save_one, str(path), preload=PRELOAD)
    outcomes = run_outcomes(
        2, end_before_the_first_call, str(path), preload=PRELOAD, env={"LOCKSTEP_HEARTBEAT_TIMEOUT": "10"}
    )
    assert outcomes[1].exit_status == 7
    assert outcomes[0].error is not None
    assert "rank 1" in outcomes[0].error.text.lower()


def end_while_loading(path: str) -> None:
    from lockstep import torch_private

    pretend_to_compile()
    if dist.get_rank() == 1:
        torch_private.load_compiled = lambda *_: os._exit(7)
    torch.set_num_threads(1)
    train(make("graph", path), 4)


def test_a_rank_that_is_killed_while_it_loads(tmp_path: Path) -> None:
    path = tmp_path / "step.lockstep"
    run_ranks(2, save_one, str(path), preload=PRELOAD)
    outcomes = run_outcomes(2, end_while_loading, str(path), preload=PRELOAD, env={"LOCKSTEP_HEARTBEAT_TIMEOUT": "10"})
    assert outcomes[1].exit_status == 7
    assert outcomes[0].error is not None
    assert "rank 1" in outcomes[0].error.text.lower()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["nothing.py", "--world", "2", "--out", "x"], "there is no script nothing.py"),
        ([str(SCRIPT), "--world", "0", "--out", "x"], "not a whole number of at least 1"),
        ([str(SCRIPT), "--out", "x"], "--world"),
    ],
)
def test_a_command_that_cannot_be(words: list[str], shown: str, tmp_path: Path) -> None:
    done = run_command([*LOCKSTEP, "precompile", *words], cwd=tmp_path)
    assert done.exit_code == 2
    assert shown in done.errors


def test_a_script_without_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group()\nprint(dist.get_world_size())\n")
    done = run_command([*LOCKSTEP, "precompile", script, "--world", "5", "--out", tmp_path / "out"])
    assert done.exit_code == 1
    assert done.lines == ["5"]
    assert "ended without a lockstep.TrainStep" in done.errors


# ---------------------------------------------------------------- sharded models


def sharded_step(path: str, loads: bool, width: int) -> dict[str, Any]:
    import lockstep
    from multirank.artifact_script import Mlp, loss_of

    loaded, words = pretend_to_compile(), Words()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = lockstep.fully_shard(Mlp(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if loads:
        step = lockstep.load_step(path, model, optimizer, loss_of, mode="loop")
    else:
        step = lockstep.TrainStep(model, optimizer, loss_of, mode="loop")
    train(step, 2)
    if not loads:
        step.save(path)
    return {"num loaded": len(loaded), "warnings": words.warnings, "text": str(step.explain())}


def sharded_on(path: Path, loads: list[bool]) -> list[dict[str, Any]]:
    return run_ranks(2, sharded_on_rank, str(path), loads, preload=PRELOAD)


def sharded_on_rank(path: str, loads: list[bool]) -> dict[str, Any]:
    return sharded_step(path, loads[dist.get_rank()], 16)


def test_ranks_of_a_sharded_model_decide_together(tmp_path: Path) -> None:
    path = tmp_path / "step.lockstep"
    sharded_on(path, [False, False])
    assert [rank["num loaded"] for rank in sharded_on(path, [True, True])] == [1, 1]
    for rank in sharded_on(path, [True, False]):
        assert rank["num loaded"] == 0
        assert "rank 1 | was given no artifact" in rank["text"]
