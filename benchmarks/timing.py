"""Interleaved timing: every round runs every subject once, and each round's order is the reverse of the last.

A machine drifts (other work, clocks, temperature). Subjects timed one after the other would be compared
across that drift; subjects timed in the same round are not. So ratios are formed within a round, and their
median and quartiles are taken over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float
    """First and third quartile."""

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)

    def text(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def json(self) -> dict[str, float]:
        return {"median": self.median, "q1": self.low, "q3": self.high}


def interleave(measure: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each subject in each round; ``measure`` runs a subject once and gives its time."""
    times: dict[str, list[float]] = {name: [] for name in measure}
    for round_index in range(num_rounds):
        names = list(measure)
        if round_index % 2:
            names.reverse()
        for name in names:
            times[name].append(measure[name]())
    return times


def summarise(times: dict[str, list[float]], baseline: str) -> dict[str, dict[str, object]]:
    """Per subject: its time, and its ratio to the baseline of the same round."""
    return {
        name: {
            "seconds": Spread.of(values).json(),
            "ratio": Spread.of([mine / base for mine, base in zip(values, times[baseline], strict=True)]).json(),
            "baseline": baseline,
            "num_rounds": len(values),
        }
        for name, values in times.items()
    }


def spread_of(entry: dict[str, float]) -> Spread:
    return Spread(entry["median"], entry["q1"], entry["q3"])
