"""Measure the link: time all-reduces on the process group that will carry the gradients.

A measurement that one rank ends sooner than another would leave the other waiting for ever.  So after each size the
ranks take the maximum of what they measured and of what they spent, and all go on, or stop, by those same numbers.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.agree.watch import Watch
from lockstep.engine.flight import WorkFlight
from lockstep.engine.transport import Transport
from lockstep.plan.link import LinkModel
from lockstep.plan.table import human_bytes

_GROWTH = 4
_SMALLEST_BYTES = 8 * 1024
# A GPU's link reaches its rate only with large messages, and they take it little time.
_LARGEST_BYTES = {"cpu": 8 * 1024**2, "cuda": 32 * 1024**2}
_MAX_REPEATS = 9
# A line needs two sizes, whatever they cost.
_MIN_SIZES = 2
# Where a collective is only queued on a stream, a few in a row share the price of synchronizing with the host.
_NUM_QUEUED = 4


def measure_link(
    process_group: Any, device: torch.device, watch: Watch | None = None, budget_seconds: float = 0.3
) -> LinkModel:
    """The latency and rate of a float32 all-reduce on this group and device; the same numbers on every rank.

    A collective: all ranks of the group call it at the same place.  Sizes grow from 8 KiB to 8 MiB (32 MiB on CUDA)
    while ``budget_seconds`` last; the tightest budget of all ranks counts.
    """
    if process_group.size() == 1:
        return LinkModel.free()
    transport = Transport(process_group, watch if watch is not None else Watch(None, process_group.rank()))
    return _Probe(transport, device, budget_seconds).measure()


class _Probe:
    """One measurement: its buffer, its clock, and what the ranks agreed on so far."""

    def __init__(self, transport: Transport, device: torch.device, budget_seconds: float) -> None:
        self._transport = transport
        self._device = device
        self._budget_seconds = budget_seconds
        self._num_queued = 1 if transport.blocks_host(device) else _NUM_QUEUED
        self._largest_bytes = _LARGEST_BYTES.get(device.type, _LARGEST_BYTES["cpu"])
        # Zeros stay zeros however often they are summed; written once, so that no page is touched while the clock runs.
        self._buffer = torch.empty(self._largest_bytes // 4, dtype=torch.float32, device=device).zero_()

    def measure(self) -> LinkModel:
        # The first collective may open connections, which no later one pays for; and it lets the ranks start together.
        self._agree(0.0)
        begin = perf_counter()
        points: list[tuple[int, float]] = []
        num_bytes, expected = _SMALLEST_BYTES, self._time(_SMALLEST_BYTES)
        while num_bytes <= self._largest_bytes:
            spent = perf_counter() - begin
            expected, overdraft = self._agree(expected, spent - self._budget_seconds)
            # At most half of what is left goes to one size.
            num_repeats = min(_MAX_REPEATS, int(-overdraft / 2 / (expected * self._num_queued)))
            if num_repeats < 1 and len(points) >= _MIN_SIZES:
                break
            (seconds,) = self._agree(self._usual_seconds(num_bytes, max(1, num_repeats)))
            points.append((num_bytes, seconds))
            num_bytes, expected = num_bytes * _GROWTH, seconds * _GROWTH  # in proportion to the bytes, at worst
        return LinkModel.fit(points)

    def _usual_seconds(self, num_bytes: int, num_repeats: int) -> float:
        """The lower quartile: what disturbs a repeat (another process on the core) only ever makes it longer."""
        times = sorted(self._time(num_bytes) for _ in range(num_repeats))
        return times[num_repeats // 4]

    def _time(self, num_bytes: int) -> float:
        """Seconds per all-reduce of ``num_bytes`` on this rank."""
        message = self._buffer[: num_bytes // 4]
        self._synchronize()
        start = perf_counter()
        for _ in range(self._num_queued):
            self._land(self._transport.start_all_reduce(message, mean=False), message)
        self._synchronize()
        return max((perf_counter() - start) / self._num_queued, 1e-9)

    def _agree(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        agreed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._land(self._transport.start_max(agreed), agreed)
        return agreed.tolist()

    def _land(self, flight: WorkFlight, tensor: Tensor) -> None:
        size = human_bytes(tensor.numel() * tensor.element_size())
        self._transport.land(flight, f"the measurement of the link ({size})")

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
