"""The link is measured by all ranks together, and all come away with the same numbers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

CPU = torch.device("cpu")


def measure(budgets: list[float], num_times: int = 2) -> list[dict[str, Any]]:
    from lockstep.agree.board import open_board
    from lockstep.agree.watch import Watch
    from lockstep.engine.link import measure_link

    group, rank = dist.group.WORLD, dist.get_rank()
    answers = []
    for attempt in range(num_times):
        watch = Watch(open_board(group), rank) if attempt == 0 else None
        time.sleep(0.05 * rank)  # ranks need not arrive together
        link = measure_link(group, CPU, watch, budget_seconds=budgets[rank % len(budgets)])
        answers.append(link.as_dict())
        # A rank that had sent one collective more than another would be paired up wrongly here.
        check = torch.tensor([float(rank)])
        dist.all_reduce(check)
        assert check.item() == sum(range(dist.get_world_size()))
    return answers


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_get_the_same_numbers(world: int) -> None:
    from lockstep.plan.link import LinkModel

    answers = run_ranks(world, measure, [0.3])
    for attempt in range(2):
        links = [LinkModel.from_dict(answer[attempt]) for answer in answers]
        assert len(set(links)) == 1
        link = links[0]
        assert len(link.points) >= 2
        assert all(seconds > 0 for _, seconds in link.points)
        assert link.latency_seconds >= 0
        assert LinkModel.fit(link.points) == link
        assert LinkModel.from_dict(json.loads(json.dumps(link.as_dict()))) == link


def test_the_tightest_budget_of_all_ranks_counts() -> None:
    from lockstep.engine.link import _MIN_SIZES

    plenty, none = 60.0, 0.0
    for budgets, is_short in (([plenty, none], True), ([plenty, plenty], False)):
        answers = run_ranks(2, measure, budgets)
        assert answers[0] == answers[1]
        for link in answers[0]:  # by what was measured, not by the clock: a busy machine changes nothing here
            assert (len(link["points"]) == _MIN_SIZES) == is_short


def test_a_rank_alone_has_a_free_link() -> None:
    from lockstep.plan.link import LinkModel

    (answers,) = run_ranks(1, measure, [0.3])
    assert [LinkModel.from_dict(answer) for answer in answers] == [LinkModel.free()] * 2
