"""Settings for all tests: one thread per process, since several ranks share few cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tiny models are built from configs; nothing may be downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MULTIRANK = Path(__file__).parent / "multirank"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MULTIRANK in item.path.parents:
            item.add_marker("multirank")
