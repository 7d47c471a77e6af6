"""The link to a store: a connection of our own, made again when it breaks and the same store still answers there.

    whole    calls go through
    cut      it broke, and nothing answers at the store's address: tried again after longer and longer pauses
    gone     it broke, and nobody listens there any more, or a store that is not ours

A connection can break while the store lives: a box on the way forgets it, a cable is pulled for long.  Whether what
answers then is the same store is known by a key that was left there, since a port may be another job's by now.
"""

from __future__ import annotations

import logging
import random
import socket
import uuid
from datetime import timedelta
from enum import Enum
from time import monotonic
from typing import Any

import torch.distributed as dist

from lockstep.agree.keys import read
from lockstep.agree.sockets import address_of

logger = logging.getLogger("lockstep")

_TRY_SECONDS = 1.0  # for the other end to answer at all
_STAYS_SECONDS = 0.2  # in which a process that is just ending would hang up again
MAKE_SECONDS = 2.0  # for a connection of torch's, which may take a few times as long
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # the latter well below the deadline for a store that is silent
_chance = random.Random()  # the program's own random numbers stay its own
_LASTS_AFTER = 10.0  # seconds: a connection that breaks sooner counts as another failure


class State(Enum):
    """How things stand."""

    NEW = "new"
    WHOLE = "whole"
    CUT = "cut"
    GONE = "gone"


class Link:
    """Used by one thread; others may read ``state`` and ``since``."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._connection: Any = None
        self._address: tuple[str, int] | None = None  # of a connection of our own, on the network
        self._mark = f"lockstep/links/{uuid.uuid4().hex}"
        self._error: dist.DistNetworkError | None = None
        self._pause = _FIRST_PAUSE
        self.state = State.NEW
        self.since = monotonic()  # when this state began
        self.next_try = 0.0
        self.is_closing = False  # nothing is tried any more
        self.is_making = False

    def connection(self) -> Any:
        """Return the connection; raise what broke it where it is not, and it is not yet time to try again."""
        if self.state is State.NEW:
            self._begin()
        if self._error is not None:
            if self.is_closing:
                self.next_try = float("inf")
            if monotonic() < self.next_try:
                raise self._error
            self._make_again()
        return self._connection

    def lose(self, error: dist.DistNetworkError) -> None:
        """The connection broke, in a call that the caller may repeat."""
        has_lasted = self.state is State.WHOLE and monotonic() - self.since > _LASTS_AFTER
        self._error = error
        if self.is_closing or self._address is None:
            self._be(State.GONE)
            self.next_try = float("inf")
            return
        self._be(State.CUT)
        self._pause = _FIRST_PAUSE if has_lasted else min(2 * self._pause, _LONGEST_PAUSE)
        # Ranks that lose it together do not all come back at the same moment.
        self.next_try = monotonic() + (0.0 if has_lasted else self._pause * (0.5 + _chance.random()))

    def close(self) -> None:
        """Take away what was left at the store."""
        if self.state is State.WHOLE and self._address is not None:
            self._connection.delete_key(self._mark)

    def _be(self, state: State) -> None:
        if state is not self.state:
            self.state, self.since = state, monotonic()

    def _begin(self) -> None:
        """Have a connection of our own, since another thread's long wait on the given one would hold us up."""
        try:
            self._connection = self._store.clone()
            self._address = address_of(self._connection)
        except (RuntimeError, NotImplementedError, AttributeError):
            self._connection = self._store
        if self._address is not None:
            self._connection.set_timeout(timedelta(seconds=MAKE_SECONDS))  # for one that is made from it
            self._connection.set(self._mark, self._mark)
        self._be(State.WHOLE)
        self.since -= _LASTS_AFTER  # when it breaks for the first time, it is tried again at once

    def _make_again(self) -> None:
        """Make another connection to the same store, or raise and say when to try again."""
        assert self._error is not None
        assert self._address is not None
        made = None
        try:
            if _is_listened_at(self._address) and not self.is_closing:
                self.is_making = True
                made = self._connection.clone()
            is_same = made is not None and read(made, self._mark) == self._mark
        except (OSError, dist.DistError):
            # A store that is known to be gone does not come back by not being reached.
            self._put_off(State.GONE if self.state is State.GONE else State.CUT)
            raise self._error from None
        finally:
            self.is_making = False
        if not is_same:
            self._put_off(State.GONE)
            raise self._error
        self._connection, self._error = made, None
        self._be(State.WHOLE)
        logger.info("The connection to the store broke, and was made again.")

    def _put_off(self, state: State) -> None:
        self._be(state)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.next_try = monotonic() + self._pause * (0.5 + _chance.random())


def _is_listened_at(address: tuple[str, int]) -> bool:
    """Whether someone answers there and stays; raises where that cannot be known.

    Torch tries for long, and prints a page about each time; this fails in silence.
    """
    try:
        probe = socket.create_connection(address, _TRY_SECONDS)
    except ConnectionRefusedError:
        return False
    with probe:
        if probe.getsockname() == probe.getpeername():
            return False  # a port nobody listens on may reach itself
        probe.settimeout(_STAYS_SECONDS)
        try:
            probe.recv(1)
            return False  # it hangs up, or is no store: that does not speak first
        except ConnectionResetError:
            return False
        except TimeoutError:
            return True
