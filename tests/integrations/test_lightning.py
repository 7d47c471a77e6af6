"""Lightning's Trainer and Fabric, unchanged, on Lockstep and on torch's DDP."""

from __future__ import annotations

import pytest

from integrations.side_by_side import SideBySide, require

require("lightning")

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> SideBySide:
    return SideBySide.of("lightning_fit.py", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("case", ["automatic", "hook_and_static_graph"])
def test_automatic_optimization(sides: SideBySide, case: str) -> None:
    sides.check(case)


@pytest.mark.parametrize("case", ["manual_two_halves", "manual_two_players", "manual_static_graph"])
def test_manual_optimization(sides: SideBySide, case: str) -> None:
    """Lightning runs the backward inside DDP's forward here, and calls the reducer by torch's names."""
    sides.check(case)


def test_fabric(sides: SideBySide) -> None:
    sides.check("fabric")
