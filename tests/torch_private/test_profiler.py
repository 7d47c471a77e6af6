"""Ranges in profiles: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_RecordFunction() -> None:
    with torch.profiler.profile() as profile, private.RecordFunction("lockstep::probe"):
        torch.zeros(1)
    assert any(event.key == "lockstep::probe" for event in profile.key_averages())
