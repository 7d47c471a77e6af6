"""Training loops written with Accelerate, unchanged, on Lockstep and on torch's DDP."""

from __future__ import annotations

import pytest

from integrations.side_by_side import SideBySide, compare_parameters, require

require("accelerate")

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> SideBySide:
    return SideBySide.of("accelerate_loop.py", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize(
    "case",
    [
        "accumulate",
        "fp16_hook",
        "power_sgd",  # equal bit by bit because the whole model is one bucket, in torch too
        "uninterrupted",
        "resumed",
        "sync_in_the_backward",
        "compiled",
    ],
)
def test_accelerate(sides: SideBySide, case: str) -> None:
    sides.check(case)


def test_a_resumed_run_ends_where_the_whole_one_did(sides: SideBySide) -> None:
    for ranks in sides.by_wrapper.values():
        for recorded in ranks:
            compare_parameters(recorded["resumed"]["parameters"], recorded["uninterrupted"]["parameters"])
