"""What ranks do with the gradients of a unit: each gets the mean of its shard.

    ScatterExchange   a reduce-scatter over the shards, then an all-reduce over the replicas
    HookExchange      whatever the program's communication hook makes of the whole gradients; each takes its shard

[Note: input buffers]  A scatter reads a buffer as large as the whole unit.  At most ``max_scatter_inputs`` of them
exist at once: the next one waits for the oldest to land.  The all-reduce between replicas is started where its
scatter is known to have landed: then, or at the end; the same place on every rank, so that they pair up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.exchange import HookExchange as EngineHookExchange
from lockstep.engine.flight import Flight, Landed, Moment, WorkFlight
from lockstep.engine.transport import Transport
from lockstep.shard.layout import FlatLayout
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.store import spread
from lockstep.shard.unit import Unit

_dtype_of = attrgetter("dtype")


class Load:
    """The live side of a bucket: a unit's parameters of one dtype that train, and how their gradients lie."""

    def __init__(self, unit: Unit, parameters: Sequence[ShardedParameter], layout: FlatLayout) -> None:
        self.unit = unit
        self.parameters = list(parameters)
        self.layout = layout
        # Reduced over the shards and not over the replicas yet, see set_requires_all_reduce.
        self.partial: Tensor | None = None
        self.is_kept = False  # in this window, since its unit does not synchronise
        self.packs_at_once = layout.packs_at_once and all(p.whole_spec is None for p in parameters)
        self._gaps: dict[torch.dtype, list[Tensor]] = {}
        # In a world of one, parameter by parameter: chunks would cost the host more than the copies.
        alone = layout.world == 1 and not layout.has_padding
        self._places = list(zip(*(cut.shard(0) for cut in layout.cuts), strict=True)) if alone else None

    def pack(self, gradients: Sequence[Tensor], flat: Tensor) -> bool:
        """Copy all whole gradients into a buffer of all ranks' shards by one kernel, if that is possible."""
        if not self.packs_at_once or len(gradients) != len(self.parameters):
            return False
        dtype = gradients[0].dtype
        if set(map(type, gradients)) != {Tensor} or set(map(_dtype_of, gradients)) != {dtype}:
            return False
        if self._places is not None:
            parts = list(map(torch_private.alias, repeat(flat), *self._places))
            torch_private.foreach_copy(parts, list(gradients))
            return True
        parts = list(gradients)
        if any(self.layout.gaps):
            if dtype not in self._gaps:
                world = self.layout.world
                self._gaps[dtype] = [
                    torch.zeros(world, gap, dtype=dtype, device=flat.device) for gap in self.layout.gaps
                ]
            parts = [
                part
                for gradient, gap in zip(gradients, self._gaps[dtype], strict=True)
                for part in ((gradient, gap) if gap.numel() else (gradient,))
            ]
        torch_private.chunk_cat(parts, 0, self.layout.world, out=flat.view(self.layout.world, -1))
        return True

    @property
    def mean_over(self) -> int:
        return self.unit.mesh.world * self.unit.mesh.num_replicas

    def averages(self, like: Tensor) -> bool:
        """Whether the backends make the mean themselves."""
        unit = self.unit
        if unit.divisor is not None or unit.only_sums or unit.scatter_comm is not None or self._num_active is not None:
            return False
        ways = [unit.links.scatter] if unit.mesh.world > 1 else []
        ways += [unit.links.replicas] if unit.links.replicas is not None else []
        return all(way.averages(like) for way in ways)

    def scale(self, like: Tensor) -> float:
        """What gradients are multiplied with before they leave."""
        if self.averages(like):
            return 1.0
        if self.unit.divisor is not None:
            return 1.0 / self.unit.divisor
        return 1.0 / (self._num_active or self.mean_over)

    @property
    def _num_active(self) -> int | None:
        """How many ranks have data, where the mean is to be over those (uneven.py)."""
        return None if self.unit.root is None else self.unit.root.attendance.num_active


def _said_of_buffers(loads: Sequence[Load]) -> list[str]:
    """Whether what follows a reduction includes buffers."""
    roots = [load.unit.root for load in loads[:1]]
    return ["buffers are synchronised"] if any(root is not None and root.syncs_buffers for root in roots) else []


class ScatterExchange:
    """The mean over all ranks, of which each keeps its shard."""

    is_linear = keeps_order = True
    is_same_on_all = False  # each rank is given its part

    def __init__(self, transport: Transport, loads: Sequence[Load]) -> None:
        self._transport = transport
        self.loads = list(loads)  # by bucket
        self._under_way: list[ScatterFlight] = []  # those that hold an input buffer

    @property
    def name(self) -> str:
        """Part of what ranks compare in every window."""
        kept = [load.unit.name for load in self.loads if not load.unit.syncs]
        partial_ = [load.unit.name for load in self.loads if load.unit.links.replicas and not load.unit.all_reduces]
        said = [f"without {', '.join(kept)}"] if kept else []
        said += [f"replicas without {', '.join(partial_)}"] if partial_ else []
        divided = [f"{load.unit.name} by {load.unit.divisor:g}" for load in self.loads if load.unit.divisor is not None]
        said += [f"divided: {', '.join(divided)}"] if divided else []
        said += _said_of_buffers(self.loads)
        return "; ".join(["scatter", *said])

    def scale(self, like: Tensor) -> float:
        return 1.0  # differs from unit to unit: memory.py asks the load

    def start(self, bucket: LiveBucket, flat: Tensor, *, is_last: bool) -> Flight:
        load = self.loads[bucket.index]
        load.is_kept = not load.unit.syncs
        if load.is_kept:
            return Landed()
        limit = load.unit.max_scatter_inputs
        while len(under_way := [flight for flight in self._under_way if flight.holds_input]) >= limit:
            under_way[0].land_scatter()
        flight = ScatterFlight(load, flat, self._transport.watch, partial(_moment, bucket), f"bucket {bucket.index}")
        bucket.flat = flight.shard
        self._under_way = [f for f in (*self._under_way, flight) if f.holds_input]
        return flight


