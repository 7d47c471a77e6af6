"""Several ranks as threads of one process: who is late, who has ended, a store that is lost."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.agree import alive
from lockstep.agree.beat import words_of
from lockstep.agree.board import Board
from lockstep.agree.pulse import Pulse
from lockstep.checkpoint.protocol import Place, Save
from lockstep.checkpoint.ranks import LocalStore, Ranks
from lockstep.checkpoint.reading import Reader
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.errors import CheckpointFailed, PeerFailed, PeerLate


class LosableStore(LocalStore):
    """Is lost for one who asks when told to be."""

    is_lost = False

    def check(self, keys: Sequence[str]) -> bool:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)


def ranks_on(store: Any, rank: int, world: int = 2, patience: float = 20.0) -> Ranks:
    return Ranks(Board(store, "test", rank, world), patience)


def snapshot(rank: int, step: int = 1) -> Snapshot:
    """A tensor of four elements, half on each rank."""
    tensor = torch.full((2,), float(rank))
    index = {"model/w": ["float32", [4], [2 * rank], [2]]}
    return Snapshot(step, {"model": {}, "extra": {}}, {"rng": {}, "per_rank": {}}, {"model/w": tensor}, index)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, run side by side."""
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


def test_two_ranks_save_one_tensor(tmp_path: Path) -> None:
    store = LocalStore()
    saves = [Save(tmp_path, snapshot(rank), ranks_on(store, rank), keep=None) for rank in range(2)]
    assert together(*(save.run for save in saves)) == [tmp_path / "step-00000001"] * 2
    reader = Reader(tmp_path / "step-00000001")
    reader.verify()
    assert reader.tensor("model/w").tolist() == [0, 0, 1, 1]


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    save = Save(tmp_path, snapshot(0), ranks_on(LocalStore(), 0, patience=0.5), keep=None)
    with pytest.raises(CheckpointFailed, match=r"heard nothing from rank\(s\) \[1\] for 0.5 s"):
        save.run()
    assert list(tmp_path.iterdir()) == []


def test_rank_zero_does_not_come(tmp_path: Path) -> None:
    save = Save(tmp_path, snapshot(1), ranks_on(LocalStore(), 1, patience=0.5), keep=None)
    with pytest.raises(CheckpointFailed, match=r"heard nothing from rank\(s\) \[0\]"):
        save.run()


def test_a_rank_that_has_ended_is_noticed_at_once(tmp_path: Path) -> None:
    program = "from lockstep.agree.alive import card; print(card())"
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert alive.is_dead(text)
    assert not alive.is_dead(alive.card())
    assert not any(alive.is_dead(other) for other in (None, "", "{}", json.dumps(["elsewhere", 1, "2"])))
    store = LocalStore()
    ranks_on(store, 1).tell("process/1", text)
    ranks = ranks_on(store, 0, patience=600.0)
    with pytest.raises(PeerFailed, match=r"Rank 1 \(process \d+ on .*\) has ended while rank 0 waited for a word"):
        ranks.wait(["word/1"], "a word", lambda: None)
    with pytest.raises(CheckpointFailed, match=r"Rank 1 .* has ended"):
        Save(tmp_path, snapshot(0), ranks, keep=None).run()
    # One that has left last words is quoted.
    shared = dist.HashStore()
    pulses = [Pulse(shared, rank, 2) for rank in range(2)]
    pulses[1].end_with(words_of(ValueError("a bad batch"), 1), 60)
    heard = Ranks(Board(shared, "test", 0, 2, pulses[0]), 600.0)
    heard.tell("process/1", text)
    with pytest.raises(
        PeerFailed, match=r"Rank 1 .* failed while rank 0 waited for a word. It said:\nValueError: a bad"
    ):
        heard.wait(["word/1"], "a word", lambda: None)


def test_the_checkpoint_of_another_save_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Rank 0 is gone, and another job has saved the same step meanwhile."""
    store = LocalStore()
    together(*(Save(tmp_path, snapshot(rank), ranks_on(store, rank), keep=None).run for rank in range(2)))
    assert (tmp_path / "step-00000001").exists()
    save = Save(tmp_path, snapshot(1), ranks_on(LocalStore(), 1, patience=0.5), keep=None)
    with pytest.raises(CheckpointFailed, match="It is not known whether the checkpoint counts"):
        save._hear_verdict(Place("step-00000001", "0" * 16, 1))


def test_a_rank_that_is_missed_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFailed) as caught:
        Save(tmp_path, snapshot(0), ranks_on(LocalStore(), 0, world=3, patience=0.5), keep=None).run()
    assert caught.value.rank == 1


def test_ranks_that_do_not_take_part_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_STALL_SECONDS", "0.5")
    store = LocalStore()
    first = Save(tmp_path, snapshot(0), ranks_on(store, 0), keep=None)
    second = Save(tmp_path, snapshot(1), ranks_on(store, 1), keep=None)

    def come_late() -> Path:
        deadline = time.monotonic() + 240
        while "Rank(s) [1] have not come to it" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        return second.run()

    assert together(first.run, come_late) == [tmp_path / "step-00000001"] * 2
    assert "Rank 0 waits for all ranks to write their part" in caplog.text


def test_work_that_goes_on_is_waited_for() -> None:
    signs = itertools.count()
    ranks = ranks_on(LocalStore(), 0, world=3, patience=1.5)
    stop = threading.Timer(3.5, lambda: ranks.tell("word/1", "here"))
    stop.start()
    assert ranks.wait(["word/1"], "a word", lambda: next(signs)) == {"word/1": "here"}
    with pytest.raises(PeerLate):
        ranks.wait(["word/2"], "a word", lambda: None)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_store_that_is_lost(tmp_path: Path, is_complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is on the disk counts, also if rank 0 can no longer say so."""
    monkeypatch.setattr("lockstep.checkpoint.protocol._STORE_LOST_SECONDS", 0.3)
    store, other = LocalStore(), LosableStore()
    other._values = store._values
    second = Save(tmp_path, snapshot(1), ranks_on(other, 1), keep=None)
    hear = second._hear_verdict

    def hear_after_loss(place: Any) -> Path:
        if is_complete:
            while not (tmp_path / "latest").exists():
                pass
        other.is_lost = True
        return hear(place)

    second._hear_verdict = hear_after_loss  # type: ignore[method-assign]
    first = Save(tmp_path, snapshot(0, step=1 if is_complete else 2), ranks_on(store, 0), keep=None)
    results = together(first.run, second.run)
    if is_complete:
        assert results == [tmp_path / "step-00000001"] * 2
    else:
        assert all(isinstance(result, CheckpointFailed) for result in results)
        assert "store was lost" in str(results[1])
