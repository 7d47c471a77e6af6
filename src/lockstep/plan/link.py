"""How long an all-reduce takes on one process group: a latency and a rate, fitted to what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

# A rate this many times higher than any seen is not believed: without it, points that are all latency would promise
# that bytes cost nothing.
_MAX_RATE_FACTOR = 8.0
_SHORTEST_SECONDS = 1e-9

Point = tuple[int, float]


@dataclass(frozen=True)
class LinkModel:
    """An all-reduce of n bytes takes ``latency_seconds + n / bytes_per_second``.

    The rate is that of the whole operation on this group, not of a cable: what the algorithm sends several times is
    in it.  ``points`` are the (bytes, seconds) it was fitted to, for a reader who wants to see how well.
    """

    latency_seconds: float
    bytes_per_second: float
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        if not (self.latency_seconds >= 0 and math.isfinite(self.latency_seconds)):
            raise ValueError(f"A link's latency must be zero or more seconds, got {self.latency_seconds!r}.")
        if not self.bytes_per_second > 0:
            raise ValueError(f"A link's rate must be more than zero bytes per second, got {self.bytes_per_second!r}.")

    @classmethod
    def free(cls) -> LinkModel:
        """The link of a rank that is alone: everything arrives at once."""
        return cls(latency_seconds=0.0, bytes_per_second=math.inf)

    @classmethod
    def fit(cls, points: Iterable[Point]) -> LinkModel:
        """The link that explains ``points`` best: the one with the smallest sum of errors.

        An error is the logarithm of the factor between what was measured and what the link says, and several points of
        one size count as their median.  Factors, unlike seconds, let small sizes have their say, so that a rate that
        changes with the size is met half-way; since they are not squared, a disturbed size is let go.
        """
        given = tuple((int(num_bytes), float(seconds)) for num_bytes, seconds in points)
        sizes = _median_by_size(given)
        if not sizes:
            raise ValueError("A link is fitted to at least one point of more than zero bytes, got none.")
        latency, seconds_per_byte = min(_candidate_lines(sizes), key=lambda line: (_error(line, sizes), line))
        return cls(latency, 1.0 / seconds_per_byte, given)

    def seconds(self, num_bytes: int) -> float:
        """How long an all-reduce of ``num_bytes`` takes when nothing else is on the link."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: the rate of a free link is None there."""
        return {
            "latency_seconds": self.latency_seconds,
            "bytes_per_second": self.bytes_per_second if math.isfinite(self.bytes_per_second) else None,
            "points": [list(point) for point in self.points],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LinkModel:
        rate = data["bytes_per_second"]
        return cls(
            latency_seconds=float(data["latency_seconds"]),
            bytes_per_second=math.inf if rate is None else float(rate),
            points=tuple((int(num_bytes), float(seconds)) for num_bytes, seconds in data["points"]),
        )

    def __str__(self) -> str:
        rate = f"{self.bytes_per_second / 1e6:.4g} MB/s" if math.isfinite(self.bytes_per_second) else "any rate"
        return f"{self.latency_seconds * 1e6:.4g} us + bytes at {rate}"


def _median_by_size(points: Sequence[Point]) -> list[Point]:
    by_size: dict[int, list[float]] = {}
    for num_bytes, seconds in points:
        if num_bytes > 0:
            by_size.setdefault(num_bytes, []).append(seconds)
    return [(num_bytes, max(median(times), _SHORTEST_SECONDS)) for num_bytes, times in sorted(by_size.items())]


def _candidate_lines(sizes: Sequence[Point]) -> list[tuple[float, float]]:
    """Lines (latency, seconds per byte) through two points, or through one with no latency or with the highest rate."""
    lowest_slope = min(seconds / num_bytes for num_bytes, seconds in sizes) / _MAX_RATE_FACTOR
    lines = []
    for index, (num_bytes, seconds) in enumerate(sizes):
        lines.append((0.0, seconds / num_bytes))
        lines.append((seconds - lowest_slope * num_bytes, lowest_slope))
        for fewer_bytes, sooner in sizes[:index]:
            slope = (seconds - sooner) / (num_bytes - fewer_bytes)
            latency = seconds - slope * num_bytes
            if slope >= lowest_slope and latency >= 0:
                lines.append((latency, slope))
    return lines


def _error(line: tuple[float, float], sizes: Sequence[Point]) -> float:
    """Buckets are large, so large sizes weigh more: 8 MiB nearly six times as much as 8 KiB."""
    latency, slope = line
    return sum(num_bytes**0.25 * abs(math.log((latency + slope * num_bytes) / seconds)) for num_bytes, seconds in sizes)
