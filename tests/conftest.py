"""Settings for all tests: one thread per process, since several ranks share few cores."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tiny models are built from configs; nothing may be downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor otherwise makes sure in each process that it can load what the compiler makes, by compiling and by starting
# another interpreter; a machine where it cannot fails these tests anyhow.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Hundreds of processes import the same files: the first one keeps what it has made of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A machine that is busy makes an example slow, not wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
MULTIRANK = TESTS / "multirank"

# What takes a minute or more on two cores, the longest first. Several processes take file by file in this order: a long
# one that began last would run alone in the end.
LONG_FILES = [
    "multirank/test_compiled_models.py",
    "multirank/test_step_mixes.py",
    "multirank/test_step_autograd.py",
    "multirank/test_faults_leaving.py",
    "multirank/test_step_windows.py",
    "launch/test_launch_causes.py",
    "multirank/test_compiled_edges.py",
    "multirank/test_compiled_features.py",
    "cli/test_run.py",
    "multirank/test_step_compare.py",
    "launch/test_launch_soak.py",
    "multirank/test_compile_turns.py",
    "multirank/test_program_sharded.py",
    "multirank/test_program_attacks.py",
    "launch/test_launch_ends.py",
    "multirank/test_gradients.py",
    "integrations/test_nanogpt.py",
    "multirank/test_compiled_autograd.py",
    "multirank/test_shard_gradients.py",
    "multirank/test_faults_own_waits.py",
    "multirank/test_artifacts.py",
    "multirank/test_faults_hangs.py",
    "launch/test_launch_restarts.py",
    "multirank/test_program_ranks.py",
    "multirank/test_tuning.py",
    "multirank/test_shard_windows.py",
    "multirank/test_compiled_autograd_windows.py",
    "multirank/test_second_start.py",
    "test_demo.py",
    "multirank/test_program_steps.py",
    "multirank/test_faults_partition.py",
    "multirank/test_faults_deaths.py",
    "multirank/test_step_launches.py",
    "multirank/test_compiled_late_use.py",
    "launch/test_launch_hosts.py",
    "launch/test_launch_late.py",
    "launch/test_launch_stopping.py",
    "multirank/test_program_models.py",
    "multirank/test_hooks_convergence.py",
    "integrations/test_transformers.py",
]


def pytest_configure(config: pytest.Config) -> None:
    """One compiler cache for all processes of a run: many tests compile the same modules."""
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of the most tests
    if not hasattr(config, "workerinput"):
        os.environ["LOCKSTEP_TEST_INDUCTOR_CACHE"] = tempfile.mkdtemp(prefix="lockstep-inductor-")
        keep_what_is_compiled(Path(tempfile.mkdtemp(prefix="lockstep-compiler-")))


def keep_what_is_compiled(folder: Path) -> None:
    """Put a compiler into the path that compiles the same source once in this run (see compiler_cache.py)."""
    os.environ["LOCKSTEP_TEST_COMPILER_CACHE"] = str(folder)
    compiler = shutil.which("g++")
    if compiler is None or "CXX" in os.environ:
        return
    (folder / "kept").mkdir()
    words = [sys.executable, "-I", "-S", str(TESTS / "compiler_cache.py"), compiler, str(folder / "kept")]
    place = folder / "bin" / "g++"
    place.parent.mkdir()
    place.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    place.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(place.parent), os.environ.get("PATH", os.defpath)])


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        for name in ("LOCKSTEP_TEST_INDUCTOR_CACHE", "LOCKSTEP_TEST_COMPILER_CACHE"):
            shutil.rmtree(os.environ[name], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts ranks; leave the soaks out, unless they are asked for (``-m soak``); begin with long files."""
    for item in items:
        if MULTIRANK in item.path.parents:
            item.add_marker("multirank")
    if "soak" not in (config.getoption("-m") or ""):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    if hasattr(config, "workerinput"):
        place = {TESTS / name: index for index, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group in the test's own process, with nothing compiled before."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=300))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()
