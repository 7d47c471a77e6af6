"""Turns to compile, without a compiler: who compiles, who waits, and that every wait ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.agree.board import Board
from lockstep.graph.fingerprint import GraphFacts, InputFact
from lockstep.graph.share import CompileTurns, turns_of

Ranks = Callable[..., CompileTurns]


@pytest.fixture
def facts(tmp_path: Path) -> GraphFacts:
    return GraphFacts("GPT", "abc", inputs=(InputFact("x", ("4", "6"), "float32"),), cache=str(tmp_path))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Makes the turns of a rank; all ranks of a test share one store and one host."""
    store = dist.HashStore()

    def make(rank: int, local_rank: int | None = None) -> CompileTurns:
        if local_rank is None:
            monkeypatch.delenv("LOCAL_RANK", raising=False)
        else:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return CompileTurns(Board(store, "test", rank, 3), rank, "host")

    return make


def claim(turns: CompileTurns, facts: GraphFacts, rank: int, pid: int) -> None:
    assert turns.board is not None
    turns.board.post(f"{turns._turn_key(facts)}/forward/claim", json.dumps({"rank": rank, "pid": pid}))


def test_a_rank_alone_compiles_at_once(facts: GraphFacts) -> None:
    turns = CompileTurns(None, 0)
    turns.announce(facts)
    assert turns.take_turn(facts, lambda: "compiled") == "compiled"
    assert turns.describe_disagreement("GPT", 0) == ""


def test_the_second_waits_for_the_first(ranks: Ranks, facts: GraphFacts) -> None:
    first, second = ranks(0), ranks(1)
    order: list[str] = []
    started, may_end = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        started.set()
        may_end.wait(10)
        order.append("first")

    compiler = threading.Thread(target=first.take_turn, args=(facts, compile_slowly))
    compiler.start()
    started.wait(10)
    waiter = threading.Thread(target=second.take_turn, args=(facts, lambda: order.append("second")))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    may_end.set()
    waiter.join(10)
    compiler.join(10)
    assert order == ["first", "second"]


def test_another_graph_another_phase_and_another_cache_do_not_wait(
    ranks: Ranks, facts: GraphFacts, tmp_path: Path
) -> None:
    first, second = ranks(0), ranks(1)
    claim(first, facts, 0, os.getpid())  # and never ends
    other_cache = tmp_path / "other"
    other_cache.mkdir()
    for other in (
        replace(facts, digest="def"),
        replace(facts, cache=str(other_cache)),
        replace(facts, devices=("cuda:1",)),
        replace(facts, cache=""),
    ):
        assert second.take_turn(other, lambda: "compiled") == "compiled"
    assert second.take_turn(facts, lambda: "compiled", phase="backward") == "compiled"


def test_a_claimant_that_is_gone_holds_nobody_up(
    ranks: Ranks, facts: GraphFacts, caplog: pytest.LogCaptureFixture
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    turns = ranks(1)
    claim(turns, facts, 0, gone.pid)
    assert turns.take_turn(facts, lambda: "compiled") == "compiled"
    assert "rank 0, which was compiling it, is gone" in caplog.text


def test_the_deadline_ends_a_wait(
    ranks: Ranks, facts: GraphFacts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_COMPILE_TIMEOUT", "0.2")
    turns = ranks(1)
    claim(turns, facts, 0, os.getpid())
    assert turns.take_turn(facts, lambda: "compiled") == "compiled"
    assert "has not finished" in caplog.text


def test_a_failure_reaches_its_rank_and_lets_the_others_try(
    ranks: Ranks, facts: GraphFacts, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("no compiler today")

    with pytest.raises(ValueError, match="no compiler today"):
        ranks(0).take_turn(facts, fail)
    assert ranks(1).take_turn(facts, lambda: "compiled") == "compiled"
    assert "ValueError: no compiler today" in caplog.text


def test_the_leader_has_a_head_start_that_ends(
    ranks: Ranks, facts: GraphFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_COMPILE_START_SECONDS", "0.2")
    follower = ranks(1, local_rank=1)
    assert follower.take_turn(facts, lambda: "compiled") == "compiled"
    monkeypatch.setenv("LOCKSTEP_COMPILE_START_SECONDS", "1000")
    again = replace(facts, digest="def", number=1)  # a guard failed: nobody is expected to come along
    assert follower.take_turn(again, lambda: "compiled") == "compiled"


@pytest.mark.parametrize("what", ["compiles another graph", "found it in a cache"])
def test_the_head_start_ends_when_the_leader_will_not_claim(
    ranks: Ranks, facts: GraphFacts, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_COMPILE_START_SECONDS", "1000")
    leader, follower = ranks(0, local_rank=0), ranks(1, local_rank=1)
    if what == "found it in a cache":
        leader.announce(facts)
        leader.found_in_cache(facts)
    else:
        leader.announce(replace(facts, digest="def"))
    follower.announce(facts)
    assert follower.take_turn(facts, lambda: "compiled") == "compiled"


def test_a_difference_is_told_once_with_rank_input_and_shape(
    ranks: Ranks, facts: GraphFacts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    other = replace(facts, digest="def", inputs=(InputFact("x", ("7", "6"), "float32"),))
    first, second = ranks(0), ranks(1)
    for number in range(2):
        first.announce(replace(facts, number=number))
        second.announce(replace(other, number=number))
    table = "input x:\n  rank 0 | [4, 6] float32\n  rank 1 | [7, 6] float32"
    assert [table in record.message for record in caplog.records] == [True]
    assert table in first.describe_disagreement("GPT", 1)
    assert first.describe_disagreement("GPT", 2) == ""


def test_turns_belong_to_a_wrapper_and_its_board() -> None:
    class Owner:
        pass

    owner, store = Owner(), dist.HashStore()
    board = Board(store, "a", 0, 2)
    turns = turns_of(owner, board, 0)
    assert turns_of(owner, board, 0) is turns
    assert turns_of(owner, Board(store, "b", 0, 2), 0) is not turns
