"""The ranks that a model is sharded over."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.shard.mesh import take_mesh


def test_ranks_meet_when_they_are_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        assert take_mesh(None).world == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
