"""A plan as plain text, for a terminal, a log or an error."""

from __future__ import annotations

from lockstep.plan.model import Plan

_MAX_NAMES = 3


def plan_table(plan: Plan) -> str:
    """One line per bucket: index, bytes, number of parameters, their names."""
    rows = [("bucket", "size", "dtype", "device", "num", "parameters")]
    for bucket in plan:
        kind = "sparse" if bucket.sparse else bucket.dtype
        names = bucket.names
        shown = ", ".join(names if len(names) <= _MAX_NAMES else (*names[: _MAX_NAMES - 1], "...", names[-1]))
        rows.append((str(bucket.index), human_bytes(bucket.num_bytes), kind, bucket.device, str(len(names)), shown))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
    ]
    head = (
        f"plan {plan.digest[:12]}: {len(plan)} buckets, {len(plan.parameters)} parameters, "
        f"{human_bytes(plan.num_bytes)}, {plan.order} order"
    )
    return "\n".join([head, *_why_these_caps(plan), *lines])


def _why_these_caps(plan: Plan) -> list[str]:
    """At most one line: the link that was measured and what was predicted for it."""
    said = []
    if plan.link is not None:
        said.append(f"link {plan.link}")
    if plan.prediction is not None:
        exposed, backward = plan.prediction.exposed_seconds, plan.prediction.backward_seconds
        said.append(f"predicted {exposed * 1e3:.4g} ms exposed after a backward of {backward * 1e3:.4g} ms")
    return ["; ".join(said)] if said else []


def human_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
