"""The board, on a real store shared by threads that play ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch.distributed as dist

from lockstep.agree.board import Board
from lockstep.errors import PeerLate


@pytest.fixture
def boards() -> list[Board]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    return [Board(store, "test", rank, 3) for rank in range(3)]


def test_a_key_is_read_by_all_once_it_is_posted(boards: list[Board]) -> None:
    assert boards[1].read("key") is None
    boards[0].post("key", "value")
    assert [board.read("key") for board in boards] == ["value"] * 3


def test_the_first_to_post_wins_until_it_is_forgotten(boards: list[Board]) -> None:
    assert boards[2].post_first("failure", "rank 2") == "rank 2"
    assert boards[0].post_first("failure", "rank 0") == "rank 2"
    boards[1].forget("failure")
    assert boards[1].read("failure") is None
    assert boards[0].post_first("failure", "rank 0") == "rank 0"


def test_waiting_names_what_is_missing_at_the_deadline(boards: list[Board]) -> None:
    boards[0].post("a", "x")
    slices: list[int] = []
    missing = boards[0].wait_for(["a", "b"], monotonic() + 0.05, lambda: slices.append(1))
    assert missing == ["b"]


def test_gather_returns_every_ranks_value(boards: list[Board]) -> None:
    results: dict[int, dict[int, str]] = {}

    def play(board: Board) -> None:
        results[board.rank] = board.gather("plan", f"digest {board.rank}", timeout_seconds=120)

    threads = [threading.Thread(target=play, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {rank: f"digest {rank}" for rank in range(3)}
    assert results == dict.fromkeys(range(3), expected)


def test_gather_names_the_ranks_that_are_late(boards: list[Board]) -> None:
    boards[2].post("plan/2", "there")
    with pytest.raises(PeerLate) as caught:
        boards[0].gather("plan", "mine", timeout_seconds=0.05)
    assert caught.value.ranks == (1,)


def test_rank_zero_tells_the_others(boards: list[Board]) -> None:
    assert boards[0].from_rank_zero("order", "a\nb") == "a\nb"
    assert boards[1].from_rank_zero("order", "b\na") == "a\nb"
    with pytest.raises(PeerLate, match="rank 0"):
        boards[2].from_rank_zero("never", "x", timeout_seconds=0.05)
