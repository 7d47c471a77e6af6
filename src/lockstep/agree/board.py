"""A board of store keys that the ranks of one group share.

A collective that only some ranks reach hangs the others; a key that is not there can be waited for with a deadline
and named.  So everything ranks must agree on, and every word about who is late or failed, goes over a board.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from time import monotonic, sleep
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep import settings, torch_private
from lockstep.agree.keys import full_name, read, shared_store
from lockstep.agree.pulse import Pulse, pulse_of_this_process
from lockstep.errors import PeerLate, StoreSilent

_SLICE_SECONDS = 1.0
_LOOK_SECONDS = 0.4  # how long the thread of the line looks for keys before it sees to other things
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_wrap_counters: dict[str, count[int]] = {}
T = TypeVar("T")


class Board:
    """Keys under one prefix, written and read by the ranks ``0 .. world - 1`` of a group.

    With a ``pulse`` its thread speaks to the store, so that every call here comes back; ``members`` are the global
    ranks of the group.  When all ranks have let go of a board its keys are taken off the store.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        pulse: Pulse | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self.world = world
        self.pulse = pulse
        self.members = list(range(world)) if members is None else list(members)
        # Looks around while this board waits, and raises where waiting is in vain.
        self.on_slice: Callable[[], None] | None = None
        # Whether the group of this board is still there; set by who made it for a group.
        self.has_group: Callable[[], bool] = lambda: True
        self._posted: set[str] = set()
        if pulse is not None:
            closing = weakref.finalize(self, _close, pulse, prefix, rank, world, self._posted)
            closing.atexit = False

    @property
    def name(self) -> str:
        """The same on all ranks, and no other board's."""
        return self._prefix

    @property
    def is_ours(self) -> bool:
        """Whether this is the process of a rank, not one that it forked (for a data loader), which posts nothing."""
        return self.pulse is None or self.pulse.line.is_ours

    def by_global(self, values: Mapping[int, T]) -> dict[int, T]:
        """Values of ranks of the group, by the global numbers that messages and errors use."""
        return {self.members[rank]: value for rank, value in values.items()}

    def _do(self, function: Callable[[Any], T], seconds: float | None = None, *, repeats: bool = True) -> T:
        """Let ``function`` be done with the store; raise StoreSilent when it does not answer in time."""
        if self.pulse is None:
            return function(self._store)
        return self.pulse.line.ask(function, seconds or settings.heartbeat_timeout() or 600.0, repeats=repeats)

    def post(self, key: str, value: str, *, waits: bool = True) -> None:
        """Post a value; without ``waits`` it is only on its way, but before everything else that this board does."""
        full = self._full(key)
        self._posted.add(full)
        if waits or self.pulse is None:
            self._do(lambda store: store.set(full, value))
        else:
            self.pulse.line.tell(lambda store: store.set(full, value))

    def post_first(self, key: str, value: str, seconds: float | None = None) -> str:
        """Post ``value`` unless the key is taken; returns what stands there."""
        full = self._full(key)
        self._posted.add(full)
        try:
            return self._do(lambda store: store.compare_set(full, "", value), seconds).decode(errors="replace")
        except StoreSilent:
            # Let it be heard when the store answers again: others may go on from there.
            if self.pulse is not None:
                self.pulse.line.tell(lambda store: store.compare_set(full, "", value))
            raise

    def read(self, key: str, seconds: float | None = None) -> str | None:
        """The value of ``key`` if it was posted; never waits for it."""
        full = self._full(key)
        if self.pulse is None and not hasattr(self._store, "compare_set"):
            return self._store.get(full).decode() or None if self._store.check([full]) else None
        return self._do(lambda store: read(store, full), seconds)

    def read_all(self, keys: Iterable[str]) -> list[str | None]:
        """The values of several keys."""
        names = list(keys)
        if self.pulse is None:
            return [self.read(key) for key in names]
        full = [self._full(key) for key in names]
        return self._do(lambda store: [read(store, name) for name in full])

    def count(self, key: str) -> int:
        """How many times this was called for ``key``, by whichever rank."""
        full = self._full(key)
        self._posted.add(full)
        return int(self._do(lambda store: store.add(full, 1), repeats=False))

    def forget(self, key: str) -> None:
        full = self._full(key)
        self._posted.add(full)
        self._do(lambda store: store.set(full, ""))

    def remove(self, key: str) -> None:
        """Take a key off the store; where it cannot, it is left empty."""
        full = self._full(key)
        try:
            self._do(lambda store: store.delete_key(full))
            self._posted.discard(full)
        except StoreSilent:
            raise
        except (RuntimeError, NotImplementedError):
            self.forget(key)

    def gather(
        self, key: str, mine: str, timeout_seconds: float = 60.0, on_slice: Callable[[], None] | None = None
    ) -> dict[int, str]:
        """Every rank posts its value; all ranks return all of them."""
        deadline = monotonic() + timeout_seconds
        self.post(f"{key}/{self.rank}", mine, waits=False)
        keys = {f"{key}/{rank}": rank for rank in range(self.world)}
        missing = self.wait_for(keys, deadline, on_slice)
        if missing:
            late = [self.members[keys[name]] for name in missing]
            raise PeerLate(
                f"Rank {self.members[self.rank]} waited {timeout_seconds:g} s for rank(s) {late} to tell their {key}."
                f"{self.silence_told()}",
                late,
            )
        return {rank: text or "" for rank, text in enumerate(self.read_all(keys))}

    def from_rank_zero(self, key: str, mine: str, timeout_seconds: float = 60.0) -> str:
        """Rank 0 posts its value; all ranks return that one."""
        if self.rank == 0:
            self.post(key, mine, waits=False)
            return mine
        if self.wait_for([key], monotonic() + timeout_seconds):
            raise PeerLate(
                f"Rank {self.members[self.rank]} waited {timeout_seconds:g} s for rank {self.members[0]} to tell its "
                f"{key}.{self.silence_told()}",
                [self.members[0]],
            )
        return self.read(key) or ""

    def silence_told(self) -> str:
        """A sentence about the store, where it does not answer."""
        silence = 0.0 if self.pulse is None else self.pulse.line.silence
        return "" if silence < _SLICE_SECONDS else f" The store is silent{_since(silence)}."

    def wait_for(self, keys: Iterable[str], deadline: float, on_slice: Callable[[], None] | None = None) -> list[str]:
        """Wait until all ``keys`` are posted or ``deadline`` (monotonic seconds); returns the missing ones.

        Asks again and again, since a store's own wait prints warnings whenever it times out, and cannot be interrupted;
        ``on_slice`` is called about every second.
        """
        missing = list(keys)
        next_slice = monotonic() + _SLICE_SECONDS
        while True:
            missing = self._missing(missing, deadline)
            if not missing or monotonic() >= deadline:
                return missing
            if monotonic() >= next_slice:
                next_slice = monotonic() + _SLICE_SECONDS
                for look in (self.on_slice, on_slice):
                    if look is not None:
                        look()

    def _missing(self, keys: list[str], deadline: float) -> list[str]:
        """Which of ``keys`` were not posted yet; all of them where the store is silent."""
        full = {key: self._full(key) for key in keys}
        line = None if self.pulse is None else self.pulse.line
        enough = min(deadline, monotonic() + _LOOK_SECONDS)

        def look(store: Any) -> list[str]:
            missing, pause = keys, _FIRST_PAUSE
            while True:
                missing = [key for key in missing if not store.check([full[key]])]
                if not missing or monotonic() + pause >= enough or (line is not None and line.is_wanted):
                    return missing
                sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

        try:
            return self._do(look, max(0.01, min(_SLICE_SECONDS, deadline - monotonic())))
        except StoreSilent:
            if line is not None and line.is_broken:
                raise  # it does not come back
            return keys

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _since(seconds: float) -> str:
    return f" for {seconds:.0f} s" if seconds < float("inf") else ": it has ended"


