"""The line to the store, with stores that stand still, break, or are read by someone else."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.agree import link
from lockstep.agree.beat import words_of
from lockstep.agree.board import Board
from lockstep.agree.keys import read
from lockstep.agree.line import Line, end_threads
from lockstep.agree.pulse import Pulse
from lockstep.agree.sockets import hang_up
from lockstep.agree.watch import Watch
from lockstep.errors import PeerFailed, PeerLate, StoreSilent


class Standing:
    """A store that does not answer while it is closed, as one whose host is stopped."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.is_open = threading.Event()
        self.is_open.set()

    def clone(self) -> Standing:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any) -> Any:
            self.is_open.wait()
            return method(*args)

        return call


class Broken:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")


def test_an_answer_comes_back_and_silence_is_an_error_that_ends() -> None:
    store = Standing()
    line = Line(store)
    assert line.ask(lambda s: s.add("number", 2), 60) == 2
    assert line.silence < 60
    store.is_open.clear()
    with pytest.raises(StoreSilent, match="not answered"):
        line.ask(lambda s: s.add("number", 1), 0.3)
    assert line.silence > 0
    store.is_open.set()
    # What was given up is either done or dropped, and the line works again.
    assert line.ask(lambda s: s.add("number", 1), 60) in (3, 4)


HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100_000)
"""


@contextmanager
def host_of_a_store() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store, and its port."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        yield host, int(host.stdout.readline())
    finally:
        host.kill()
        host.communicate()


def ask_for_long(line: Line) -> None:
    for _ in range(300):  # a signal takes its time to reach the thread that serves
        line.ask(lambda s: s.add("number", 1), 0.2)


def test_lines_end_while_the_host_of_their_store_stands_still() -> None:
    with host_of_a_store() as (host, port):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        held, dropped = Line(store, period=1000), Line(store, period=1000)
        for number, line in enumerate((held, dropped), 1):
            assert line.ask(lambda s: s.add("number", 2), 60) == 2 * number
        threads = [held._thread, dropped._thread]
        host.send_signal(signal.SIGSTOP)
        for line in (held, dropped):
            with pytest.raises(StoreSilent):
                ask_for_long(line)
        held.close(0.2)
        del line, dropped
        gc.collect()
        end_threads(0.2)
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive()


def test_a_connection_that_broke_is_made_again_to_the_same_store_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(link, "_LONGEST_PAUSE", 0.05)
    turns: list[bytes] = []
    with host_of_a_store() as (host, port):
        store = dist.PrefixStore("of the job", dist.TCPStore("127.0.0.1", port, is_master=False))
        line = Line(store, lambda s: turns.append(s.compare_set("turns", "", "taken")), period=0.05)
        assert line.ask(lambda s: s.compare_set("mine", "", "here"), 60) == b"here"
        threads = threading.active_count()
        for number in range(1, 4):
            hang_up(port)
            assert line.ask(lambda s: s.compare_set("mine", "", "other"), 60) == b"here"  # as if nothing had happened
            assert not line.is_broken
            hang_up(port)
            with suppress(StoreSilent):  # what may not be done twice is an error, whether it was done or not
                line.ask(lambda s: s.add("number", 1), 60, repeats=False)
            assert line.ask(lambda s: s.add("number", 0), 60) <= number

        # While nothing answers at its address the store is silent, not gone; what was told meanwhile is not lost.
        real = socket.create_connection
        monkeypatch.setattr(link.socket, "create_connection", raises(TimeoutError("timed out")))
        hang_up(port)
        with pytest.raises(StoreSilent, match="not answered"):
            line.ask(lambda s: s.set("asked", "never mind"), 0.5)
        line.tell(lambda s: s.set("told", "first"))
        line.tell(lambda s: s.set("told", "second"))
        assert not line.is_broken
        assert 0 < line.silence < float("inf")
        num_turns = len(turns)
        monkeypatch.setattr(link.socket, "create_connection", real)
        assert line.ask(lambda s: s.compare_set("told", "", ""), 60) == b"second"
        assert line.silence < 60
        wait_until(lambda: len(turns) > num_turns)
        assert threading.active_count() <= threads

        host.kill()
        host.wait()
    try:
        other = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # another job's, with its port
    except dist.DistNetworkError:
        pytest.skip("the port of the store was taken by another process at once")
    for _ in range(20):
        with pytest.raises(StoreSilent):
            line.ask(lambda s: s.set("mine", "here"), 60)
        assert line.is_broken
        sleep(0.05)
    assert not other.check(["of the job/mine"])


def raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 60
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)


def test_errors_come_back_and_a_broken_store_is_known_as_such() -> None:
    with pytest.raises(ZeroDivisionError):
        Line(dist.HashStore()).ask(lambda s: 1 / 0, 60)
    line = Line(Broken())
    with pytest.raises(RuntimeError, match="Connection reset"):
        line.ask(lambda s: s.add("number", 1), 60)
    assert line.silence == float("inf")


def test_a_board_waits_no_longer_than_it_was_told() -> None:
    store = Standing()
    pulse = Pulse(store, 0, 2)
    board = Board(store, "test", 0, 2, pulse)
    board.post("mine", "here")
    assert board.read("mine") == "here"
    store.is_open.clear()
    looks: list[float] = []
    with pytest.raises(PeerLate, match="store is silent"):
        board.gather("plan", "mine", 2.5, lambda: looks.append(monotonic()))
    assert looks  # so that others are looked for meanwhile
    store.is_open.set()


def test_the_thread_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    line = Line(dist.HashStore())
    line.ask(lambda s: s.set("a", "b"), 60)
    (own,) = set(threading.enumerate()) - before  # others may end meanwhile, of tests before this one
    del line
    gc.collect()
    deadline = monotonic() + 240
    while own.is_alive() and monotonic() < deadline:
        sleep(0.02)
    assert not own.is_alive()


def test_a_forked_child_has_no_line() -> None:
    store = dist.HashStore()
    line = Line(store)
    line.ask(lambda s: s.set("who", "parent"), 60)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            line.tell(lambda s: s.set("who", "child"))
            line.ask(lambda s: s.set("who", "child"), 1)
        except StoreSilent:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert line.ask(lambda s: read(s, "who"), 60) == "parent"


def test_the_keys_of_a_board_go_when_all_ranks_have_let_go_of_it() -> None:
    store = dist.HashStore()
    pulses = [Pulse(store, rank, 2) for rank in range(2)]
    boards = [Board(store, "run/0", rank, 2, pulses[rank]) for rank in range(2)]
    for board in boards:
        board.post(f"digest/{board.rank}", "x")
    boards[0].post("verdict", "equal")
    for pulse in pulses:
        pulse.line.ask(lambda s: None, 60)
    keys = store.num_keys()
    del board
    boards.pop(0)
    gc.collect()
    pulses[0].line.ask(lambda s: None, 60)
    assert read(store, "run/0/verdict") == "equal"  # the other rank may still want to read it
    boards.clear()
    gc.collect()
    for pulse in pulses:
        pulse.line.ask(lambda s: None, 60)
    assert store.num_keys() <= keys - 3
    assert not any(store.check([f"run/0/{name}"]) for name in ("verdict", "digest/0", "digest/1", "closed", "closed/0"))


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["{", "null", '{"rank": 9, "type": "ValueError", "text": "x"}', "\x01\x02", DEEP])
def test_words_that_no_rank_has_written_do_not_take_the_place_of_a_ranks(text: str) -> None:
    store = dist.HashStore()
    pulses = [Pulse(store, rank, 2) for rank in range(2)]
    boards = [Board(store, "run/0", rank, 2, pulses[rank]) for rank in range(2)]
    store.set(pulses[0]._self.key("final"), text)
    boards[0].post("failure", text)
    for error in (ValueError("first"), ValueError("second")):
        Watch(boards[1], 1).post_failure(error)
        pulses[1].end_with(words_of(error, 1), 60)
    with pytest.raises(PeerFailed, match="ValueError: first"):
        Watch(boards[0], 0).raise_failed_peer(lambda: "a test")
    pulses[0].look([1])
    assert pulses[0].final == words_of(ValueError("first"), 1)