class ScatterFlight:
    """A unit's gradients on their way."""

    def __init__(self, load: Load, flat: Tensor, watch: Watch, moment: Moment, name: str) -> None:
        self._load = load
        self._watch = watch
        self._moment = moment
        self._name = name
        self._input: Tensor | None = flat
        self._second: WorkFlight | None = None
        self.landed_ns: int | None = None
        unit, layout = load.unit, load.layout
        is_alone = unit.mesh.is_alone
        self._mean = not is_alone and load.averages(flat)
        self._first: Any = None
        if is_alone:
            self.shard = flat
        else:
            self.shard = self._new_shard(flat, layout)
            self._first = self._scatter(unit, flat)
        if self._first is None:
            self.land_scatter()

    @staticmethod
    def _new_shard(flat: Tensor, layout: FlatLayout) -> Tensor:
        return flat.new_empty(layout.shard_elements)

    def _scatter(self, unit: Unit, flat: Tensor) -> Any:
        way = unit.links.scatter
        if unit.scatter_comm is None:
            return way.start_reduce_scatter(self.shard, flat, mean=self._mean, name=self._name)
        op = torch.distributed.ReduceOp.SUM
        work = unit.scatter_comm(self.shard, flat, way.process_group, op, True)
        return Landed() if work is None else WorkFlight(work, way.blocks_host(flat.device))

    @property
    def holds_input(self) -> bool:
        return self._input is not None and self._first is not None

    def land_scatter(self) -> None:
        """Wait for the first half, let go of its input, and start the second."""
        if self._input is None:
            return
        if self._first is not None:
            self._first.land(self._watch, self._moment)
        self._first = self._input = None
        unit, load = self._load.unit, self._load
        if load.partial is not None:
            self.shard.add_(load.partial)
            load.partial = None
        if unit.links.replicas is None:
            return
        if unit.all_reduces:
            self._second = unit.links.replicas.start_all_reduce(self.shard, mean=self._mean, name=self._name)
        else:
            load.partial = self.shard

    def is_done(self) -> bool:
        return self._input is None and (self._second is None or self._second.is_done())

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        self.land_scatter()
        if self._second is not None:
            self._second.land(watch, moment)
        hook = self._load.unit.all_reduce_hook
        if hook is not None and self._load.partial is None:
            hook(self.shard)
        del self.shard  # which is a gradient's from now on, and is freed with it
        return None


class HookExchange:
    """A program's communication hook, as for a replicated model: it sees whole gradients, in their own shapes."""

    is_same_on_all = False

    def __init__(self, transport: Transport, loads: Sequence[Load], state: Any, hook: Any, name: str) -> None:
        self._inner = EngineHookExchange(transport, state, hook, name)
        self.is_linear = self._inner.is_linear
        self.loads = list(loads)

    @property
    def name(self) -> str:
        kept = [load.unit.name for load in self.loads if not load.unit.syncs]
        said = [f"without {', '.join(kept)}"] if kept else []
        return "; ".join([self._inner.name, *said, *_said_of_buffers(self.loads)])

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def keeps_order(self) -> bool:
        return self._inner.keeps_order

    def scale(self, like: Tensor) -> float:
        return 1.0

    def start(self, bucket: LiveBucket, flat: Tensor, *, is_last: bool) -> Flight:
        load = self.loads[bucket.index]
        load.is_kept = not load.unit.syncs
        if load.is_kept:
            return Landed()
        packed = flat.new_empty(bucket.spec.num_elements)
        spread(load.layout, flat, bucket.views(packed))
        bucket.flat = flat.new_empty(load.layout.shard_elements)
        flight = self._inner.start(bucket, packed, is_last=is_last)
        return _HookFlight(flight, load, bucket.flat)


class _HookFlight:
    """A hook's answer, of which this rank takes its shard."""

    def __init__(self, flight: Flight, load: Load, shard: Tensor) -> None:
        self._flight, self._load, self._shard = flight, load, shard
        self.landed_ns: int | None = None

    def is_done(self) -> bool:
        return self._flight.is_done()

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        whole = self._flight.land(watch, moment)
        assert whole is not None
        whole = whole.reshape(-1)
        offset, rank = 0, self._load.unit.mesh.rank
        with torch.no_grad():
            for cut in self._load.layout.cuts:
                size = cut.shard_shape(rank)[cut.spec.dim]
                mine = whole.narrow(0, offset, cut.spec.num_elements).view(cut.spec.shape)
                mine = mine.narrow(cut.spec.dim, rank * cut.chunk if size else 0, size)
                torch_private.alias(self._shard, *cut.shard(rank)).copy_(mine)
                offset += cut.spec.num_elements
        return None


Exchange = ScatterExchange | HookExchange


def _moment(bucket: LiveBucket) -> str:
    return f"the scattering of bucket {bucket.index} ({bucket.shown_names})"


Hook = Callable[[Any, Any], Any]
