"""Who a long wait names, with peers and a clock that are played: only ranks that were just seen not to be there."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest

from lockstep.agree import vigil as vigils
from lockstep.agree.beat import Beat, Place
from lockstep.agree.vigil import Vigil

HERE, BEFORE = Place("bucket 1", 7, 1), Place("bucket 0", 7, 0)


class Peers:
    """Three peers as the store shows them: where each of them waits, if it does."""

    name, rank, world, stall_seconds, heartbeat_seconds = "run", 0, 4, 0.3, 0.0
    period = 1.0
    others = (1, 2, 3)

    def __init__(self) -> None:
        self.pulse = self
        self.waits: dict[int, Place] = {}
        self.is_silent = False
        self.number = 0
        self.known: dict[int, Beat] = {}
        self.asked: list[int] = []

    def peers(self) -> list[tuple[int, int]]:
        return [(rank, rank) for rank in self.others]

    def look(self, _: Any) -> dict[int, Beat] | None:
        if self.is_silent:
            return None
        self.number += 1
        for rank in self.others:
            waits = {self.name: self.waits[rank]} if rank in self.waits else {}
            self.known[rank] = Beat(self.number, None, False, "", "", "", False, "", [], False, waits, {})
        return self.known

    def last_seen(self, rank: int) -> Beat | None:
        return self.known.get(rank)

    def shown(self, rank: int) -> int:
        return rank

    def condition(self, rank: int) -> str:
        return ""

    def why_gone(self, rank: int) -> None:
        return None

    def wait_at(self, name: str, place: Place | None) -> None:
        pass

    def ask_for_stacks(self, ranks: list[int]) -> None:
        self.asked = ranks

    def stack_of(self, rank: int) -> None:
        return None


@pytest.mark.parametrize("seed", range(50))
def test_a_rank_that_has_come_is_not_named_however_looks_and_arrivals_fall(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    now = [100.0]
    monkeypatch.setattr(vigils, "monotonic", lambda: now[0])
    caplog.set_level(logging.WARNING, "lockstep")
    peers = Peers()
    vigil = Vigil(peers, lambda: HERE, 0.0)  # type: ignore[arg-type, return-value]
    num_named = 0
    for _ in range(200):
        now[0] += draw.choice((0.1, 0.5, 1.0, 1.0, 1.0, 3.0))
        peers.is_silent = draw.random() < 0.2
        for rank in peers.others:
            change = draw.random()
            if change < 0.1:
                peers.waits[rank] = draw.choice((HERE, BEFORE))
            elif change < 0.15:
                peers.waits.pop(rank, None)
        vigil._pause = 0.3  # or reports would soon be rare
        caplog.clear()
        vigil.look()
        for record in caplog.records:
            if record.thread != threading.get_ident():
                continue  # of a test before this one
            text = record.getMessage().partition("not arrived there: ")[2]
            if peers.is_silent:
                assert text.startswith("not known, the store is silent")
            elif text.startswith("["):
                named = [int(part) for part in text[1:].partition("]")[0].split(",")]
                num_named += len(named)
                assert all(peers.waits.get(rank) != HERE for rank in named), (named, peers.waits)
                assert peers.asked == named
    assert num_named


@pytest.mark.parametrize(
    ("condition", "told"), [("", "rank 1: alive, nothing"), ("is stopped", "is stopped, last seen")]
)
def test_what_is_known_of_a_rank_that_gives_no_sign_of_life_is_of_before(
    condition: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(vigils, "monotonic", lambda: now[0])
    monkeypatch.setattr(Peers, "condition", lambda self, rank: condition)
    peers = Peers()
    vigil = Vigil(peers, lambda: HERE, 0.0)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.WARNING, "lockstep"):
        for _ in range(4):
            now[0] += 1.0
            vigil.look()
    assert told in caplog.messages[-1]
