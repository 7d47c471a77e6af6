"""A board of store keys that the ranks of one group share.

A collective that only some ranks reach hangs the others; a key that is not there can be waited for with a deadline
and named.  So everything ranks must agree on, and every word about who is late or failed, goes over a board.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic, sleep
from typing import Any

from lockstep import torch_private
from lockstep.errors import PeerLate

_SLICE_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_wrap_counters: dict[str, count[int]] = {}


class Board:
    """Keys under one prefix, written and read by the ranks ``0 .. world - 1`` of a group."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int) -> None:
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self.world = world

    @property
    def name(self) -> str:
        """The same on all ranks, and no other board's."""
        return self._prefix

    def post(self, key: str, value: str) -> None:
        self._store.set(self._full(key), value)

    def post_first(self, key: str, value: str) -> str:
        """Post ``value`` unless the key is taken; returns what stands there."""
        return self._store.compare_set(self._full(key), "", value).decode()

    def read(self, key: str) -> str | None:
        """The value of ``key`` if it was posted; never waits."""
        if not self._store.check([self._full(key)]):
            return None
        return self._store.get(self._full(key)).decode() or None

    def count(self, key: str) -> int:
        """How many times this was called for ``key``, by whichever rank."""
        return int(self._store.add(self._full(key), 1))

    def forget(self, key: str) -> None:
        self._store.set(self._full(key), "")

    def remove(self, key: str) -> None:
        """Take a key off the store; where it cannot, it is left empty."""
        try:
            self._store.delete_key(self._full(key))
        except (RuntimeError, NotImplementedError):
            self.forget(key)

    def gather(
        self, key: str, mine: str, timeout_seconds: float = 60.0, on_slice: Callable[[], None] | None = None
    ) -> dict[int, str]:
        """Every rank posts its value; all ranks return all of them."""
        self.post(f"{key}/{self.rank}", mine)
        keys = {f"{key}/{rank}": rank for rank in range(self.world)}
        missing = self.wait_for(keys, monotonic() + timeout_seconds, on_slice)
        if missing:
            late = [keys[name] for name in missing]
            raise PeerLate(
                f"Rank {self.rank} waited {timeout_seconds:g} s for rank(s) {late} to tell their {key}.", late
            )
        return {rank: self.read(name) or "" for name, rank in keys.items()}

    def from_rank_zero(self, key: str, mine: str, timeout_seconds: float = 60.0) -> str:
        """Rank 0 posts its value; all ranks return that one."""
        if self.rank == 0:
            self.post(key, mine)
            return mine
        if self.wait_for([key], monotonic() + timeout_seconds):
            raise PeerLate(f"Rank {self.rank} waited {timeout_seconds:g} s for rank 0 to tell its {key}.", [0])
        value = self.read(key)
        assert value is not None
        return value

    def wait_for(self, keys: Iterable[str], deadline: float, on_slice: Callable[[], None] | None = None) -> list[str]:
        """Wait until all ``keys`` are posted or ``deadline`` (monotonic seconds); returns the missing ones.

        Asks again and again, since a store's own wait prints warnings whenever it times out, and cannot be interrupted;
        ``on_slice`` is called about every second.
        """
        missing = list(keys)
        pause, next_slice = _FIRST_PAUSE, monotonic() + _SLICE_SECONDS
        while True:
            missing = [key for key in missing if not self._store.check([self._full(key)])]
            if not missing or monotonic() >= deadline:
                return missing
            if monotonic() >= next_slice:
                next_slice += _SLICE_SECONDS
                if on_slice is not None:
                    on_slice()
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def open_board(process_group: Any, kind: str = "wrappers") -> Board | None:
    """The board for the next wrapper of this kind on this group; None where ranks share no store.

    Ranks wrap models on a group in the same order, so a counter per group names the board.  The restart count is
    part of the name because a launcher may keep its store over restarts.
    """
    if process_group.size() == 1 or process_group.name() == "fake":
        return None
    try:
        store = torch_private.default_store()
    except (RuntimeError, ValueError):
        return None  # a group that was not made by init_process_group brings no store along
    place = f"{process_group.group_name}/{kind}"
    index = next(_wrap_counters.setdefault(f"{place}/{process_group.rank()}", count()))  # ranks may be threads
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"lockstep/{attempt}/{place}/{index}"
    return Board(store, prefix, process_group.rank(), process_group.size())
