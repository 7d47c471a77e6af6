"""Bytes that one rank sends, by the formula of each collective.

The numbers are what a bandwidth-optimal (ring or direct) algorithm puts on the link for the payload alone: no
packet headers, no rendezvous. Every hook counts with these same formulas, so that two hooks can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """A ring all-reduce sends each of the ``num_ranks`` pieces twice, less the piece that stays at home."""
    return _ceil_div(2 * (num_ranks - 1) * num_bytes, num_ranks)


def all_gather_bytes(num_bytes_per_rank: int, num_ranks: int) -> int:
    """Each rank's piece has to reach every other rank."""
    return (num_ranks - 1) * num_bytes_per_rank


def all_to_all_bytes(num_bytes: int, num_ranks: int) -> int:
    """Of ``num_bytes`` to send, one of ``num_ranks`` equal pieces is addressed to the sender itself."""
    return _ceil_div((num_ranks - 1) * num_bytes, num_ranks)


@dataclass
class WireCount:
    """What one rank has sent so far, beside what an uncompressed all-reduce would have sent."""

    bytes_on_wire: int = 0
    bytes_uncompressed: int = 0

    def add(self, bytes_on_wire: int, bytes_uncompressed: int) -> None:
        self.bytes_on_wire += bytes_on_wire
        self.bytes_uncompressed += bytes_uncompressed

    @property
    def ratio(self) -> float:
        """How many times fewer bytes travelled; 1.0 before anything did."""
        return self.bytes_uncompressed / self.bytes_on_wire if self.bytes_on_wire else 1.0


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
