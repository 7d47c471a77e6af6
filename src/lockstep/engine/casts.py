"""Parameters that were cast after wrapping: their bucket travels in another dtype, so ranks agree before it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from lockstep import errors
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import Slot

MEETING_SECONDS = 60.0
_dtype_of = attrgetter("dtype")


class Casts:
    """The dtypes of the parameters as ranks have agreed on them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._agreed = self._planned = list(map(_dtype_of, self._parameters))

    def look(self, watch: Watch, moment: str) -> None:
        """Meet the other ranks if anything was cast since the last look; ``moment`` is the same on all of them."""
        dtypes = list(map(_dtype_of, self._parameters))
        if dtypes == self._agreed:
            return
        if watch.board is not None:
            changed = zip(self._slots, dtypes, self._agreed, strict=True)
            cast = ", ".join(f"{slot.name} to {str(new)[6:]}" for slot, new, old in changed if new != old)
            told = watch.meet(f"cast, {moment}", f"parameters that were cast: {cast}", cast, MEETING_SECONDS)
            if len(set(told.values())) > 1:
                told = watch.by_global(told)
                raise errors.Disagreement(
                    "Parameters were cast differently on different ranks:\n"
                    + errors.rank_table(told)
                    + "\nFix: cast the same parameters on every rank.",
                    told,
                )
        self._agreed = dtypes

    def names(self) -> tuple[str, ...]:
        """The parameters that have another dtype than was planned."""
        if self._agreed is self._planned:
            return ()
        pairs = zip(self._slots, self._agreed, self._planned, strict=True)
        return tuple(slot.name for slot, agreed, planned in pairs if agreed != planned)

    def of(self, slots: Sequence[Slot]) -> list[torch.dtype]:
        """The agreed dtypes of these."""
        return [self._agreed[slot.position] for slot in slots]
