"""The pulse: each process gives a sign of life every second, over the store, and can look for those of the others.

A process that is stopped, frozen, cut off, or that holds the interpreter's lock gives none.  A sign also says what the
process is doing, where it waits, and which process it is, so that one on the same host can be looked for directly.
Nothing of this happens in a training step; it is a thread's work, a few store calls a second.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from lockstep import torch_private
from lockstep.agree.alive import Process, this_process
from lockstep.agree.beat import Beat, Place, Words, read_beat, read_words, stack_now, where_now
from lockstep.agree.keys import full_name, read
from lockstep.agree.line import Line
from lockstep.agree.sockets import listens, port_of
from lockstep.errors import StoreSilent

_STAY_SECONDS = 2.5  # at most, for the host of the store: others hear once a second
_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 0.5  # how long a rank that waits lets itself be held up by a look at the others


class _Self:
    """What this process says and has heard; shared with the thread of the line, which must not hold the pulse."""

    def __init__(self, prefix: str, rank: int, world: int, hosts_store: bool) -> None:
        self.prefix, self.rank, self.world = prefix, rank, world
        self.lock = threading.Lock()
        self.number = 0
        self.process = this_process()
        self.hosts_store = hosts_store
        self.waits: dict[str, Place] = {}
        self.meets: dict[str, tuple[str, str]] = {}
        self.note = ""
        self.ended = False
        self.has_told_end = False
        self.how = ""
        self.boards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.last_doing = ""
        self.doing: weakref.WeakSet[Any] = weakref.WeakSet()
        self.final: Words | None = None
        self.answered = ""  # the last question about our stack that we answered
        self.known: dict[int, Beat] = {}  # by rank, as last read
        self.last_turn = monotonic()
        self.longest_gap = 0.0  # between two turns

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def beat(self) -> Beat:
        with self.lock:
            self.number += 1
            doing = self.step_words()
            self.last_doing = doing or self.last_doing
            return Beat(
                self.number,
                self.process,
                self.hosts_store,
                doing,
                where_now(),
                self.note,
                self.ended,
                self.how,
                sorted(board.name for board in list(self.boards) if not board.has_group()),
                self.final is not None,
                dict(self.waits),
                dict(self.meets),
            )

    def step_words(self) -> str:
        """Say which steps this process is in."""
        return "; ".join(sorted({text for who in list(self.doing) if (text := who.doing())})[:4])

    def take_turn(self, store: Any) -> None:
        """Hear the last words of others, answer questions, give a sign of life."""
        now = monotonic()
        self.longest_gap, self.last_turn = max(self.longest_gap, now - self.last_turn), now
        if self.final is None:
            self.final = read_words(read(store, self.key("final")), self.world)
        question = read(store, self.key("question")) or ""
        if question != self.answered:
            self.answered = question
            if str(self.rank) in question.split(" ")[1:]:
                store.set(self.key(f"stack/{self.rank}"), stack_now()[-8000:])
        self._post(store)
        if len(self.known) < self.world - 1:
            self.look(store, [r for r in range(self.world) if r != self.rank and r not in self.known])

    def part(self, store: Any) -> None:
        """The group of this process is gone, and the process goes on without it: say so once."""
        if not self.ended:
            self.ended = True
            self.how = f"has destroyed its process group {self.last_doing or 'before it trained anything'}."
        if not self.has_told_end:  # or nobody had the time to
            self._post(store)

    def _post(self, store: Any) -> None:
        ended = self.ended
        store.set(self.key(f"beat/{self.rank}"), self.beat().to_json())
        self.has_told_end = ended

    def look(self, store: Any, ranks: Sequence[int]) -> dict[int, Beat]:
        """Read the beats of ``ranks``; those that have none are left out."""
        keys = [self.key(f"beat/{rank}") for rank in ranks]
        if len(keys) > 1 and store.has_extended_api() and store.check(keys):
            texts: list[str | None] = [value.decode(errors="replace") for value in store.multi_get(keys)]
        else:
            texts = [read(store, key) for key in keys]
        beats = {rank: beat for rank, text in zip(ranks, texts, strict=True) if (beat := read_beat(text)) is not None}
        self.known.update(beats)
        if self.final is None and any(beat.ended for beat in beats.values()):
            self.final = read_words(
                read(store, self.key("final")), self.world
            )  # was left before the sign that it ended
        return beats


class Pulse:
    """This process among the others, by global rank."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._self = _Self(full_name("processes"), rank, world, listens(port_of(store)))
        self.rank, self.world = rank, world
        # More ranks look at more ranks: rarer, so that the store's work grows with the number of ranks, not its square.
        self.period = max(1.0, world / 100)
        self.line = Line(store, self._self.take_turn, self.period, self._self.part)
        self._question = 0
        weakref.finalize(self, _remove, self.line, self._self.key(f"stack/{rank}"))

    # ---------------------------------------------------------------- what this process says

    def listen_to(self, who: Any) -> None:
        """Let ``who.doing()`` say what this process is doing, as long as it lives."""
        with self._self.lock:
            self._self.doing.add(who)

    def know(self, board: Any) -> None:
        """Say of a board whether its group (``has_group``) is still there, as long as it lives."""
        with self._self.lock:
            self._self.boards.add(board)

    def wait_at(self, board: str, place: Place | None) -> None:
        """Say where this process waits since a second, or that it does not any more."""
        with self._self.lock:
            if place is None:
                self._self.waits.pop(board, None)
            else:
                self._self.waits[board] = place
        self.line.take_turn()

    def come_to(self, board: str, key: str, subject: str) -> None:
        """Say which meeting this process has come to; ``leave`` ends it."""
        with self._self.lock:
            self._self.meets[board] = (key, subject)
        self.line.take_turn()

    def leave(self, board: str) -> None:
        """The meeting is over."""
        with self._self.lock:
            self._self.meets.pop(board, None)
        self.line.take_turn()

    def note(self, text: str) -> None:
        """Add something to every sign of life from now on, for those who wonder."""
        self._self.note = text[:500]

    def doing(self) -> str:
        """What this process is doing, as its signs of life say it."""
        return self._self.beat().doing

    def step_words(self) -> str:
        """The same, without a sign of life."""
        with self._self.lock:
            return self._self.step_words()

    @property
    def is_waiting(self) -> bool:
        """Whether a wait of ours, in whichever thread, has passed a second: it looks around itself."""
        return bool(self._self.waits)

    @property
    def has_ended(self) -> bool:
        """Whether this process has said its last words."""
        return self._self.ended

    def is_amid_a_window(self) -> bool:
        """Whether gradients of this process are on their way, or should be."""
        return any(who.is_amid() for who in list(self._self.doing))

    def take_longest_gap(self) -> float:
        """For how long, at most, this process has given no sign of life since this was last asked."""
        shared = self._self
        gap, shared.longest_gap = max(shared.longest_gap, monotonic() - shared.last_turn), 0.0
        return gap

    # ---------------------------------------------------------------- the end of a process

    @property
    def final(self) -> Words | None:
        """The words of the process that ended first, if that was heard."""
        return self._self.final

    def end_with(self, words: Words, seconds: float) -> None:
        """Leave words behind, because this process ends now; those of a process that ended before stay."""
        shared = self._self
        shared.ended, shared.how = True, words.text if words.ended else f"raised {words.type}: {words.text}"

        def post(store: Any) -> None:
            mine = words.to_json()
            stands = store.compare_set(shared.key("final"), "", mine).decode(errors="replace")
            if read_words(stands, shared.world) is None:  # what is not words of a rank is in nobody's way
                store.set(shared.key("final"), mine)
            shared.take_turn(store)

        self.line.ask(post, seconds)

    @property
    def hosts_store(self) -> bool:
        """Whether the store ends with this process."""
        return self._self.hosts_store

    def has_been_heard(self) -> bool:
        """Whether every other process that still lives has heard the last words, or has ended too."""
        self.look()
        others = [beat for rank, beat in self._self.known.items() if rank != self.rank]
        return all(beat.heard or beat.ended or (beat.process is not None and beat.process.is_dead) for beat in others)

    def stay_until_heard(self) -> None:
        """Where the store ends with this process: let the others hear the last words first, for a moment."""
        deadline = monotonic() + _STAY_SECONDS
        while self.hosts_store and monotonic() < deadline and not self.has_been_heard():
            sleep(_POLL_SECONDS)

    # ---------------------------------------------------------------- the others

    def look(self, ranks: Sequence[int] | None = None) -> dict[int, Beat] | None:
        """Read the signs of life of the others; None where the store does not answer."""
        shared = self._self
        wanted = [r for r in (range(self.world) if ranks is None else ranks) if r != self.rank]
        try:
            return self.line.ask(lambda store: shared.look(store, wanted), _ANSWER_SECONDS)
        except (StoreSilent, RuntimeError):
            return None

    def last_seen(self, rank: int) -> Beat | None:
        """The sign of life of a process as it was last read."""
        return self._self.known.get(rank)

    def process_of(self, rank: int) -> Process | None:
        """Which process a rank is, where it has said so."""
        beat = self.last_seen(rank)
        return beat.process if beat is not None else None

    def hosts(self) -> list[int]:
        """The ranks with whose process the store ends; none where it is hosted elsewhere."""
        mine = [self.rank] if self._self.hosts_store else []
        return mine + [rank for rank, beat in self._self.known.items() if beat.hosts_store]

    def ask_for_stacks(self, ranks: Sequence[int]) -> None:
        """Let these processes post their stacks with their next sign of life."""
        shared, wanted = self._self, " ".join(map(str, ranks))
        self._question += 1
        question = f"{self.rank}.{self._question} {wanted}"

        def post(store: Any) -> None:
            for rank in ranks:
                store.delete_key(shared.key(f"stack/{rank}"))
            store.set(shared.key("question"), question)

        self.line.tell(post)

    def stack_of(self, rank: int) -> str | None:
        """The stack that a process has posted, if it has."""
        shared = self._self
        try:
            return self.line.ask(lambda store: read(store, shared.key(f"stack/{rank}")), _ANSWER_SECONDS)
        except (StoreSilent, RuntimeError):
            return None


