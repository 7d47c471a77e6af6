from __future__ import annotations

import pytest

from lockstep import torch_private


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs as they were traced, operator by operator: what is tested is the program, not the compiler."""
    monkeypatch.setattr(torch_private, "compile_program", lambda graph, *_: graph, raising=False)
