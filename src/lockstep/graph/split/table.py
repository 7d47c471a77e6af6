"""The buckets of a split graph as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.plan.caps import BucketCaps

if TYPE_CHECKING:
    from lockstep.graph.split.optimizer import Bucket


def split_table(buckets: Sequence[Bucket], caps: BucketCaps) -> str:
    """``buckets`` in forward order; the table has them in the order they are launched."""
    launched = list(reversed(buckets))
    if not any(bucket.uses for bucket in launched):
        return "split: no parameters in this graph, nothing to split"
    title = f"split: buckets {len(launched)}, {_sizes(caps)}"
    rows = [("bucket", "bytes", "parameters")]
    for index, bucket in enumerate(launched):
        names = bucket.names or ["-"]
        rows.append((str(index), f"{bucket.num_bytes:,}", names[0]))
        rows += [("", "", name) for name in names[1:]]
    text = [title, *_aligned(rows)]
    grown = [("bucket", "more operations", "more bytes")]
    for index, bucket in enumerate(launched):
        if bucket.num_extra_nodes:
            more_bytes = bucket.num_bytes - bucket.num_bytes_at_cap
            grown.append((str(index), str(bucket.num_extra_nodes), f"{more_bytes:,}"))
    if len(grown) > 1:
        text += ["extended past the cap, up to a place where the graph can be cut:", *_aligned(grown)]
    return "\n".join(text)


def _sizes(caps: BucketCaps) -> str:
    if caps.per_bucket_bytes:
        return f"caps of {', '.join(f'{cap:,}' for cap in caps.per_bucket_bytes)} bytes"
    return f"cap {caps.cap_bytes:,} bytes, first {caps.first_cap_bytes:,} bytes"


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"  {a:>{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
