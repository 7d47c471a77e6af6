"""The lookout, with peers that are played and a clock that is turned by hand."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.agree import lookout
from lockstep.agree.beat import Beat
from lockstep.agree.lookout import Lookout
from lockstep.errors import PeerLate, StoreSilent


class Pulse:
    """Two peers and a store, as a test wants them."""

    def __init__(self) -> None:
        self.rank, self.world, self.period = 0, 3, 1.0
        self.line = SimpleNamespace(is_ours=True, is_broken=False, num_answers=0)
        self.has_ended = self.is_waiting = False
        self.step = "step 3"
        self.beats = {1: Beat(1), 2: Beat(1)}
        self.is_store_silent = False
        self.silent: set[int] = set()
        self.host: list[int] = []
        self.said: Any = None

    def step_words(self) -> str:
        return self.step

    def look(self) -> dict[int, Beat] | None:
        if self.is_store_silent:
            return None
        for rank, beat in self.beats.items():
            if rank not in self.silent:
                beat.number += 1
        return self.beats

    def last_seen(self, rank: int) -> Beat | None:
        return self.beats.get(rank)

    def process_of(self, rank: int) -> None:
        return None

    def hosts(self) -> list[int]:
        return self.host

    def end_with(self, words: Any, seconds: float) -> None:
        self.said = words

    def stay_until_heard(self) -> None:
        pass


class Scene:
    """A lookout that is turned by hand; ``left`` has the errors with which it would have ended the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pulse, self.now = Pulse(), 0.0
        self.place: object = "barrier"
        self.is_excused = False
        self.left: list[BaseException] = []
        monkeypatch.setattr(lookout, "monotonic", lambda: self.now)
        monkeypatch.setattr(lookout, "_place_of_main", lambda pulse: (self.place, pulse.step_words()))
        monkeypatch.setattr(lookout, "_is_in_collective", lambda: True)
        self.lookout = Lookout(self.pulse, lambda: self.is_excused, self.left.append)  # type: ignore[arg-type]

    def turn(self, seconds: int, pace: float = 1.0) -> None:
        for _ in range(seconds):
            self.now += pace
            assert self.lookout.look()