def _close(pulse: Pulse, prefix: str, rank: int, world: int, posted: set[str]) -> None:
    """Let go of a board: whoever is last takes the keys of all ranks away, which nobody waits for any more."""
    mine = json.dumps(sorted(posted))

    def close(store: Any) -> None:
        store.set(f"{prefix}/closed/{rank}", mine)
        # Whoever comes last sees all of them; this may be called twice, if the connection breaks in between.
        if not store.check([f"{prefix}/closed/{other}" for other in range(world)]):
            return
        for other in range(world):
            names = _names(read(store, f"{prefix}/closed/{other}"), prefix)
            for name in [*names, f"{prefix}/closed/{other}"]:
                store.delete_key(name)

    pulse.line.tell(close)


def _names(text: str | None, prefix: str) -> list[str]:
    """The keys that a rank has posted, as far as they are of this board."""
    try:
        names = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return [n for n in names if isinstance(n, str) and n.startswith(f"{prefix}/")] if isinstance(names, list) else []


def open_board(process_group: Any, kind: str = "wrappers") -> Board | None:
    """The board for the next wrapper of this kind on this group; None where ranks share no store.

    Ranks wrap models on a group in the same order, so a counter per group names the board.
    """
    store = shared_store(process_group)
    if store is None:
        return None
    place = f"{process_group.group_name}/{kind}"
    index = next(_wrap_counters.setdefault(f"{place}/{process_group.rank()}", count()))  # ranks may be threads
    return board_of(process_group, store, full_name(f"{place}/{index}"))


_boards_of_all: weakref.WeakKeyDictionary[Any, dict[str, Board]] = weakref.WeakKeyDictionary()


def board_of_all(kind: str) -> Board | None:
    """The board of this kind that all ranks of the default group share; None where there is nobody to share it with."""
    try:
        group = torch_private.default_group()
    except (RuntimeError, ValueError):
        return None
    store = shared_store(group)
    if store is None:
        return None
    boards = _boards_of_all.setdefault(group, {})
    if kind not in boards:
        boards[kind] = board_of(group, store, full_name(f"{group.group_name}/{kind}"))
    return boards[kind]


def board_of(process_group: Any, store: Any, prefix: str) -> Board:
    """The board of this group with this prefix."""
    members = _global_ranks(process_group)
    pulse = pulse_of_this_process()
    board = Board(store, prefix, process_group.rank(), process_group.size(), pulse, members)
    registered, group = torch_private.registered_groups(), weakref.ref(process_group)
    if pulse is not None and process_group in registered:  # some groups are known to nobody
        board.has_group = lambda: group() in registered
        pulse.know(board)
    return board


def _global_ranks(process_group: Any) -> list[int]:
    """The global ranks of a group, by its own ranks; a group that torch does not know has its own numbers."""
    try:
        return list(dist.get_process_group_ranks(process_group))
    except (RuntimeError, ValueError, KeyError):
        return list(range(process_group.size()))
