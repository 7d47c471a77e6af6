"""What ranks tell each other at the end of a window: their stamps, what each of them has that others must know of.

stamp     compared; a difference is one error on all ranks
bits      united: buckets with a remainder, or parameters that a backward without a forward has reached
used      counted: on how many ranks each parameter was used, where unused ones are searched for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Literal

import torch

from lockstep import errors
from lockstep.agree.control import ControlPlane, from_words, to_words
from lockstep.agree.stamp import Stamp, disagreement
from lockstep.engine.drift import NOTHING, Words
from lockstep.engine.transport import Transport

Check = Literal["step", "collective", "off"]
_STAMP_SECONDS = 60.0
# In the place of a stamp: of a rank that has run out of data, and of one that does not compare.
_JOINED, _UNCHECKED = 0, -1
_HEAD = 5  # numbers before the sets: stamp, mark, waited, and two of drift.py


class Union:
    """Unites what the ranks of one group have, for one wrapped model."""

    def __init__(self, control: ControlPlane | None, name: str, check: Check) -> None:
        self.control = control
        self.name = name  # of the model, the same on all ranks
        self.check: Check = check
        self._num_bits = 1
        # What each rank told in the last exchange: a mark (nonfinite.py); how long it waited in the window before, of
        # those that have data: the others wait for nobody.
        self.marks: list[int] = []
        self.waits: dict[int, int] = {}
        self.drift: dict[int, Words] = {}  # by rank, of those that have data and compare
        # Not where some ranks never update the model themselves, but are given its weights.
        self.compares_updates = True

    def reserve(self, num_bits: int) -> None:
        """Make room for sets of this size."""
        self._num_bits = max(1, num_bits)
        if self.control is not None:
            self.control.reserve(_HEAD + 2 * len(to_words(0, self._num_bits)))

    def move(self, control: ControlPlane | None, name: str) -> None:
        """Go on with another group."""
        self.control, self.name = control, name
        self.reserve(self._num_bits)

    def unite(
        self,
        transport: Transport,
        stamp: Callable[[], Stamp],
        bits: int,
        used: Sequence[int] | None,
        moment: Callable[[], str],
        updates_itself: Callable[[], bool],
        mark: int = 0,
        waited_us: int = 0,
        drift: Words = NOTHING,
    ) -> tuple[int, list[int] | None]:
        """Compare stamps; returns the bits that any rank has, and how many ranks used each parameter.

        ``updates_itself`` is asked only where stamps differ: whether an optimizer of this rank updates the model.
        """
        mine = stamp() if self.check != "off" else None
        digest = mine.digest() if mine is not None else _UNCHECKED
        digests, united, counts = self._tell(transport, [digest, mark, waited_us, *drift], bits, used, moment)
        if digests - {digest, _JOINED}:
            if mine is None:
                raise errors.Disagreement("Ranks were wrapped with different values of check=.")
            assert self.control is not None
            error = disagreement(self.control.board, self.control.moment, mine, updates_itself(), _STAMP_SECONDS)
            if error is not None:
                raise error
            self.compares_updates = False
        return united, counts

    def mirror(self, transport: Transport, num_used: int, moment: Callable[[], str]) -> tuple[int, list[int] | None]:
        """Take part without a word of one's own: a rank that has run out of data (join)."""
        digests, united, counts = self._tell(transport, [_JOINED, 0, 0, *NOTHING], 0, [0] * num_used or None, moment)
        if len(digests - {_JOINED}) > 1:  # the others meet to find out what differs, and expect this rank too
            assert self.control is not None
            error = disagreement(self.control.board, self.control.moment, None, False, _STAMP_SECONDS)
            if error is not None:
                raise error
            self.compares_updates = False
        return united, counts

    def _tell(
        self, transport: Transport, head: list[int], bits: int, used: Sequence[int] | None, moment: Callable[[], str]
    ) -> tuple[set[int], int, list[int] | None]:
        assert self.control is not None
        words = to_words(bits, self._num_bits)
        used_bits = sum(1 << position for position, is_used in enumerate(used or ()) if is_used)
        message = [*head, *words, *to_words(used_bits, self._num_bits)]
        if transport.audit is not None:
            transport.audit.before_end(self.name)
        everyones = self.control.start(message, transport.watch).wait(moment)
        self.marks = [numbers[1] for numbers in everyones]
        self.waits = {r: told[2] for r, told in enumerate(everyones) if told[0] != _JOINED}
        silent = (_JOINED, _UNCHECKED)
        self.drift = {r: told[3:_HEAD] for r, told in enumerate(everyones) if told[0] not in silent}
        middle, end = _HEAD + len(words), len(message)
        united = reduce(or_, (from_words(numbers[_HEAD:middle]) for numbers in everyones))
        counts = None
        if used is not None:
            sets = [from_words(numbers[middle:end]) for numbers in everyones]
            counts = [sum(one >> position & 1 for one in sets) for position in range(len(used))]
        return {numbers[0] for numbers in everyones}, united, counts

    @staticmethod
    def count_used(transport: Transport, used: list[int], device: torch.device) -> list[int]:
        """Add the used parameters up on the group of the gradients, where there is no other way."""
        counts = torch.tensor(used, dtype=torch.int32, device=device)
        transport.land(transport.start_all_reduce(counts, mean=False), "the exchange of used parameters")
        return counts.tolist()
