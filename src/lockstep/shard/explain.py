"""What happened to each unit in the last step: where it was gathered, and from where its gradients left."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.table import human_bytes
from lockstep.shard.root import Root
from lockstep.shard.unit import Unit

__all__ = ["ShardExplanation", "UnitFacts", "explain_root"]


@dataclass(frozen=True)
class UnitFacts:
    """One unit in the last step that ended with its gradients reduced."""

    name: str
    shard_bytes: int
    full_bytes: int
    num_parameters: int
    gathers: int  # all of them, in forwards and backwards
    gathers_in_graph: int  # how many of them by a compiled graph
    backward_gathers_in_graph: int
    reduced_in_graph: bool | None  # whether its gradients left from inside a compiled backward; None: it has none
    exposed_seconds: float  # how long this rank stood still for its gathers

    def __str__(self) -> str:
        if not self.gathers:
            where = "did not run"
        elif self.gathers_in_graph == self.gathers:
            again = self.backward_gathers_in_graph
            where = f"gathered in compiled graphs: {self.gathers - again} forward, {again} backward"
        elif self.gathers_in_graph:
            where = f"gathered {self.gathers} times, {self.gathers_in_graph} of them in compiled graphs"
        else:
            where = f"gathered {self.gathers} times, outside of compiled graphs"
        reduced = {True: "reduced from inside a graph", False: "reduced by the hooks", None: "nothing to reduce"}
        size = f"{human_bytes(self.shard_bytes)} of {human_bytes(self.full_bytes)}"
        waited = f"waited {1e3 * self.exposed_seconds:.2f} ms"
        return f"{self.name}  {size}  {where}; {waited}; {reduced[self.reduced_in_graph]}"


@dataclass(frozen=True)
class ShardExplanation:
    """Printed by ``lockstep.explain``; the fields are for programs."""

    units: tuple[UnitFacts, ...]
    exposed_gather_seconds: float | None  # None: no step has ended yet
    exposed_scatter_seconds: float | None
    plan: str = ""

    def __str__(self) -> str:
        if self.exposed_gather_seconds is None or self.exposed_scatter_seconds is None:
            return f"{len(self.units)} sharded unit(s); no step has ended yet"
        in_graph = sum(unit.gathers > 0 and unit.gathers == unit.gathers_in_graph for unit in self.units)
        lines = [f"{len(self.units)} sharded unit(s), {in_graph} of them gathered by compiled graphs alone"]
        lines += [f"  {unit}" for unit in self.units]
        lines.append(
            f"exposed communication per step: {1e3 * self.exposed_gather_seconds:.2f} ms in gathers, "
            f"{1e3 * self.exposed_scatter_seconds:.2f} ms in reductions"
        )
        return "\n".join(lines)


def explain_root(root: Root) -> ShardExplanation:
    """The units of a sharded model, in the order of its plan."""
    units = [unit for unit in root.units if unit.parameters]
    last = root.timeline.steps[-1:]
    if not last:
        return ShardExplanation(tuple(_facts(root, unit, 0.0) for unit in units), None, None, str(root.plan))
    waits: dict[int, float] = {}
    for interval in last[0].intervals:
        if interval.name == "gathered":
            waits[interval.bucket] = waits.get(interval.bucket, 0.0) + (interval.end_ns - interval.start_ns) / 1e9
    return ShardExplanation(
        tuple(_facts(root, unit, waits.get(unit.index, 0.0)) for unit in units),
        last[0].seconds("gathered"),
        last[0].seconds("collect"),
        str(root.plan),
    )


def _facts(root: Root, unit: Unit, exposed: float) -> UnitFacts:
    team = root.team_of(unit)
    buckets = [b for b, load in zip(team.step.reducer.buckets, team.memory.loads, strict=True) if load.unit is unit]
    counts = unit.last_gathers
    layouts = [store.layout for store in unit.stores]
    return UnitFacts(
        unit.name,
        sum(layout.shard_bytes for layout in layouts),
        sum(layout.full_bytes for layout in layouts),
        len(unit.parameters),
        counts.total,
        counts.in_graph,
        counts.in_graph_backward,
        all(bucket.left_in_graph for bucket in buckets) if buckets else None,
        exposed,
    )
