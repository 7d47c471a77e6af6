"""From parameters to buckets.

Buckets are filled in the order gradients are expected to become ready, so that the first bucket can leave while
the rest of the backward still computes.  Parameters of different dtype or device never share a bucket; several
buckets are open at once, so that alternating dtypes do not shatter them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.plan.caps import BucketCaps
from lockstep.plan.model import Bucket, ParameterSpec, Plan


def build_plan(
    parameters: Sequence[ParameterSpec],
    caps: BucketCaps | None = None,
    *,
    ready_order: Sequence[str] | None = None,
) -> Plan:
    """The plan for ``parameters``, given in declaration order.

    ``ready_order`` names the parameters in the order their gradients were observed to become ready; without it
    the reverse of declaration order stands in for it.
    """
    caps = caps or BucketCaps()
    _require_unique_names(parameters)
    if ready_order is None:
        expected, order = list(reversed(parameters)), "reversed"
    else:
        expected, order = _by_names(parameters, ready_order), "observed"

    closed: list[list[tuple[int, ParameterSpec]]] = []
    open_buckets: dict[tuple[str, str], list[tuple[int, ParameterSpec]]] = {}
    open_bytes: dict[tuple[str, str], int] = {}
    num_closed: dict[tuple[str, str], int] = {}
    for position, spec in enumerate(expected):
        if spec.sparse:  # a sparse gradient has no fixed size, so it cannot share a flat buffer
            closed.append([(position, spec)])
            continue
        kind = (spec.dtype, spec.device)
        cap = caps.cap_for(num_closed.get(kind, 0))
        if kind in open_buckets and not caps.fits(open_bytes[kind], spec.num_bytes, cap):
            closed.append(open_buckets.pop(kind))
            num_closed[kind] = num_closed.get(kind, 0) + 1
        open_bytes[kind] = spec.num_bytes + (open_bytes[kind] if kind in open_buckets else 0)
        open_buckets.setdefault(kind, []).append((position, spec))
    closed.extend(open_buckets.values())

    # A bucket can leave when its last parameter is ready: that moment is its place in the launch order.
    closed.sort(key=lambda members: members[-1][0])
    buckets = tuple(Bucket(index, tuple(spec for _, spec in members)) for index, members in enumerate(closed))
    return Plan(buckets, caps, order)


def plan_from_groups(
    parameters: Sequence[ParameterSpec], groups: Sequence[Sequence[str]], caps: BucketCaps | None = None
) -> Plan:
    """The plan whose buckets are the given groups of names, in launch order.

    Parameters that are in no group come after them, in buckets as ``build_plan`` makes them.  Parameters of a group
    that may not share a buffer (dtype, device, sparse) become neighbours instead.
    """
    caps = caps or BucketCaps()
    by_name = {spec.name: spec for spec in parameters}
    buckets: list[tuple[ParameterSpec, ...]] = []
    grouped: set[str] = set()
    for group in groups:
        kinds: dict[tuple[str, ...], list[ParameterSpec]] = {}
        for name in group:
            if name in by_name and name not in grouped:
                grouped.add(name)
                spec = by_name[name]
                kinds.setdefault((spec.dtype, spec.device, name if spec.sparse else ""), []).append(spec)
        buckets += [tuple(members) for members in kinds.values()]
    rest = build_plan([spec for spec in parameters if spec.name not in grouped], caps)
    buckets += [bucket.parameters for bucket in rest]
    return Plan(tuple(Bucket(i, members) for i, members in enumerate(buckets)), caps, "graph")


def _require_unique_names(parameters: Sequence[ParameterSpec]) -> None:
    seen: set[str] = set()
    for spec in parameters:
        if spec.name in seen:
            raise ValueError(f"Two parameters are named {spec.name!r}; a plan needs each name once.")
        seen.add(spec.name)


def _by_names(parameters: Sequence[ParameterSpec], names: Sequence[str]) -> list[ParameterSpec]:
    by_name = {spec.name: spec for spec in parameters}
    if set(names) != set(by_name) or len(names) != len(by_name):
        odd = sorted(set(names) ^ set(by_name))
        raise ValueError(f"ready_order must name every parameter exactly once; these differ: {odd[:5]}.")
    return [by_name[name] for name in names]
