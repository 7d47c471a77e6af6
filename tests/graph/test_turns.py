"""Turns to compile, with real processes and without a compiler: who waits, and that every wait ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch._inductor.config as inductor_config

from lockstep import torch_private
from lockstep.graph import turns
from lockstep.graph.turns import in_turn, take_turn


class Holder:
    """A forked process that has the turn of "graph" until it is told to go on."""

    def __init__(self, directory: Path, how: str = "") -> None:
        told, self._tell = os.pipe()
        self._heard, say = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            turns._busy = threading.Lock()  # it may be another thread's at this moment
            os.setpgid(0, 0)
            os.close(self._tell)

            def compile() -> None:
                if how == "forks" and os.fork() == 0:
                    signal.pause()
                os.write(say, b".")
                os.read(told, 1)
                if how == "fails":
                    raise ValueError("no compiler today")

            with contextlib.suppress(BaseException):
                in_turn(str(directory), "graph", compile)
            os.read(told, 1)  # alive, but done
            os._exit(0)
        os.close(told)
        assert os.read(self._heard, 1) == b"."

    def go_on(self) -> None:
        os.write(self._tell, b".")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._tell)
        os.close(self._heard)


Hold = Callable[..., Holder]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts another process that has the turn of "graph"."""
    holders = []

    def start(how: str = "") -> Holder:
        holders.append(Holder(tmp_path, how))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait would be far longer than the test may take."""
    monkeypatch.setenv("LOCKSTEP_COMPILE_TIMEOUT", "100000")


Wait = Callable[..., threading.Event]


@pytest.fixture
def wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Wait:
    """Lets a thread wait for the turn of "graph" and then call a function; returns what is set when it has its turn."""
    caplog.set_level(logging.INFO, "lockstep")

    def start(then: Callable[[], object] = bool) -> threading.Event:
        began = threading.Event()
        threading.Thread(
            target=in_turn, args=(str(tmp_path), "graph", lambda: (began.set(), then())), daemon=True
        ).start()
        deadline = monotonic() + 240
        while "waiting for another process" not in caplog.text:
            assert monotonic() < deadline
            sleep(0.01)
        assert not began.is_set()
        return began

    return start


@pytest.mark.usefixtures("never")
def test_the_second_waits_for_the_first(hold: Hold, wait: Wait) -> None:
    holder = hold()
    began = wait()
    assert not began.wait(0.3)
    holder.go_on()
    assert began.wait(240)


@pytest.mark.usefixtures("never")
def test_who_has_waited_keeps_nobody_waiting(hold: Hold, wait: Wait) -> None:
    """All others find the work of the first one in the cache side by side, not one by one."""
    holder = hold()
    may_end = threading.Event()
    began = wait(then=may_end.wait)
    holder.go_on()
    assert began.wait(240)
    hold()  # a third process gets the turn while the second one is still at it
    may_end.set()


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("how", ["", "forks"])
def test_a_holder_that_is_killed_holds_nobody_up(hold: Hold, wait: Wait, how: str) -> None:
    holder = hold(how)
    began = wait()
    os.kill(holder.pid, signal.SIGKILL)  # a child that it forked lives on
    assert began.wait(240)


@pytest.mark.usefixtures("never")
def test_a_holder_that_is_stopped_holds_nobody_up(hold: Hold, wait: Wait) -> None:
    """Or the one that waits would come to no collective, where such a rank is noticed."""
    holder = hold()
    began = wait()
    os.kill(holder.pid, signal.SIGSTOP)
    assert began.wait(240)


@pytest.mark.usefixtures("never")
def test_a_failure_reaches_its_rank_and_lets_the_others_try(tmp_path: Path, hold: Hold, wait: Wait) -> None:
    holder = hold("fails")
    began = wait()
    holder.go_on()
    assert began.wait(240)

    def fail() -> None:
        raise OSError("no compiler today")

    with pytest.raises(OSError, match="no compiler today"):
        in_turn(str(tmp_path), "graph", fail)
    hold()  # and nothing is held after it


@pytest.mark.usefixtures("never")
def test_another_graph_and_another_cache_do_not_wait(tmp_path: Path, hold: Hold) -> None:
    hold()
    other = tmp_path / "other"
    other.mkdir()
    assert in_turn(str(tmp_path), "another graph", lambda: "compiled") == "compiled"
    assert in_turn(str(other), "graph", lambda: "compiled") == "compiled"


@pytest.mark.usefixtures("never")
def test_who_has_a_turn_does_not_wait_for_another(tmp_path: Path, hold: Hold) -> None:
    """Neither a compilation inside of one, nor another thread: two processes could wait for each other."""
    hold()
    results = []

    def compile() -> str:
        results.append(in_turn(str(tmp_path), "graph", lambda: "inside"))
        thread = threading.Thread(
            target=lambda: results.append(in_turn(str(tmp_path), "graph", lambda: "beside")), daemon=True
        )
        thread.start()
        thread.join(240)
        return "compiled"

    assert in_turn(str(tmp_path), "outer graph", compile) == "compiled"
    assert results == ["inside", "beside"]


def test_the_deadline_ends_a_wait(
    tmp_path: Path, hold: Hold, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_COMPILE_TIMEOUT", "0.2")
    hold()
    assert in_turn(str(tmp_path), "graph", lambda: "compiled") == "compiled"
    assert "another process has been compiling" in caplog.text


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("why", ["no such directory", "no locks here", "Windows"])
def test_without_locks_nobody_waits(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    hold()

    def no_locks(*args: object) -> None:
        raise OSError(37, "No locks available")

    directory = tmp_path / "nowhere" if why == "no such directory" else tmp_path
    if why == "no locks here":
        monkeypatch.setattr(turns.fcntl, "lockf", no_locks)
    if why == "Windows":
        monkeypatch.setattr(turns, "fcntl", None)
    assert in_turn(str(directory), "graph", lambda: "compiled") == "compiled"


@pytest.mark.parametrize(
    ("settings", "takes_turns"),
    [
        ({}, True),
        ({"fx_graph_cache": False}, False),
        ({"force_disable_caches": True}, False),
        ({"aten_distributed_optimizations.spmd_check": True}, False),
        ({"aten_distributed_optimizations.enable_overlap_scheduling": True}, False),
    ],
)
def test_turns_are_taken_where_inductor_caches_and_meets_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], takes_turns: bool
) -> None:
    """By the options of one compilation, for the forward and for the backward, which is lowered later."""
    seen = []

    def spy(directory: str, what: str, compile: Callable[[], object]) -> object:
        seen.append(what)
        return compile()

    monkeypatch.setattr(turns, "in_turn", spy)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backend = torch_private.inductor_backend()

    def compile(gm: torch.fx.GraphModule, inputs: object) -> object:
        patches = {"fx_graph_cache": True, **settings}
        return torch_private.compile_with_inductor(backend, gm, inputs, patches, take_turn)

    x = torch.ones(3, requires_grad=True)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=False):
        torch.compile(lambda x: x.sin().sum(), backend=compile)(x).backward()
    assert len(set(seen)) == (2 if takes_turns else 0)
