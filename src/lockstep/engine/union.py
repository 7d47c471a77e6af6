"""What ranks tell each other at the end of a window: their stamps, what each of them has that others must know of.

stamps       compared; a difference is one error on all ranks
bits         united: buckets with a remainder, or parameters that a backward without a forward has reached
used counts  added up: on how many ranks each parameter was used, where unused ones are searched for
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from lockstep import errors
from lockstep.agree.control import ControlPlane, from_words, to_words
from lockstep.agree.stamp import Stamp, disagreement
from lockstep.engine.transport import Transport

Check = Literal["step", "collective", "off"]
_STAMP_SECONDS = 60.0


class Union:
    """Unites what the ranks of one group have, for one wrapped model."""

    def __init__(self, control: ControlPlane | None, name: str, check: Check) -> None:
        self.control = control
        self.name = name  # of the model, the same on all ranks
        self.check: Check = check

    def unite(
        self,
        transport: Transport,
        stamp: Callable[[], Stamp],
        bits: int,
        num_bits: int,
        used: list[int] | None,
        moment: Callable[[], str],
    ) -> tuple[int, list[int] | None]:
        """Compare stamps; returns the bits that any rank has, and how many ranks used each parameter."""
        assert self.control is not None
        watch = transport.watch
        mine = stamp() if self.check != "off" else None
        digest = mine.digest() if mine is not None else 0
        answer = self.control.start_or([digest, ~digest, *to_words(bits, num_bits)], watch)
        counts = None if used is None else self.control.start_sum(used, watch)
        told = answer.wait(moment)
        if told[0] != digest or told[1] != ~digest:
            if mine is None:
                raise errors.Disagreement("Ranks were wrapped with different values of check=.")
            raise disagreement(watch, f"{mine.window} {mine.resets}", mine, _STAMP_SECONDS)
        return from_words(told[2:]), None if counts is None else counts.wait(moment)

    def mirror(
        self, transport: Transport, num_bits: int, num_used: int, moment: Callable[[], str]
    ) -> tuple[int, list[int] | None]:
        """Take part without a word of one's own: a rank that has run out of data (join)."""
        assert self.control is not None
        answer = self.control.start_or([0, 0, *to_words(0, num_bits)], transport.watch)
        counts = self.control.start_sum([0] * num_used, transport.watch) if num_used else None
        return from_words(answer.wait(moment)[2:]), None if counts is None else counts.wait(moment)

    @staticmethod
    def count_used(transport: Transport, used: list[int], device: torch.device) -> list[int]:
        """Add the used parameters up on the group of the gradients, where there is no other way."""
        counts = torch.tensor(used, dtype=torch.int32, device=device)
        transport.land(transport.start_all_reduce(counts, mean=False), "the exchange of used parameters")
        return counts.tolist()
