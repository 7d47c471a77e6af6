"""The control plane: a few numbers that all ranks of a group tell each other, beside the gradients.

It is a gloo group of its own, whatever carries the gradients: so it is never paired with a collective of anyone else,
and on a GPU no queue is stopped to read the answer.  It is connected where all ranks pass at the same time: when a
model is wrapped, or, where ranks were not compared then, at the end of the first window.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import torch_private
from lockstep.agree.board import board_of
from lockstep.agree.keys import full_name, shared_store
from lockstep.agree.watch import Watch

_planes: weakref.WeakKeyDictionary[Any, ControlPlane] = weakref.WeakKeyDictionary()
_WORD_BITS = 62


class Letter:
    """Memory for what a rank says and what it hears."""

    def __init__(self, world: int, length: int) -> None:
        self.length = length
        self._said, self._heard = array("q", bytes(8 * length)), array("q", bytes(8 * length * world))
        self.mine = torch.frombuffer(self._said, dtype=torch.int64)
        self.everyones = torch.frombuffer(self._heard, dtype=torch.int64)

    def write(self, numbers: Sequence[int]) -> None:
        """Let this rank say these numbers, and zeros after them."""
        self._said[:] = array("q", [*numbers, *[0] * (self.length - len(numbers))])

    def read(self) -> list[list[int]]:
        """What each rank said."""
        told = self._heard.tolist()
        return [told[start : start + self.length] for start in range(0, len(told), self.length)]


class Answer:
    """Numbers that are on their way."""

    def __init__(self, letter: Letter, work: Any, plane: ControlPlane, watch: Watch) -> None:
        self._letter = letter
        self._work = work
        self._plane = plane
        self._watch = watch

    def wait(self, moment: Callable[[], str], *, meeting: tuple[str, str] | None = None) -> list[list[int]]:
        """What each rank gave."""
        self._watch.wait_work(self._work, moment, meeting=meeting)
        told = self._letter.read()
        self._plane.spare = self._letter  # nothing writes into it any more
        return told


class ControlPlane:
    """The ranks of one process group, able to tell each other a few numbers.

    All messages have the same length, the longest that anyone has reserved: so ranks that are at different places in
    their program still understand each other, and can say so.
    """

    def __init__(self, process_group: Any, name: str = "control") -> None:
        self._rank, self._world = process_group.rank(), process_group.size()
        self._prefix = full_name(f"{process_group.group_name}/{name}")
        self._timeout = torch_private.group_timeout(process_group)
        self._group: Any = None
        self._num_renewals = 0
        self._num_started = 0
        self._length = 1
        self.spare: Letter | None = None  # the last letter, once it was read
        # Taken here, since ranks may be threads, and another thread has another default group, or none.
        self._store = torch_private.default_store()
        self.board = board_of(process_group, self._store, self._prefix)

    def renew(self) -> None:
        """Begin anew, on all ranks: what was under way before is paired with nothing that comes."""
        self._num_renewals += 1
        self._num_started = 0
        self._group = None

    @property
    def moment(self) -> str:
        """A name for the last exchange, the same on all ranks that took part in it."""
        return f"exchange {self._num_renewals}.{self._num_started}"

    def reserve(self, length: int) -> None:
        """Let messages be this long from now on, if they are not longer already; on all ranks at the same time."""
        self._length = max(self._length, length)

    def connect(self, watch: Watch) -> None:
        """Connect with the other ranks, which do so too."""
        if self._group is None:
            prefix = f"{self._prefix}/{self._num_renewals}"
            # Connecting cannot be interrupted, the wait for a thread that does it can.
            connecting = start_thread(
                lambda: torch_private.host_group(self._store, prefix, self._rank, self._world, self._timeout)
            )
            self._group = watch.wait_future(connecting, lambda: "the connection of the control plane")

    def start(self, numbers: Sequence[int], watch: Watch) -> Answer:
        """Start telling all ranks these numbers, and hearing theirs."""
        self.connect(watch)
        self._num_started += 1
        letter, self.spare = self.spare, None
        if letter is None or letter.length != self._length:
            letter = Letter(self._world, self._length)
        letter.write(numbers)
        work = torch_private.host_all_gather(self._group, letter.mine, letter.everyones)
        return Answer(letter, work, self, watch)


def start_thread(function: Callable[[], Any]) -> torch.futures.Future[Any]:
    """Run a function in a thread that nobody has to wait for."""
    result: torch.futures.Future[Any] = torch.futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="lockstep connects", daemon=True).start()
    return result


def control_of(process_group: Any) -> ControlPlane | None:
    """The control plane of a group; None where ranks share no store, or there is only one."""
    if shared_store(process_group) is None or not torch_private.has_host_groups():
        return None
    plane = _planes.get(process_group)
    if plane is None:
        plane = _planes[process_group] = ControlPlane(process_group)
    return plane


def to_words(bits: int, num_bits: int) -> list[int]:
    """A set of small numbers, given as the bits of one large one, in words that travel."""
    mask = (1 << _WORD_BITS) - 1
    return [(bits >> shift) & mask for shift in range(0, max(1, num_bits), _WORD_BITS)]


def from_words(words: Sequence[int]) -> int:
    """The set behind words that arrived."""
    return sum(word << (position * _WORD_BITS) for position, word in enumerate(words))
