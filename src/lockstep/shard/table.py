"""A plan of shards as plain text."""

from __future__ import annotations

from lockstep.plan.table import human_bytes
from lockstep.shard.layout import ShardPlan


def shard_table(plan: ShardPlan) -> str:
    """One line per unit: its bytes on each rank and as a whole, and its parameters."""
    rows = [("unit", "per rank", "whole", "dtype", "ranks", "num", "parameters")]
    for unit in plan.units:
        names = unit.names
        shown = ", ".join(names if len(names) <= 3 else (*names[:2], "...", names[-1]))
        dtypes = "+".join(flat.dtype for flat in unit.flats)
        worlds = "+".join(dict.fromkeys(str(flat.world) for flat in unit.flats))
        size = (human_bytes(unit.shard_bytes), human_bytes(unit.full_bytes))
        rows.append((unit.name or "(root)", *size, dtypes, worlds, str(len(names)), shown))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[6]]) for row in rows]
    num_parameters = sum(len(unit.names) for unit in plan.units)
    head = (
        f"shards {plan.digest[:12]}: {len(plan.units)} units, {num_parameters} parameters, "
        f"{human_bytes(plan.shard_bytes)} per rank of {human_bytes(plan.full_bytes)}"
    )
    return "\n".join([head, *lines])