def said_here(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this thread has logged: those of tests before this one may still have something to say."""
    return [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.delenv("LOCKSTEP_HEARTBEAT_TIMEOUT", raising=False)
    monkeypatch.delenv("LOCKSTEP_STALL_SECONDS", raising=False)
    return Scene(monkeypatch)


def test_a_silent_peer_is_named_after_a_while_and_an_error_at_the_deadline(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.pulse.silent = {2}
    scene.turn(20)
    (warning,) = said_here(caplog)
    assert "rank 2 gives no sign of life for 10 s" in warning
    assert not scene.left
    scene.turn(45)
    error = scene.left[0]
    assert isinstance(error, PeerLate)
    assert error.ranks == (2,)
    assert "Rank(s) [2] gave no sign of life for 60 s" in str(error)
    assert scene.pulse.said.type == "PeerLate"
    assert scene.pulse.said.ranks == (2,)


def change_place(scene: Scene) -> None:
    scene.place = object()


def change_step(scene: Scene) -> None:
    scene.pulse.step += "+"


def wait_in_our_own(scene: Scene) -> None:
    scene.pulse.is_waiting = True


def handle_an_error(scene: Scene) -> None:
    scene.is_excused = True


def speak_again(scene: Scene) -> None:
    scene.pulse.silent = set() if scene.pulse.silent else {2}


@pytest.mark.parametrize("event", [change_place, change_step, wait_in_our_own, handle_an_error, speak_again])
def test_nothing_ends_where_this_rank_or_its_peer_goes_on(scene: Scene, event: Any) -> None:
    scene.pulse.silent = {2}
    for _ in range(5):
        scene.turn(40)
        event(scene)
        scene.turn(1)
    assert not scene.left


def test_peers_that_are_alive_ended_or_were_never_seen_are_no_fault(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.pulse.beats[1].ended = True
    scene.pulse.silent = {1}
    scene.turn(300)
    scene.pulse.beats = {}
    scene.turn(300)
    assert not scene.left
    assert not said_here(caplog)


def test_time_in_which_this_process_stood_still_does_not_count(scene: Scene) -> None:
    scene.pulse.silent = {1, 2}
    scene.turn(20, pace=1000.0)
    assert not scene.left
    assert scene.lookout._stood <= 2.0 * 20


def test_the_deadline_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "0")
    scene = Scene(monkeypatch)
    scene.pulse.silent = {1}
    scene.turn(1000)
    assert not scene.left
    assert 2 < len(said_here(caplog)) < 9


def test_a_silent_store_is_an_error_of_the_rank_that_hosts_it(scene: Scene) -> None:
    scene.turn(5)
    scene.pulse.is_store_silent, scene.pulse.host = True, [1]
    scene.turn(70)
    assert isinstance(scene.left[0], StoreSilent)
    assert scene.left[0].ranks == (1,)


def test_a_launcher_that_was_paused_with_its_store_is_nobodys_fault(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "is_standing_still", lambda pid: True)
    scene.turn(5)
    scene.pulse.is_store_silent = True
    scene.turn(300)
    assert not scene.left


def test_who_was_silent_when_the_store_went_with_another_rank_is_still_an_error(scene: Scene) -> None:
    scene.pulse.silent = {2}
    scene.turn(30)
    scene.pulse.is_store_silent = scene.pulse.line.is_broken = True
    scene.turn(40)
    error = scene.left[0]
    assert isinstance(error, PeerLate)
    assert error.ranks == (2,)


def test_one_that_cannot_look_warns_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []
    looked_again = threading.Event()

    def look(self: Lookout) -> bool:
        looks.append(1)
        if len(looks) > 3:
            looked_again.set()
            return False
        raise RuntimeError("in the lookout")

    monkeypatch.setattr(Lookout, "look", look)
    monkeypatch.setattr(lookout, "_PERIOD_SECONDS", 0.01)
    pulse = Pulse()
    lookout.keep_lookout(pulse, lambda: False)  # type: ignore[arg-type]
    assert looked_again.wait(60)
    assert len([m for m in caplog.messages if "in the lookout" in m]) == 1


def test_it_is_over_with_the_end_of_the_process(scene: Scene) -> None:
    scene.pulse.has_ended = True
    assert not scene.lookout.look()


def test_a_store_that_is_heard_late_is_there(scene: Scene) -> None:
    """A thread that holds the interpreter's lock again and again keeps answers from being heard in time."""
    scene.pulse.is_store_silent, scene.pulse.host = True, [1]
    for _ in range(300):
        scene.pulse.line.num_answers += 1
        scene.turn(1)
    assert not scene.left


def test_who_had_just_spoken_when_the_store_went_is_no_fault(scene: Scene) -> None:
    scene.turn(10)
    scene.pulse.silent = {2}
    scene.turn(2)
    scene.pulse.is_store_silent = scene.pulse.line.is_broken = True
    scene.turn(300)
    assert not scene.left


def test_a_program_that_stands_in_no_collective_is_only_warned(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lookout, "_is_in_collective", lambda: False)
    scene.pulse.silent = {2}
    scene.turn(300)
    assert not scene.left
    assert said_here(caplog)


@pytest.mark.parametrize(("name", "is_one"), [("wait", True), ("upload", False)])
def test_what_is_waited_for_is_told_by_the_method(monkeypatch: pytest.MonkeyPatch, name: str, is_one: bool) -> None:
    """Work that a collective has returned is waited for in C++, below the program's own line."""
    found = []

    class Work:
        def __getattr__(self, _: str) -> Any:
            return self.look

        @staticmethod
        def look() -> None:
            frame = sys._getframe(1)
            monkeypatch.setattr(lookout, "_main_frame", lambda: frame)
            found.append(lookout._is_in_collective())

    work = Work()
    if name == "wait":
        work.wait()
    else:
        work.upload()
    assert found == [is_one]
