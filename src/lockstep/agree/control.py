"""The control plane: a few numbers that all ranks of a group unite, beside the gradients.

It is a gloo group of its own, whatever carries the gradients: so it is never paired with a collective of anyone else,
and on a GPU no queue is stopped to read the answer.  It is connected where all ranks pass at the same time: when a
model is wrapped, or, where ranks were not compared then, at the end of the first window.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import torch_private
from lockstep.agree.watch import Watch

_planes: weakref.WeakKeyDictionary[Any, ControlPlane] = weakref.WeakKeyDictionary()
_WORD_BITS = 62


class Answer:
    """Numbers that are being united."""

    def __init__(self, numbers: torch.Tensor, work: Any, watch: Watch) -> None:
        self._numbers = numbers
        self._work = work
        self._watch = watch

    def wait(self, moment: Callable[[], str], *, meeting: tuple[str, str] | None = None) -> list[int]:
        """What all ranks gave together."""
        self._watch.wait_work(self._work, moment, meeting=meeting)
        return self._numbers.tolist()


class ControlPlane:
    """The ranks of one process group, able to unite small numbers."""

    def __init__(self, process_group: Any, name: str = "control") -> None:
        self._rank, self._world = process_group.rank(), process_group.size()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"lockstep/{attempt}/{process_group.group_name}/{name}"
        self._timeout = torch_private.group_timeout(process_group)
        self._group: Any = None
        self._num_renewals = 0

    def renew(self) -> None:
        """Begin anew, on all ranks: what was under way before is paired with nothing that comes."""
        self._num_renewals += 1
        self._group = None

    def start_or(self, numbers: Sequence[int], watch: Watch) -> Answer:
        """Start uniting the bits of each number over all ranks; all ranks give equally many."""
        return self._start(numbers, "or", watch)

    def start_sum(self, numbers: Sequence[int], watch: Watch) -> Answer:
        """Start adding each number up over all ranks."""
        return self._start(numbers, "sum", watch)

    def connect(self, watch: Watch) -> None:
        """Connect with the other ranks, which do so too."""
        if self._group is None:
            prefix = f"{self._prefix}/{self._num_renewals}"
            # Connecting cannot be interrupted, the wait for a thread that does it can.
            connecting = start_thread(lambda: torch_private.host_group(prefix, self._rank, self._world, self._timeout))
            self._group = watch.wait_future(connecting, lambda: "the connection of the control plane")

    def _start(self, numbers: Sequence[int], op: str, watch: Watch) -> Answer:
        self.connect(watch)
        values = torch.tensor(numbers, dtype=torch.int64)
        return Answer(values, torch_private.host_all_reduce(self._group, values, op), watch)

    def all_equal(self, number: int, watch: Watch, moment: Callable[[], str], meeting: tuple[str, str]) -> bool:
        """Whether all ranks gave the same number."""
        return self.start_or([number, ~number], watch).wait(moment, meeting=meeting) == [number, ~number]


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
    if process_group.size() == 1 or process_group.name() == "fake" or not torch_private.has_host_groups():
        return None
    try:
        torch_private.default_store()
    except (RuntimeError, ValueError):
        return None  # a group that was not made by init_process_group brings no store along
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
