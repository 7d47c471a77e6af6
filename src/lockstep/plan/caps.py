"""How large a bucket may grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
DEFAULT_FIRST_CAP_BYTES = MIB


@dataclass(frozen=True)
class BucketCaps:
    """Byte caps by position: the first bucket launched, the ones after it, or one cap per bucket.

    A small first bucket starts the link early; it is used only when the user chose no size at all, so that a size
    given by the user is honoured everywhere.
    """

    cap_bytes: int = DEFAULT_CAP_MB * MIB
    first_cap_bytes: int = DEFAULT_FIRST_CAP_BYTES
    per_bucket_bytes: tuple[int, ...] = ()

    @classmethod
    def from_megabytes(cls, cap_mb: float | None = None, cap_mb_list: Sequence[float] | None = None) -> BucketCaps:
        """Caps from the two constructor arguments of DistributedDataParallel, in MiB."""
        if cap_mb_list:
            caps = tuple(_positive_bytes("bucket_cap_mb_list", cap) for cap in cap_mb_list)
            return cls(cap_bytes=max(caps), first_cap_bytes=caps[0], per_bucket_bytes=caps)
        if cap_mb is None:
            return cls()
        cap = _positive_bytes("bucket_cap_mb", cap_mb)
        return cls(cap_bytes=cap, first_cap_bytes=cap)

    @staticmethod
    def fits(open_bytes: int, more_bytes: int, cap: int) -> bool:
        """Whether a bucket that holds ``open_bytes`` may take ``more_bytes`` under ``cap``.

        A cap may be overshot by an eighth, and crumbs ride along with whatever comes next: otherwise a bias between
        two matrices of the cap's size would travel alone, and each message has a price of its own.
        """
        return open_bytes + more_bytes <= cap + cap // 8 or open_bytes * 64 <= cap

    def cap_for(self, position: int) -> int:
        """The cap of the bucket launched at ``position`` among those of its kind; the last of a list repeats."""
        if self.per_bucket_bytes:
            return self.per_bucket_bytes[min(position, len(self.per_bucket_bytes) - 1)]
        return self.first_cap_bytes if position == 0 else self.cap_bytes


def _positive_bytes(argument: str, megabytes: float) -> int:
    if isinstance(megabytes, bool) or not isinstance(megabytes, (int, float)):
        raise TypeError(f"{argument} must be a number of MiB, got {megabytes!r}.")
    if not math.isfinite(megabytes) or megabytes <= 0:
        raise ValueError(f"{argument} must be a positive number of MiB, got {megabytes!r}.")
    return max(1, int(megabytes * MIB))
