"""What ranks tell each other about a save or a load, over the store.

Keys with a deadline and no collective: a save runs in a thread beside the training, whose collectives it must not
get in the way of, and a rank that is gone must be named.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from lockstep import settings, torch_private
from lockstep.agree.alive import Process, card, owner_of
from lockstep.agree.board import Board, open_board
from lockstep.errors import PeerFailed, PeerLate, PeerLost

logger = logging.getLogger("lockstep")

_LONGEST_LOOK = 2.0  # what one look may count for, at most


class LocalStore:
    """The store of a world of one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"") == expected.encode():
            self.set(key, desired)
        return self._values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


class Ranks:
    """The ranks that save and load together."""

    def __init__(self, board: Board, patience_seconds: float = 1800.0) -> None:
        self._board = board
        self._patience = patience_seconds  # without a word from a rank for this long, it counts as gone
        self.rank, self.world = board.rank, board.world
        self._numbers: dict[str, int] = {}
        self._numbers_lock = threading.Lock()
        if self.world > 1:
            self.tell(f"process/{self.rank}", card())

    def shown(self, rank: int) -> int:
        """A rank as messages and errors name it: by its global number."""
        return self._board.members[rank]

    def next_number(self, kind: str) -> int:
        """Count what all ranks do in the same order, so that it has the same name on all of them."""
        with self._numbers_lock:
            self._numbers[kind] = self._numbers.get(kind, 0) + 1
            return self._numbers[kind]

    def tell(self, key: str, value: str) -> None:
        """Leave a word for the other ranks."""
        self._board.post(key, value)

    def hear(self, key: str) -> str | None:
        """Return a word that was left; never waits."""
        return self._board.read(key)

    def decide(self, key: str, value: str) -> str:
        """Leave a word unless another rank was first; returns the word that stands, the same for all who ask."""
        return self._board.post_first(key, value)

    def forget(self, keys: Sequence[str]) -> None:
        """Take words back, so that the store does not grow."""
        for key in keys:
            self._board.remove(key)

    def wait(
        self,
        keys: Sequence[str],
        what: str,
        sign_of_life: Callable[[], object],
        absent: Callable[[], Sequence[int]] | None = None,
    ) -> dict[str, str]:
        """Wait for words; ``sign_of_life`` returns something that changes while the others are at work.

        ``absent`` says which ranks have not come to this at all: they are named in the log when it takes long.
        """
        last_sign, deadline = sign_of_life(), monotonic() + self._patience
        pause = settings.stall_seconds()
        began, next_word = monotonic(), monotonic() + pause
        silence = _Silence(self._board)
        missing = list(keys)
        while missing := self._board.wait_for(missing, monotonic() + 1.0):
            late = sorted({int(tail) for key in missing if (tail := key.rpartition("/")[2]).isdigit()}) or [0]
            self._require_living(late, what)
            silence.require_signs_of(late, what)
            sign = sign_of_life()
            if sign != last_sign:
                last_sign, deadline = sign, monotonic() + self._patience
            if absent is not None and monotonic() >= next_word:
                pause *= 2
                next_word = monotonic() + pause
                self._name_absent(absent(), what, monotonic() - began)
            if monotonic() > deadline:
                late = list(map(self.shown, late))
                raise PeerLate(
                    f"Rank {self.shown(self.rank)} heard nothing from rank(s) {late} for {self._patience:g} s, waiting "
                    f"for {what}. They were killed, or they do not take part: call it on all ranks.",
                    late,
                )
        return {key: self.hear(key) or "" for key in keys}

    def _name_absent(self, ranks: Sequence[int], what: str, seconds: float) -> None:
        if ranks:
            logger.warning(
                "Rank %d waits for %s, for %.0f s now. Rank(s) %s have not come to it: checkpoints are saved and "
                "loaded by all ranks together, so all of them must make the call.",
                self.shown(self.rank),
                what,
                seconds,
                list(map(self.shown, ranks)),
            )

    def _require_living(self, ranks: Sequence[int], what: str) -> None:
        """Raise if a process that is waited for has ended."""
        for rank in ranks:
            process = owner_of(self.hear(f"process/{rank}")) if rank != self.rank else None
            if process is not None and process.is_dead:
                raise self._lost(rank, process, what)

    def _lost(self, rank: int, process: Process, what: str) -> PeerFailed:
        """The error for a rank that has ended, with its last words where it left any."""
        number, me, pulse = self.shown(rank), self.shown(self.rank), self._board.pulse
        if pulse is not None:
            pulse.look([number])  # its last words are heard with its last sign of life
        final = pulse.final if pulse is not None else None
        if final is not None and final.rank == number and not final.ended:
            return PeerFailed(
                f"Rank {number} ({process}) failed while rank {me} waited for {what}. It said:\n{final.type}: "
                f"{final.text}",
                number,
            )
        more = f" It {final.text}" if final is not None and final.rank == number else ""
        return PeerLost(
            f"Rank {number} ({process}) has ended while rank {me} waited for {what}.{more}",
            number,
            host=process.host,
            pid=process.pid,
        )

    def gather(self, what: str, mine: str, *, names_absent: bool = False) -> dict[int, str]:
        """Exchange a word with all ranks, which all come here.

        ``names_absent``: where that takes no time, ranks that have not come are named in the log.
        """
        key = f"{what} {self.next_number(what)}"
        self.tell(f"{key}/{self.rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self.world)]

        def absent() -> list[int]:
            return [rank for rank, name in enumerate(keys) if self.hear(name) is None]

        words = self.wait(keys, what, lambda: None, absent if names_absent else None)
        # When all have come here again, nobody reads the words of the time before any more.
        before = f"{what} {self._numbers[what] - 1}"
        self.forget([f"{before}/{self.rank}"])
        return {rank: words[name] for rank, name in enumerate(keys)}


class _Silence:
    """How long ranks that are waited for have given no sign of life: stopped, frozen, cut off."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last = monotonic()
        self._numbers: dict[int, int] = {}  # of the last sign
        self._seconds: dict[int, float] = {}  # since then

    def require_signs_of(self, ranks: Sequence[int], what: str) -> None:
        """Raise PeerLate for those that have been silent for too long; only time in which this process ran counts."""
        now = monotonic()
        passed, self._last = min(now - self._last, _LONGEST_LOOK), now
        pulse, limit, members = self._board.pulse, settings.heartbeat_timeout(), self._board.members
        beats = pulse.look([members[rank] for rank in ranks]) if pulse is not None and limit else None
        if pulse is None or beats is None:
            return  # where the store is silent, whoever asks it next says so
        for rank in ranks:
            beat = beats.get(members[rank])
            is_new = beat is not None and beat.number != self._numbers.get(rank)
            has_begun = beat is not None or rank in self._numbers  # signs begin with a rank's first board
            is_silent = has_begun and not is_new and rank != self._board.rank
            self._seconds[rank] = self._seconds.get(rank, 0.0) + passed if is_silent else 0.0
            if beat is not None:
                self._numbers[rank] = beat.number
        silent = [members[rank] for rank in ranks if self._seconds[rank] >= limit]
        if silent:
            stopped = [r for r in silent if (process := pulse.process_of(r)) is not None and process.is_stopped]
            more = f" Rank(s) {stopped} are stopped, by SIGSTOP or a debugger." if stopped else ""
            raise PeerLate(
                f"Rank(s) {silent} gave no sign of life for {limit:g} s, while rank {members[self._board.rank]} waited "
                f"for {what}: they are stopped, frozen or cut off.{more}",
                silent,
            )


_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
_alone = Ranks(Board(LocalStore(), "checkpoints", 0, 1))


def alone() -> Ranks:
    """Return a world of one, whatever groups there are."""
    return _alone


def ranks_of(process_group: Any = None) -> Ranks:
    """Return the ranks of a group (the default one for None); a world of one where there is none."""
    import torch.distributed as dist

    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return _alone
        process_group = torch_private.default_group()
    if process_group not in _known:
        board = open_board(process_group, "checkpoints")
        if board is None:
            if process_group.size() > 1:
                raise ValueError("the ranks of this process group share no store; use a group of init_process_group()")
            return _alone
        _known[process_group] = Ranks(board, torch_private.group_timeout(process_group).total_seconds())
    return _known[process_group]
