"""The transport: a process group with its facts, and the only place that calls its collectives.

What a backend can do (average by itself, be waited for without stopping the host) is asked here and nowhere else.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.aloft import Aloft
from lockstep.engine.audit import CollectiveAudit, known_audit_of
from lockstep.engine.flight import Moment, WorkFlight
from lockstep.engine.patient import PatientWork

# Waiting for a collective of these stops the host, so it must be watched.
_HOST_BACKENDS = ("gloo", "mpi", "ucc")


_unordered: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


class Transport:
    """One process group, as the engine sees it."""

    def __init__(self, process_group: dist.ProcessGroup, watch: Watch) -> None:
        self.process_group = process_group
        self.watch = watch
        self.world = process_group.size()
        self.rank = process_group.rank()
        # A world of one has nothing to send; a benchmark may want to see the collective all the same.
        self.forces_collective = False
        self.audit: CollectiveAudit | None = None
        self._aloft: Aloft | None = None
        self._backends: dict[torch.device, str] = {}

    # ---------------------------------------------------------------- facts

    @property
    def shown_rank(self) -> int:
        """This rank as messages name it."""
        return self.watch.shown(self.rank)

    def backend(self, device: torch.device) -> str:
        """The backend that serves ``device``; asked anew for a device the model was moved to."""
        name = self._backends.get(device)
        if name is None:
            name = self._backends[device] = torch_private.backend_name(self.process_group, device)
        return name

    def blocks_host(self, device: torch.device) -> bool:
        """Whether waiting for a collective on ``device`` stops the host."""
        return self.backend(device) in _HOST_BACKENDS

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to exchange anything with."""
        return self.world == 1 and not self.forces_collective

    def averages(self, like: Tensor) -> bool:
        """Whether the backend makes the mean itself; otherwise gradients are divided here and summed there.

        The same on all ranks, since it must be the same operation.  gloo's mean is a sum and then a pass over the
        buffer in its own thread; on the CPU the division costs nothing while gradients move into the flat buffer.
        gloo's sum of fp16 gradients could also overflow.
        """
        if self.world == 1 or like.is_complex():
            return False
        backend = self.backend(like.device)
        if backend == "gloo":
            return like.device.type != "cpu" and like.dtype != torch.float16
        return backend == "nccl"

    # ---------------------------------------------------------------- collectives

    def start_all_reduce(self, tensor: Tensor, *, mean: bool, name: str = "") -> WorkFlight:
        """Start the sum or mean of ``tensor`` over the group, in place."""
        wire = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        self._before(name or "all-reduce", wire)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        work = torch_private.all_reduce(self.process_group, wire, op)
        return self._flight(work, tensor)

    def start_broadcast(self, tensor: Tensor, source: int) -> WorkFlight:
        """Start sending ``tensor`` from rank ``source`` of the group to all, in place."""
        self._before(f"broadcast from rank {source}", tensor)
        work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        return self._flight(work, tensor)

    def start_all_gather(self, gathered: Tensor, mine: Tensor, name: str) -> WorkFlight:
        """Start collecting everyone's ``mine``, in the order of ranks."""
        gathered, mine = (torch.view_as_real(t) if t.is_complex() else t for t in (gathered, mine))
        self._before(name, mine)
        # The newer name of the same; looked up here, since the older one will go.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(gathered, mine, group=self.process_group, async_op=True)
        return self._flight(work, mine)

    def start_reduce_scatter(self, mine: Tensor, everyones: Tensor, *, mean: bool, name: str) -> WorkFlight:
        """Start the sum or mean of ``everyones`` over the group, of which each rank gets its part."""
        mine, everyones = (torch.view_as_real(t) if t.is_complex() else t for t in (mine, everyones))
        self._before(name, everyones)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = scatter(mine, everyones, op=op, group=self.process_group, async_op=True)
        if mine.device.type == "cpu" and self.backend(mine.device) == "gloo":
            work = PatientWork(self.process_group, work)
        return self._flight(work, mine)

    def start_sparse_all_reduce(self, tensor: Tensor, name: str) -> WorkFlight:
        """Start the sum of a sparse tensor, on a backend that has one."""
        self._before(name, tensor)
        return self._flight(dist.all_reduce(tensor, group=self.process_group, async_op=True), tensor)

    def start_max(self, tensor: Tensor) -> WorkFlight:
        """Start the maximum of ``tensor`` over the group, in place."""
        self._before("maximum", tensor)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.process_group, async_op=True)
        return self._flight(work, tensor)

    def all_gather(self, tensor: Tensor, moment: Moment) -> list[Tensor]:
        """Everyone's ``tensor``, of the same shape on all ranks."""
        self._before("all-gather", tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        work = dist.all_gather(parts, tensor, group=self.process_group, async_op=True)
        self._flight(work, tensor).land(self.watch, moment)
        return parts

    def _flight(self, work: Any, tensor: Tensor) -> WorkFlight:
        return WorkFlight(work, self.blocks_host(tensor.device), on_stream=self.on_stream(tensor.device))

    def on_stream(self, device: torch.device) -> Callable[[Moment], None] | None:
        """Whom to tell of a collective that only a stream waits for; None where the host does."""
        if device.type != "cuda" or self.blocks_host(device):
            return None
        if self._aloft is None:
            self._aloft = Aloft(self.watch, partial(_abort, self.process_group))
        return self._aloft.note

    def announce_hook(self, name: str, flat: Tensor) -> Callable[[Any], None] | None:
        """A communication hook is about to start collectives of its own on this group; returns whom to tell its end."""
        self._before(name, flat)
        audit = known_audit_of(self.process_group)  # another model of the group may have asked for it
        return None if audit is None else audit.begin_hook()

    def keep_order_of(self, reducer: Any) -> None:
        """Finish what this reducer has under way before anything else is started on the group, by whomever.

        For hooks that start collectives later, see ``Reducer.land_unordered``.
        """
        _unordered.setdefault(self.process_group, weakref.WeakSet()).add(reducer)

    def _before(self, name: str, tensor: Tensor) -> None:
        """What comes before every collective."""
        for reducer in _unordered.get(self.process_group, ()) if self.blocks_host(tensor.device) else ():
            reducer.land_unordered()
        if self.audit is not None:
            self.audit.before(name if self.watch.board is None else f"{name} of {self.watch.board.name}", tensor)

    def land(self, flight: Any, moment: str) -> None:
        """Wait for a collective that is not a bucket's."""
        flight.land(self.watch, lambda: moment)


def _abort(process_group: Any) -> None:
    """End what a group has under way, so that streams, and whoever waits for them, go on."""
    try:
        process_group.abort()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logging.getLogger("lockstep").error("The process group cannot be aborted: %s", error)