def _remove(line: Line, key: str) -> None:
    line.tell(lambda store: store.delete_key(key))


_pulses: weakref.WeakValueDictionary[tuple[int, int], Pulse] = weakref.WeakValueDictionary()
# A process has a pulse as long as its group lives, whether a model is wrapped just then or not.
_kept: weakref.WeakKeyDictionary[Any, Pulse] = weakref.WeakKeyDictionary()
_making = threading.Lock()
# Called for each pulse that is made; last_words.py sets it, since a process that has peers has them to tell.
on_new_pulse: Callable[[Pulse], None] | None = None


def pulse_of_this_process() -> Pulse | None:
    """The pulse of the default group's process; None where ranks share no store, or there is only one."""
    try:
        store, group = torch_private.default_store(), torch_private.default_group()
    except (RuntimeError, ValueError):
        return None
    if group.size() == 1 or not hasattr(store, "compare_set"):
        return None
    with _making:
        key = (id(store), group.rank())  # ranks may be threads
        pulse = _pulses.get(key)
        if pulse is None or not pulse.line.is_ours:
            pulse = _pulses[key] = _kept[group] = Pulse(store, group.rank(), group.size())
            if on_new_pulse is not None:
                on_new_pulse(pulse)
    return pulse


def living_pulses() -> list[Pulse]:
    """The pulses of this process, and none that a fork has left behind."""
    return [pulse for pulse in list(_pulses.values()) if pulse.line.is_ours]
