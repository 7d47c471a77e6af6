"""What ranks tell each other about a save or a load, over the store.

Keys with a deadline and no collective: a save runs in a thread beside the training, whose collectives it must not
get in the way of, and a rank that is gone must be named.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from lockstep import torch_private
from lockstep.agree.alive import card, owner_of
from lockstep.agree.board import Board, open_board
from lockstep.errors import PeerLate, PeerLost


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

    def forget(self, keys: Sequence[str]) -> None:
        """Take words back, so that the store does not grow."""
        for key in keys:
            self._board.remove(key)

    def wait(self, keys: Sequence[str], what: str, sign_of_life: Callable[[], object]) -> dict[str, str]:
        """Wait for words; ``sign_of_life`` returns something that changes while the others are at work."""
        last_sign, deadline = sign_of_life(), monotonic() + self._patience
        missing = list(keys)
        while missing := self._board.wait_for(missing, monotonic() + 1.0):
            late = sorted({int(tail) for key in missing if (tail := key.rpartition("/")[2]).isdigit()}) or [0]
            self._require_living(late, what)
            sign = sign_of_life()
            if sign != last_sign:
                last_sign, deadline = sign, monotonic() + self._patience
            if monotonic() > deadline:
                late = list(map(self.shown, late))
                raise PeerLate(
                    f"Rank {self.shown(self.rank)} heard nothing from rank(s) {late} for {self._patience:g} s, waiting "
                    f"for {what}. They were killed, or they do not take part: call it on all ranks.",
                    late,
                )
        return {key: self.hear(key) or "" for key in keys}

    def _require_living(self, ranks: Sequence[int], what: str) -> None:
        """Raise if a process that is waited for has ended."""
        for rank in ranks:
            process = owner_of(self.hear(f"process/{rank}")) if rank != self.rank else None
            if process is not None and process.is_dead:
                me = self.shown(self.rank)
                raise PeerLost(
                    f"Rank {self.shown(rank)} ({process}) has ended while rank {me} waited for {what}.",
                    self.shown(rank),
                    host=process.host,
                    pid=process.pid,
                )

    def gather(self, what: str, mine: str) -> dict[int, str]:
        """Exchange a word with all ranks, which all come here."""
        key = f"{what} {self.next_number(what)}"
        self.tell(f"{key}/{self.rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        words = self.wait(keys, what, lambda: None)
        # When all have come here again, nobody reads the words of the time before any more.
        before = f"{what} {self._numbers[what] - 1}"
        self.forget([f"{before}/{self.rank}"])
        return {rank: words[name] for rank, name in enumerate(keys)}


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
