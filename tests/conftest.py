"""Settings for all tests: one thread per process, since several ranks share few cores."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tiny models are built from configs; nothing may be downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A machine that is busy makes an example slow, not wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

MULTIRANK = Path(__file__).parent / "multirank"


def pytest_configure(config: pytest.Config) -> None:
    """One compiler cache for all processes of a run: many tests compile the same modules."""
    if not hasattr(config, "workerinput"):
        os.environ["LOCKSTEP_TEST_INDUCTOR_CACHE"] = tempfile.mkdtemp(prefix="lockstep-inductor-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["LOCKSTEP_TEST_INDUCTOR_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts ranks; leave the soaks out, unless they are asked for (``-m soak``)."""
    for item in items:
        if MULTIRANK in item.path.parents:
            item.add_marker("multirank")
    if "soak" not in (config.getoption("-m") or ""):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


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
