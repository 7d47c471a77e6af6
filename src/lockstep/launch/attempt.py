"""One attempt: start the ranks, watch them until they end or one fails, hear the others out, end what is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from lockstep import settings
from lockstep.launch import processes
from lockstep.launch.arrivals import Arrivals
from lockstep.launch.cause import Cause, find_cause, named_peers
from lockstep.launch.facts import Ending, RankFacts, signal_name
from lockstep.launch.inside import STACK_SIGNAL, stack_path
from lockstep.launch.page import Place, place_of
from lockstep.launch.signals import Signals
from lockstep.launch.spawn import CannotStart, Program, Started, mark_of, start
from lockstep.launch.store import HostedStore
from lockstep.launch.visible import visible

_LOOK_SECONDS = 0.2  # how long to sleep at most; the end of a rank wakes at once
_LAST_WORDS_SECONDS = 3.0  # for survivors of a failure to notice it and to say where they were
_STACK_SECONDS = 0.5
_STOPPED_SECONDS = 5.0  # a rank that is stopped for longer is worth a line
_SPEAK_FIRST_SECONDS = 10.0  # for ranks to say themselves that they miss one: they know where
_LEFT_SECONDS = 60.0  # a rank that goes on for so long when another has ended is worth a line
_KILLED_SECONDS = 10.0  # a process that SIGKILL does not end by then is stuck in the kernel


class Outcome(Enum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Limits:
    """How long the launcher waits, in seconds; 0 switches ``start`` off."""

    grace: float = 5.0
    start: float = 600.0


@dataclass
class Ended:
    """An attempt that is over."""

    number: int
    outcome: Outcome
    cause: Cause
    seconds: float
    ranks: list[RankFacts] = field(default_factory=list)
    signal: int = 0

    @property
    def step(self) -> int:
        """The furthest step that a rank was seen in; -1 for none."""
        return max((facts.place.step for facts in self.ranks), default=-1)


class Attempt:
    """The ranks of one attempt, from their start to their end."""

    def __init__(
        self, program: Program, number: int, folder: Path, signals: Signals, limits: Limits, port: int
    ) -> None:
        self._program, self._number, self._folder = program, number, folder
        self._signals, self._limits = signals, limits
        self._store = HostedStore(port)
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}
        self._ranks: list[RankFacts] = []
        self._oom_before: dict[int, dict[str, int]] = {}
        self._started: Started | None = None
        self._num_looks_stopped: dict[int, int] = {}
        self._num_looks_alone = self._num_looks_left = 0
        self._arrivals = Arrivals(limits.start, say)

    def run(self) -> Ended:
        """Run it to its end; nothing of it is left then."""
        began = time.monotonic()
        try:
            cause = self._watch() if self._start() else None
            stopped_by = self._signals.received[0] if self._signals.received else 0
            if stopped_by:
                cause = Cause(None, f"stopped by {signal_name(stopped_by)}", exit_code=-stopped_by)
            elif self._is_done:
                told = self._told_to_stop()
                cause = told or Cause(None, "all ranks ended well", exit_code=0)
                stopped_by = signal.SIGTERM if told else 0
            elif cause is None:
                self._hear_survivors()
            if not self._is_done:
                self._take_stacks()
                self._end_ranks()
            self._read_all()
            if cause is None:
                cause = find_cause(self._ranks)
        finally:
            self._end_at_once()
            self._store.close()
            if self._started is not None:
                self._started.close()
            for handle in self._pidfds.values():
                os.close(handle)
        outcome = Outcome.STOPPED if stopped_by else Outcome.DONE if self._is_done else Outcome.FAILED
        return Ended(self._number, outcome, cause, time.monotonic() - began, self._ranks, stopped_by)

    @property
    def _is_done(self) -> bool:
        return all(facts.ending is Ending.DONE for facts in self._ranks) and bool(self._ranks)

    def _told_to_stop(self) -> Cause | None:
        """Whether ranks ended well because some of them were told to stop, which this process was not."""
        told = [facts for facts in self._ranks if settings.stop_mark(self._folder, facts.rank).exists()]
        if not told:
            return None
        who = ", ".join(f"rank {facts.rank} (pid {facts.pid})" for facts in told)
        return Cause(None, f"{who} got SIGTERM, and all ranks stopped together", exit_code=-signal.SIGTERM)

    @property
    def _running(self) -> list[RankFacts]:
        return [facts for facts in self._ranks if facts.is_running]

    # ---------------------------------------------------------------- start and watch

    def _start(self) -> bool:
        try:
            self._started = start(self._program, self._store, self._number, self._folder)
        except SignalException as error:  # torch's starter has handlers of its own while it starts
            self._signals.received.append(int(error.sigval))
            return False
        except OSError as error:
            raise CannotStart(f"the ranks cannot be started: {error}") from error
        finally:
            self._signals.listen()
        for rank, process in self._started.processes.items():
            self._ranks.append(RankFacts(rank, process.pid, self._started.host))
            self._oom_before[rank] = processes.num_oom_kills(process.pid)
            with contextlib.suppress(OSError, AttributeError):  # without it, looking now and then does
                self._pidfds[rank] = os.pidfd_open(process.pid)
                self._poll.register(self._pidfds[rank], select.POLLIN)
        return True

    def _watch(self) -> Cause | None:
        """Wait until all ranks have ended, one has failed, or a signal came; a cause where the launcher found one."""
        next_look = 0.0
        while not self._signals.received:
            if not self._running or any(facts.ending is Ending.FAILED for facts in self._ranks):
                return None
            self._sleep(_LOOK_SECONDS)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + 1.0
                alone = self._look_for_stopped()
                if alone is not None:
                    return alone
                self._look_for_left()
                places = {facts.rank: self._place(facts) for facts in self._ranks}
                cause = self._arrivals.look(places, {facts.rank: facts.pid for facts in self._running})
                if cause is not None:
                    return cause
        return None

    def _sleep(self, seconds: float) -> None:
        """Sleep until a rank ends, at most this long; and note who has ended."""
        if self._pidfds:
            self._poll.poll(max(1, int(1000 * seconds)))
        else:
            time.sleep(min(seconds, 0.05))
        if self._signals.wants_pause:
            self._signals.wants_pause = False
            self._pause()
        self._note_ended()

    def _pause(self) -> None:
        """Stop all ranks and this process, until it is continued."""
        paused = [facts.pid for facts in self._running if not processes.is_stopped(facts.pid)]
        for pid in paused:
            processes.send(pid, signal.SIGSTOP, to_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for pid in paused:
            processes.send(pid, signal.SIGCONT, to_session=True)

    def _note_ended(self) -> None:
        assert self._started is not None
        now = time.time()
        for facts in self._running:
            code = self._started.processes[facts.rank].poll()
            if code is None:
                continue
            facts.exit_code, facts.ended_at = code, now
            if facts.ending is Ending.RUNNING:
                facts.ending = Ending.DONE if code == 0 else Ending.FAILED
            if facts.rank in self._pidfds:
                handle = self._pidfds.pop(facts.rank)
                self._poll.unregister(handle)
                os.close(handle)

    def _look_for_stopped(self) -> Cause | None:
        """Tell of ranks that are stopped while others run; a cause where they are so for too long.

        Looks are counted, once a second, since time in which this process stood still does not count.
        """
        stopped = [facts for facts in self._running if processes.is_stopped(facts.pid)]
        if len(stopped) == len(self._running):
            self._num_looks_stopped.clear()  # all of them: someone suspended the job, or the machine
            return self._left_alone(stopped)
        self._num_looks_alone = 0
        num_looks = {facts.rank: self._num_looks_stopped.get(facts.rank, 0) + 1 for facts in stopped}
        self._num_looks_stopped = num_looks
        limit = self._silence_limit()
        for facts in stopped:
            which = f"rank {facts.rank} (pid {facts.pid}) is stopped"
            if limit and num_looks[facts.rank] >= limit + _SPEAK_FIRST_SECONDS:
                text = f"{which} (SIGSTOP or a debugger) for {num_looks[facts.rank]} s, and the others wait for it"
                return Cause(facts.rank, text)
            if num_looks[facts.rank] == _STOPPED_SECONDS:
                say(f"{which}, and the others wait for it; kill -CONT {facts.pid} lets it go on")
        return None

    def _silence_limit(self) -> float:
        """The deadline that ranks go by, which a program may set for itself; 0 for none; ours where none has said."""
        said = []
        for facts in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                said.append(float(settings.silence_mark(self._folder, facts.rank).read_text()))
        if not said:
            return settings.heartbeat_timeout()
        return max(said) if all(seconds > 0 for seconds in said) else 0.0

    def _left_alone(self, stopped: list[RankFacts]) -> Cause | None:
        """A cause once ranks have been stopped for the deadline of ranks without a sign of life, and others ended."""
        self._num_looks_alone += 1
        limit = self._silence_limit()
        if not limit or self._num_looks_alone < limit or len(stopped) == len(self._ranks) or not stopped:
            return None
        first = stopped[0]
        text = f"rank {first.rank} (pid {first.pid}) is stopped (SIGSTOP or a debugger), and all others have ended"
        return Cause(first.rank, text)

    def _look_for_left(self) -> None:
        """Tell of ranks that go on for long when others have ended: perhaps something holds them at their end."""
        left = self._running
        self._num_looks_left = self._num_looks_left + 1 if 0 < len(left) < len(self._ranks) else 0
        if self._num_looks_left == _LEFT_SECONDS:
            who = ", ".join(
                f"rank {facts.rank} (pid {facts.pid}), last seen {self._place(facts).seen}" for facts in left
            )
            say(f"still running {_LEFT_SECONDS:.0f} s after others have ended well: {who}")

    # ---------------------------------------------------------------- end

    def _hear_survivors(self) -> None:
        """Let those that lost a peer say so; they know in which bucket they missed it."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._running and time.monotonic() < deadline and not self._signals.received:
            if all(processes.is_stopped(facts.pid) for facts in self._running):
                return
            self._sleep(_LOOK_SECONDS)

    def _take_stacks(self) -> None:
        """Ask the ranks that are left where they are in their program."""
        asked = []
        for facts in self._running:
            facts.was_stopped = processes.is_stopped(facts.pid)
            # Before it has said anything it has no handler, and the signal would end it.
            if STACK_SIGNAL and not facts.was_stopped and self._place(facts).time:
                processes.send(facts.pid, STACK_SIGNAL, to_session=False)
                asked.append(facts)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not all(self._has_stack(facts) for facts in asked):
            time.sleep(0.02)

    def _has_stack(self, facts: RankFacts) -> bool:
        with contextlib.suppress(OSError):
            return stack_path(self._folder, facts.rank).stat().st_size > 0 or not facts.is_running
        return True

    def _end_ranks(self) -> None:
        """SIGTERM, then SIGKILL; at once for a rank that is stopped or that its peers declared late."""
        self._read_all()
        hung = {rank for facts in self._ranks if facts.ending is Ending.FAILED for rank in named_peers(facts)}
        for facts in self._running:
            facts.ending = Ending.ENDED_BY_LAUNCHER
            at_once = facts.was_stopped or facts.rank in hung
            # One that goes on to a last checkpoint needs the workers of its data loaders until then.
            is_asked = not at_once and settings.signal_mark(self._folder, facts.rank).exists()
            processes.send(facts.pid, signal.SIGKILL if at_once else signal.SIGTERM, to_session=not is_asked)
        deadline = time.monotonic() + self._limits.grace
        num_signals = len(self._signals.received)
        while self._running and time.monotonic() < deadline and len(self._signals.received) == num_signals:
            for facts in self._running:  # one that was stopped only now does not hear SIGTERM
                if processes.is_stopped(facts.pid):
                    processes.send(facts.pid, signal.SIGKILL, to_session=True)
            self._sleep(_LOOK_SECONDS)

    def _end_at_once(self) -> None:
        """Kill what is left of the ranks, and of what they started, unless all ended well."""
        if self._started is None:
            processes.kill_marked(mark_of(self._folder))
            return
        if self._is_done:
            return
        deadline = time.monotonic() + _KILLED_SECONDS
        while time.monotonic() < deadline:
            for facts in self._running:
                if facts.ending is Ending.RUNNING:
                    facts.ending = Ending.ENDED_BY_LAUNCHER
                processes.send(facts.pid, signal.SIGKILL, to_session=True)
            left = processes.kill_marked(mark_of(self._folder))
            self._note_ended()
            if not self._running and not left:
                return
            time.sleep(0.02)
        say(f"processes {[facts.pid for facts in self._running]} do not end; they are stuck in the kernel")

    # ---------------------------------------------------------------- what is known

    def _place(self, facts: RankFacts) -> Place:
        return place_of(self._folder, facts.rank, facts.pid)

    def _read_all(self) -> None:
        for facts in self._ranks:
            facts.read(self._folder)
            if facts.exit_code == -signal.SIGKILL and facts.ending is Ending.FAILED:
                limit = self._limit_reached(facts)
                facts.perhaps_out_of_memory = limit == processes.OF_THE_MACHINE  # another job's process may have been
                facts.out_of_memory = "" if facts.perhaps_out_of_memory else limit

    def _limit_reached(self, facts: RankFacts) -> str:
        before = self._oom_before.get(facts.rank, {})
        for limit, count in processes.num_oom_kills().items():
            if count > before.get(limit, count):
                return limit
        return ""


def say(text: str) -> None:
    """A line of the launcher's, between those of the ranks."""
    show(f"lockstep run: {visible(text)}")


def show(text: str) -> None:
    """Print, if there is still someone to read it: a pipe that was closed is no reason to end a job."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # What was printed is kept, and Python would try again at its end, and fail.
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, sys.stderr.fileno())
        os.close(handle)
