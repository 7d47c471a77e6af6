"""Hugging Face Trainer, unchanged, on Lockstep and on torch's DDP: the same parameters at the end, bit by bit."""

from __future__ import annotations

import pytest

from integrations.side_by_side import SideBySide, compare_parameters, require

require("transformers", "accelerate")

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> SideBySide:
    return SideBySide.of("trainer.py", tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize(
    "case",
    [
        "accumulation_and_bf16",
        "checkpointing_reentrant",
        "checkpointing_non_reentrant",
        "options_of_ddp",
        "uninterrupted",
        "resumed",
        "compiled",
    ],
)
def test_trainer(sides: SideBySide, case: str) -> None:
    sides.check(case)


def test_a_resumed_run_ends_where_the_whole_one_did(sides: SideBySide) -> None:
    for ranks in sides.by_wrapper.values():
        for recorded in ranks:
            compare_parameters(recorded["resumed"]["parameters"], recorded["uninterrupted"]["parameters"])
