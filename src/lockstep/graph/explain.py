"""What was compiled of a wrapped model: its graphs, the buckets of each, and what was left to the hooks and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.reducer import Reducer
from lockstep.graph.joint import GraphRecord
from lockstep.plan.table import human_bytes

REST_CAME_LATER = "the rest of its bucket came later"  # from other graphs or hooks, as it may


@dataclass(frozen=True)
class LaunchFacts:
    """One bucket that a backward graph launches."""

    bucket: int
    num_bytes: int
    names: tuple[str, ...]
    fraction: float | None  # how much of the backward's compute comes before it; None when the graph came from a cache
    delivers: bool  # whether it came from the graph in the last window
    left_because: str

    def __str__(self) -> str:
        where = "from the compile cache" if self.fraction is None else f"at {self.fraction:.0%} of the backward"
        names = self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"
        state = "" if self.delivers else f"; not launched there: {self.left_because or 'it has not run yet'}"
        return f"bucket {self.bucket:>3}  {human_bytes(self.num_bytes):>10}  {where}  {names}{state}"


@dataclass(frozen=True)
class CompiledGraph:
    region: str
    strategy: str
    num_backward_nodes: int
    launches: tuple[LaunchFacts, ...]
    digest: str = ""  # equal on ranks that compile the same graph; empty where a rank is alone


@dataclass(frozen=True)
class Explanation:
    """Printed by ``lockstep.explain``; the fields are for programs."""

    graphs: tuple[CompiledGraph, ...]
    left_to_hooks: dict[str, str] = field(default_factory=dict)  # parameter name -> why
    never_ran: tuple[str, ...] = ()
    predicted_exposed_seconds: float | None = None
    measured_exposed_seconds: float | None = None
    plan: str = ""
    rank_is_baked_in_at: tuple[str, ...] = ()  # places in the program where ranks have other numbers in their graphs

    @property
    def num_launches(self) -> int:
        return sum(len(graph.launches) for graph in self.graphs)

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} compiled graph(s), {self.num_launches} bucket(s) launched inside a backward"]
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number}: {graph.region}, overlap={graph.strategy}")
            for launch in graph.launches:
                where = (
                    "from the compile cache" if launch.fraction is None else f"at {launch.fraction:.0%} of the backward"
                )
                names = launch.names[0] if len(launch.names) == 1 else f"{launch.names[0]} ... {launch.names[-1]}"
                state = (
                    "" if launch.delivers else f"  not launched there: {launch.left_because or 'it has not run yet'}"
                )
                lines.append(
                    f"  bucket {launch.bucket:>3}  {human_bytes(launch.num_bytes):>10}  {where}  {names}{state}"
                )
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left_to_hooks.items():
            by_reason.setdefault(why, []).append(name)
        for why, left in by_reason.items():
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            lines.append(f"left to the hooks ({why}): {shown}")
        lines += [
            f"rank is baked in at {place}: each rank has a graph of its own" for place in self.rank_is_baked_in_at
        ]
        lines += [f"compiled, but never ran: {name}" for name in self.never_ran]
        if self.predicted_exposed_seconds is not None or self.measured_exposed_seconds is not None:
            lines.append(
                f"exposed communication per step: predicted {_milliseconds(self.predicted_exposed_seconds)}, "
                f"measured {_milliseconds(self.measured_exposed_seconds)}"
            )
        return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.2f} ms"


def explain_graphs(
    records: Sequence[GraphRecord], reducer: Reducer, module: nn.Module, measured_exposed: float | None
) -> Explanation:
    buckets = reducer.buckets
    graphs = tuple(_described(record, buckets) for record in records)
    graphs += tuple(_shared_graphs(graphs, buckets))
    launched = {name for graph in graphs for launch in graph.launches if launch.delivers for name in launch.names}
    reasons: dict[str, str] = {}
    for record in records:
        reasons |= record.left_out
    left: dict[str, str] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            if slot.name not in launched:
                left[slot.name] = bucket.left_because or reasons.get(slot.name) or _why(records)
    prediction = reducer.plan.prediction
    return Explanation(
        graphs,
        left,
        tuple(regions_that_never_ran(module, records, buckets)),
        None if prediction is None else prediction.exposed_seconds,
        measured_exposed,
        str(reducer.plan),
        tuple(dict.fromkeys(place for record in records for place in record.differing_places())),
    )


def _described(record: GraphRecord, buckets: Sequence[LiveBucket]) -> CompiledGraph:
    fractions = {placement.group.bucket: placement.fraction for placement in record.placements}
    launches = []
    for group in record.groups:
        names = tuple(member.name for member in group.members)
        bucket = next((b for b in buckets if set(names) <= set(b.spec.names)), None)
        launches.append(
            LaunchFacts(
                group.bucket if bucket is None else bucket.index,
                0 if bucket is None else bucket.spec.num_bytes,
                names,
                fractions.get(group.bucket),
                bucket is not None and bucket.left_in_graph,
                _why_left(bucket, names),
            )
        )
    return CompiledGraph(record.region, record.strategy, record.num_backward_nodes, tuple(launches), record.digest)


def _why_left(bucket: LiveBucket | None, names: Sequence[str]) -> str:
    """Why a bucket, of which a graph delivers these, did not leave inside of the backward."""
    if bucket is None:
        return "the plan has changed since"
    if bucket.left_because or bucket.left_in_graph or len(names) == len(bucket.slots):
        return bucket.left_because
    others = [name for name in bucket.spec.names if name not in names]
    return f"{REST_CAME_LATER} ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"


def _shared_graphs(graphs: Sequence[CompiledGraph], buckets: Sequence[LiveBucket]) -> Iterator[CompiledGraph]:
    """Buckets that come from graphs which were compiled for another module of the same kind."""
    known = {launch.bucket for graph in graphs for launch in graph.launches if launch.delivers}
    launches = tuple(
        LaunchFacts(bucket.index, bucket.spec.num_bytes, bucket.spec.names, None, True, "")
        for bucket in buckets
        if bucket.left_in_graph and bucket.index not in known
    )
    if launches:
        yield CompiledGraph("compiled for another module of the same kind", "graph", 0, launches)


def _why(records: Sequence[GraphRecord]) -> str:
    if not records:
        return "nothing was compiled"
    strategies = {record.strategy for record in records}
    if strategies == {"none"}:
        return "overlap='none'"
    if strategies == {"split"}:
        return "overlap='split': the hooks run after each part"
    return "no compiled graph uses it"


def regions_that_never_ran(
    module: nn.Module, records: Sequence[GraphRecord], buckets: Sequence[LiveBucket] = ()
) -> list[str]:
    """Names of modules inside ``module`` that were compiled, and of which no graph is known.

    One graph serves all modules of a class that have the same shapes, so a graph of the class counts; and so does one
    that has delivered to their buckets, or said why not.
    """
    seen = {name for record in records for name in record.parameters}
    seen |= {name for b in buckets if b.left_in_graph or b.left_because for name in b.spec.names}
    names = []
    for name, inner in module.named_modules():
        if not torch_private.is_compiled(inner):
            continue
        original = getattr(inner, "_orig_mod", inner)
        mine = {f"{name}.{n}" if name else n for n, _ in inner.named_parameters()}
        has_graph = (
            bool(mine & seen)
            or torch_private.has_compiled_code(type(original).forward)
            or any(record.region.startswith(f"{type(original).__name__} ") for record in records)
        )
        if not has_graph:
            names.append(name or type(original).__name__)
    return names
