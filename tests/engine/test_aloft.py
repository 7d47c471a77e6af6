"""The watchdog of collectives on a device, with events that come when a test says so."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from lockstep.agree.watch import Watch
from lockstep.engine import aloft as module
from lockstep.engine.aloft import Aloft
from lockstep.errors import PeerLate


class Signal:
    """Stands for a CUDA event."""

    def __init__(self, raises: bool = False) -> None:
        self.has_come = threading.Event()
        self.raises = raises

    def query(self) -> bool:
        if self.raises:
            raise ValueError("a callback of the user's")
        return self.has_come.is_set()


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[module._Watchdog]:
    monkeypatch.setenv("LOCKSTEP_STALL_SECONDS", "1")
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 0.1)
    fresh = module._Watchdog()
    monkeypatch.setattr(module, "_watchdog", fresh)
    yield fresh
    fresh._all.clear()


def until(condition: object, seconds: float = 240.0) -> None:
    deadline = monotonic() + seconds
    while not condition() and monotonic() < deadline:  # type: ignore[operator]
        sleep(0.02)
    assert condition()  # type: ignore[operator]


def test_what_does_not_come_is_named_and_given_up_at_the_limit(
    watchdog: module._Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    watch, aborted = Watch(None, 0, late_seconds=3), []
    aloft = Aloft(watch, lambda: aborted.append(True))
    first, second = Signal(), Signal()
    with caplog.at_level(logging.WARNING, "lockstep"):
        aloft.add("the reduction of bucket 0 in step 5", first)
        aloft.add("the reduction of bucket 1 in step 5", second)
        first.has_come.set()
        until(lambda: bool(aborted))
    assert aborted == [True]
    assert watch.verdict is not None
    assert any("still waiting in the reduction of bucket 1 in step 5" in m for m in caplog.messages)
    with pytest.raises(PeerLate, match="bucket 1 in step 5"):
        watch.raise_verdict()


def test_what_comes_is_let_go(watchdog: module._Watchdog) -> None:
    watch = Watch(None, 0, late_seconds=3)
    aloft = Aloft(watch)
    signals = [Signal() for _ in range(5)]
    for number, signal in enumerate(signals):
        aloft.add(f"bucket {number}", signal)
        signal.has_come.set()
    until(lambda: not aloft._flights)
    assert watch.verdict is None


def test_its_own_trouble_costs_one_warning(watchdog: module._Watchdog) -> None:
    watch = Watch(None, 0, late_seconds=2)
    troubled, healthy = Aloft(watch), Aloft(watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        troubled.add("bucket 0", Signal(raises=True))
        healthy.add("bucket 0", Signal())
        until(lambda: watch.verdict is not None)  # the healthy one is still looked at
    assert len([w for w in caught if "watchdog" in str(w.message)]) == 1


def test_a_watchdog_that_died_is_started_again(watchdog: module._Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: object) -> None:
        return

    watch = Watch(None, 0, late_seconds=2)
    aloft = Aloft(watch)
    with monkeypatch.context() as patch:
        patch.setattr(module._Watchdog, "_run", die)
        aloft.add("bucket 0", Signal())
        assert watchdog._thread is not None
        watchdog._thread.join()
    with pytest.warns(UserWarning, match="has died, and was started again"):
        aloft.add("bucket 1", Signal())
    until(lambda: watch.verdict is not None)
