"""What a train step has done so far, and why: for ``step.explain()``."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

logger = logging.getLogger("lockstep")

_MOST_REASONS = 64  # each names a batch or a place; a training that always finds new ones has said enough


@dataclass
class Record:
    """Counts, and reasons that were given once each."""

    asked: str
    runs: str = ""
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_loop_calls: int = 0
    num_replays: int = 0
    num_captures: int = 0
    num_graph_calls: int = 0
    unable: set[int] = field(default_factory=set)  # other ranks for which this one walked through the loop

    def fall_back(self, reason: str, *, warn: bool = False) -> None:
        """Say once why the loop runs instead of a program."""
        if reason in self.reasons or len(self.reasons) >= _MOST_REASONS:
            return
        self.reasons.append(reason)
        if warn:
            warnings.warn(f"lockstep.TrainStep: {reason}", stacklevel=6)
        elif self.asked == "auto":
            logger.info("TrainStep runs the loop: %s", reason)
        else:
            logger.warning("TrainStep was asked for mode=%r, and runs the loop: %s", self.asked, reason)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def all_notes(self) -> list[str]:
        """The notes, and for whose sake this rank ran the loop."""
        if not self.unable:
            return list(self.notes)
        ranks = ", ".join(map(str, sorted(self.unable)[:8])) + (", ..." if len(self.unable) > 8 else "")
        text = f"some steps ran by the loop because rank {ranks} had no program for them; explain() there says why"
        return [*self.notes, text]


@dataclass(frozen=True)
class StepExplanation:
    """How a train step runs; print it, or use its fields."""

    asked: str
    runs: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    programs: tuple[str, ...]
    num_loop_calls: int
    num_program_calls: int

    def __str__(self) -> str:
        lines = [f"TrainStep: mode={self.asked!r}, runs {self.runs}"]
        lines.append(f"calls: {self.num_program_calls} as a program, {self.num_loop_calls} by the loop")
        lines += [f"program {index}: {shown}" for index, shown in enumerate(self.programs)]
        lines += [f"loop, because {reason}" for reason in self.reasons]
        return "\n".join([*lines, *self.notes])
