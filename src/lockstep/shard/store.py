"""The memory of parameters of one dtype: the shard of this rank as one buffer, and the whole, which comes and goes.

All shards of a unit lie in one buffer, ``home``, as they travel; so gathering begins without packing.  Whoever gives a
shard other memory (``.data = ``, a load that assigns) is followed before the next gathering.

The whole parameters lie in one buffer, too, whose storage is emptied and filled again.  They are not views of it to
autograd, so filling it is not a change that a recorded graph would complain of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.flight import Flight, Landed, Moment, WorkFlight
from lockstep.engine.transport import Transport
from lockstep.shard.deliveries import Deliveries
from lockstep.shard.layout import FlatLayout, flat_layouts
from lockstep.shard.parameter import ShardedParameter

_place_of: Callable[[Tensor], int] = Tensor.data_ptr
_shard_of, _trains = attrgetter("sharded"), attrgetter("sharded.requires_grad")


class FlatStore:
    """Parameters of one dtype of a unit, on this rank."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], device: torch.device, dtype: torch.dtype | None, *, pins: bool
    ) -> None:
        self.parameters = list(parameters)
        self.device = device  # where the whole is computed with; shards may be elsewhere (offloading)
        self._pins = pins
        mesh = parameters[0].mesh
        self.rank, self.world, self._is_alone = mesh.rank, mesh.world, mesh.is_alone
        (self.layout,) = flat_layouts([p.spec for p in parameters], mesh.world)
        own = parameters[0].sharded.dtype
        self.dtype = own if dtype is None or not own.is_floating_point else dtype
        self.home: Tensor | None = None
        # For compiled graphs: see graph_ops.py, [Note: anchor].
        self.anchor = torch.zeros(1, device=device).requires_grad_(True)
        self.key = self.anchor.detach()  # the same memory, by which operators know the store
        self._accumulator: Any = None
        self.deliveries = Deliveries()
        self.trains: tuple[bool, ...] = self.flags()
        self.graph_facts = self._graph_facts()
        self._buffer: Tensor | None = None
        self._gathered: Tensor | None = None
        self._flight: Flight | Any = None
        # After a forward, where it is freed down to fewer ranks than have shards: this rank's part of the whole.
        self._kept: Tensor | None = None
        self._num_keepers = 1
        if not any(p.local.is_meta for p in parameters):
            self.settle()

    # ---------------------------------------------------------------- the shard

    @property
    def is_laid_out_for_them(self) -> bool:
        """Whether the parameters still have the dtype that this was made for, and are gathered as plain numbers."""
        dtypes = {str(p.sharded.dtype).removeprefix("torch.") for p in self.parameters}
        return dtypes == {self.layout.dtype} and not any(p.gathers_itself for p in self.parameters)

    def name_anew(self) -> None:
        """Take up the names that parameters have from the root."""
        (self.layout,) = flat_layouts([p.spec for p in self.parameters], self.world)

    def settle(self) -> None:
        """Let all shards lie in one buffer."""
        local = self.parameters[0].local
        device = local.device
        with torch.inference_mode(False), torch.no_grad():  # it outlives an evaluation that may be running
            home = torch.zeros(self.layout.shard_elements, dtype=local.dtype, device=device)
            if self._pins and device.type == "cpu":
                home = home.pin_memory()
            for parameter, cut in zip(self.parameters, self.layout.cuts, strict=True):
                place = _part(home, *cut.shard(self.rank))
                place.copy_(parameter.local)
                torch_private.set_local(parameter.sharded, place)
        self.home = home
        self._addresses = self._places()
        self._forget_whole_of_other_memory()

    def _forget_whole_of_other_memory(self) -> None:
        if self._buffer is not None and self.is_alias:
            for parameter in self.parameters:
                assert parameter.full is not None
                parameter.full.data = parameter.local
            self._buffer = self.home

    def follow(self) -> None:
        """Settle again if the program gave a shard other memory."""
        if self.home is None or self._places() != self._addresses:
            self.settle()

    def _places(self) -> list[int]:
        """Where each shard lies in memory; a loop in C, for every gather."""
        return list(map(_place_of, map(torch_private.local_of, map(_shard_of, self.parameters))))

    @property
    def versions(self) -> list[int]:
        """Changes whenever a shard is written to, or given other memory."""
        return [*self._places(), *(p.sharded._version + p.local._version for p in self.parameters)]

    def shard(self) -> Tensor:
        """What travels when it is gathered."""
        self.follow()
        assert self.home is not None
        return self.home

    # ---------------------------------------------------------------- for compiled graphs

    def _graph_facts(self) -> tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Sizes of the buffers of all ranks' shards (0 in a world of one) and of the whole; dtype; the shapes."""
        shapes = [cut.spec.shape for cut in self.layout.cuts]
        sizes = tuple(size for shape in shapes for size in shape)
        num_elements = 0 if self._is_alone else self.layout.num_elements
        return num_elements, self.layout.full_elements, self.dtype, sizes, tuple(map(len, shapes))

    def flags(self) -> tuple[bool, ...]:
        """Which parameters train."""
        return tuple(map(_trains, self.parameters))  # a loop in C, for every gather

    def accumulator(self) -> Any:
        """Autograd's node behind the anchor."""
        if self._accumulator is None:
            self._accumulator = torch_private.gradient_accumulator(self.anchor)
        return self._accumulator

    def forget_accumulator(self) -> None:
        """Let autograd make that node anew, on the stream that is current then."""
        self._accumulator = None

    # ---------------------------------------------------------------- the whole

    @property
    def is_alias(self) -> bool:
        """Whether the whole is the shard itself: a world of one that casts and moves nothing."""
        home = self.home
        return self._is_alone and home is not None and home.dtype == self.dtype and home.device == self.device

    @property
    def _is_direct(self) -> bool:
        """Whether what is gathered already lies as the whole does."""
        return self._is_alone or self.layout.is_direct

    @property
    def _full_elements(self) -> int:
        size = self.layout.num_elements if self._is_direct else self.layout.full_elements
        return -(-size // self._num_keepers) * self._num_keepers

    def make_whole(self) -> None:
        """Make the whole parameters, without memory."""
        if self._buffer is not None:
            return
        self.follow()
        with torch.inference_mode(False):  # as in ``settle``
            if self.is_alias:
                self._buffer = self.home
            else:
                self._buffer = torch.empty(0, dtype=self.dtype, device=self.device)
            assert self._buffer is not None
            for parameter, cut in zip(self.parameters, self.layout.cuts, strict=True):
                parameter.make_full(self._buffer, cut.full_offset)

    def _fill_memory(self) -> Tensor:
        """The buffer of the whole, with memory."""
        assert self._buffer is not None
        self._buffer.untyped_storage().resize_(self._full_elements * self._buffer.element_size())
        return torch_private.alias(self._buffer, (self._full_elements,), (1,), 0)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is freed with the whole."""
        if self._buffer is None or self.is_alias or type(tensor) not in (Tensor, nn.Parameter):
            return False
        if tensor.layout is not torch.strided:
            return False
        place = self._buffer.untyped_storage().data_ptr()
        return place != 0 and tensor.untyped_storage().data_ptr() == place

    def share_among(self, num_keepers: int) -> None:
        """Let the whole be such that this many ranks can keep equal parts of it."""
        self._num_keepers = num_keepers

    def keep_part(self, number: int) -> None:
        """Keep one part of the whole, which is about to be freed."""
        if self._buffer is not None and not self.is_alias:
            size = self._full_elements // self._num_keepers
            self._kept = torch_private.alias(self._buffer, (size,), (1,), number * size).clone()

    def forget_part(self) -> None:
        self._kept = None

    @property
    def has_part(self) -> bool:
        """Whether a part was kept after the forward."""
        return self._kept is not None

    def start_among_keepers(self, transport: Transport, name: str) -> None:
        """Start gathering the parts that were kept."""
        assert self._kept is not None
        self._flight = transport.start_all_gather(self._fill_memory(), self._kept, name)
        self._kept = None

    def take_part_among_keepers(self, transport: Transport, name: str) -> Flight:
        """As ``take_part``, for the parts that were kept."""
        whole = torch.zeros(self._full_elements, dtype=self.dtype, device=self.device)
        return transport.start_all_gather(whole, whole[: self._full_elements // self._num_keepers].clone(), name)

    def start(self, transport: Transport, comm: Any, name: str) -> None:
        """Start gathering."""
        self.make_whole()
        self.follow()
        if self.is_alias:
            return
        assert self.home is not None
        with torch.no_grad():
            if self._is_alone:
                self._fill_memory().copy_(self.home, non_blocking=True)
                return
            mine = self.home.to(device=self.device, dtype=self.dtype, non_blocking=True)
            if self._is_direct and comm is None:
                self._gathered = self._fill_memory().narrow(0, 0, self.layout.num_elements)
            elif isinstance(comm, GroupMemory):
                self._gathered = comm.allocate_on(transport, self.layout.num_elements, self.dtype, self.device)
            elif comm is not None:
                size = (self.layout.num_elements,)
                self._gathered = comm.allocate(size, dtype=self.dtype, device=self.device)
            else:
                self._gathered = mine.new_empty(self.layout.num_elements)
            self._flight = start_gather(transport, comm, self._gathered, mine, name)

    def take_part(self, transport: Transport, comm: Any, name: str) -> Flight | Any:
        """Start a gather whose result nobody wants here: others have started it (level.py)."""
        mine = self.shard().to(device=self.device, dtype=self.dtype)
        return start_gather(transport, comm, mine.new_empty(self.layout.num_elements), mine, name)

    def finish(self, transport: Transport, moment: Moment) -> None:
        """Wait for what was started; the whole parameters have their values then."""
        if self._flight is not None:
            self._flight.land(transport.watch, moment)
            self._flight = None
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        with torch.no_grad():
            if not self._is_direct:
                whole = self._fill_memory()
                spread_flat(self.layout, gathered, whole)
            elif self._buffer is not None and gathered.data_ptr() != self._buffer.data_ptr():
                self._fill_memory().narrow(0, 0, self.layout.num_elements).copy_(gathered)

    def free(self) -> None:
        """Give the memory of the whole back."""
        if self._buffer is not None and not self.is_alias:
            self._buffer.untyped_storage().resize_(0)


def _part(home: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A part of a buffer that begins where its own storage begins, in the same memory.

    A DTensor takes over where its local part begins; one that begins elsewhere can be neither copied nor saved, since
    it seems to have memory of its own.
    """
    size = home.element_size()
    num_bytes = size * prod(shape)
    if not num_bytes:
        return home.new_empty(tuple(shape))
    storage = home.untyped_storage()[size * offset : size * offset + num_bytes]
    return home.new_empty(0).set_(storage, 0, tuple(shape), tuple(stride))  # type: ignore[call-overload,no-any-return]


class GroupMemory:
    """Buffers from the process group's own allocator, where its backend has one."""

    def allocate_on(self, transport: Transport, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch_private.group_memory(transport.process_group, num_elements, dtype, device)


def start_gather(transport: Transport, comm: Any, gathered: Tensor, mine: Tensor, name: str) -> Any:
    """Start an all-gather, by the program's own if it has one."""
    if comm is None or isinstance(comm, GroupMemory):
        return transport.start_all_gather(gathered, mine, name)
    work = comm(gathered, mine, transport.process_group, True)
    return Landed() if work is None else WorkFlight(work, transport.blocks_host(mine.device))


def spread_flat(layout: FlatLayout, ranked: Tensor, flat: Tensor) -> None:
    """Copy everyone's shards into the buffer of whole parameters."""
    if layout.splits is None:
        spread(layout, ranked, [torch_private.alias(flat, *cut.full) for cut in layout.cuts])
        return
    targets = [
        ranked.new_empty(shape) if offset is None else torch_private.alias(flat, shape, stride, offset)
        for shape, stride, offset in layout.rows
    ]
    torch.split_with_sizes_copy(ranked.view(layout.world, -1), layout.splits, 1, out=targets)  # one kernel for all


def spread(layout: FlatLayout, ranked: Tensor, whole: Sequence[Tensor]) -> None:
    """Copy everyone's shards into whole parameters."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for parameter, pieces in zip(whole, layout.pieces, strict=True):
        for piece in pieces:
            targets.append(torch_private.alias(parameter, *piece.full))
            sources.append(torch_private.alias(ranked, *piece.ranked))
    if targets:
        torch_private.foreach_copy(targets, sources)
