"""What happened in the last steps on this rank, as named intervals on one clock.

The reducer records an interval per moment of a bucket's life (``launch``, ``travel``, ``collect``) and per phase
of the step (``forward``, ``backward``, ``compare``: the exchange that ends it); a sharded model records ``gather`` and
``gathered`` for its units.  Recording is a tuple append, so it stays on; a ring keeps the last steps.
The clock is ``time.time_ns`` so that ranks of one host share it without an exchange.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field
from time import time_ns as now
from typing import NamedTuple

from lockstep.observe.stragglers import Stragglers

__all__ = ["Interval", "StepRecord", "Timeline", "now"]


_MAX_INTERVALS = 100_000


class Interval(NamedTuple):
    """One moment: its name (the same word the code and the reports use), bucket (-1: the whole step), ns times."""

    name: str
    bucket: int
    start_ns: int
    end_ns: int


@dataclass
class StepRecord:
    """The intervals of one synchronised window."""

    step: int
    intervals: list[Interval] = field(default_factory=list)

    def seconds(self, name: str) -> float:
        """Total length of the intervals called ``name``."""
        return sum(i.end_ns - i.start_ns for i in self.intervals if i.name == name) / 1e9

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication: how long this rank stood still for the link, or for a slower rank.

        The exchange that ends a step comes after the last launch, so most of the wait for buckets is in it.
        """
        return self.seconds("compare") + self.seconds("collect") + self.seconds("gathered")


class Timeline:
    """A ring of the last ``num_steps`` step records of one rank."""

    def __init__(self, rank: int, num_steps: int = 64) -> None:
        self.rank = rank
        # Learn when a collective really ended, from a callback in the backend's thread; otherwise a ``travel``
        # interval ends when its bucket was collected.
        self.precise = False
        self._steps: deque[StepRecord] = deque(maxlen=num_steps)
        self._current = StepRecord(0)
        self.stragglers = Stragglers()

    def record(self, name: str, start_ns: int, end_ns: int, bucket: int = -1) -> None:
        if len(self._current.intervals) < _MAX_INTERVALS:  # a program that never reduces never ends a step
            self._current.intervals.append(Interval(name, bucket, start_ns, end_ns))

    def end_step(self) -> None:
        """Close the current step and open the next."""
        self._steps.append(self._current)
        self._current = StepRecord(self._current.step + 1)

    @property
    def waited_seconds(self) -> float:
        """How long this rank has stood still for the others in the current step."""
        return self._current.seconds("collect") + self._current.seconds("compare")

    @property
    def step(self) -> int:
        """Number of the step that is being recorded."""
        return self._current.step

    @property
    def steps(self) -> list[StepRecord]:
        return list(self._steps)

    def to_json(self) -> str:
        stragglers = {str(rank): seconds for rank, seconds in self.stragglers.seconds.items()}
        steps = [asdict(s) for s in self._steps]
        return json.dumps({"rank": self.rank, "steps": steps, "made_others_wait": stragglers})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        data = json.loads(text)
        timeline = cls(data["rank"], num_steps=max(1, len(data["steps"])))
        for step in data["steps"]:
            intervals = [Interval(*i) for i in step["intervals"]]
            timeline._steps.append(StepRecord(step["step"], intervals))
        waits = data.get("made_others_wait", {})
        timeline.stragglers.seconds = {int(rank): float(seconds) for rank, seconds in waits.items()}
        return timeline
