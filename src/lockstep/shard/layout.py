"""Where every element of a unit lies: in its parameters, in each rank's shard, and in the buffers that travel.

A *unit* is gathered and freed as a whole.  Each parameter is cut along one dimension (0, unless said otherwise) into as
many chunks as there are ranks; the last chunks may be shorter or empty, as ``torch.chunk`` cuts and a DTensor expects.

    shard of a rank      its chunks of all parameters, one after the other, each at the same offset on every rank
    gathered, scattered  the shards of all ranks, one after the other ("rank major")
    full                 the parameters, whole, one after the other

Pure data: no tensors, no process group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

# Every parameter begins at a multiple of this many elements, so that kernels may load whole vectors.
ALIGNMENT = 16

Strided = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, stride, offset
Row = tuple[tuple[int, int], tuple[int, int], int | None]


@dataclass(frozen=True)
class ShardSpec:
    """A parameter, and the dimension that it is cut along."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dim: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(
                f"Parameter {self.name} of shape {self.shape} has no dimension {self.dim} to be cut along."
            )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Chunks of a parameter that one strided copy moves: as they lie in it, and in a buffer of all ranks' shards."""

    full: Strided
    ranked: Strided


@dataclass(frozen=True)
class Cut:
    """One parameter in the layout of its unit."""

    spec: ShardSpec
    world: int
    offset: int  # in every rank's shard
    full_offset: int  # in the buffer of whole parameters

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def chunk(self) -> int:
        """How long all chunks but the last ones are, along the dimension that is cut."""
        return -(-self.spec.shape[self.spec.dim] // self.world)

    @cached_property
    def num_elements(self) -> int:
        """The size of the largest chunk."""
        return prod(self.chunk_shape(self.chunk))

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equally much."""
        return self.spec.shape[self.spec.dim] % self.world == 0

    def chunk_shape(self, length: int) -> tuple[int, ...]:
        shape = self.spec.shape
        return (*shape[: self.spec.dim], length, *shape[self.spec.dim + 1 :])

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """What one rank holds."""
        size = self.spec.shape[self.spec.dim]
        start = min(rank * self.chunk, size)
        return self.chunk_shape(min(self.chunk, size - start))

    def shard(self, rank: int) -> Strided:
        """What one rank holds, within its shard."""
        shape = self.shard_shape(rank)
        return shape, contiguous(shape), self.offset

    @property
    def full(self) -> Strided:
        """The whole parameter, in the buffer of whole parameters."""
        return self.spec.shape, contiguous(self.spec.shape), self.full_offset

    def pieces(self, shard_elements: int) -> tuple[Piece, ...]:
        """At most two: the whole chunks, and the shorter one after them."""
        if not self.spec.num_elements:
            return ()
        stride = contiguous(self.spec.shape)
        size, dim = self.spec.shape[self.spec.dim], self.spec.dim
        num_whole, rest = divmod(size, self.chunk)
        found = []
        if num_whole:
            shape = self.chunk_shape(self.chunk)
            found.append(
                Piece(
                    full=((num_whole, *shape), (self.chunk * stride[dim], *stride), 0),
                    ranked=((num_whole, *shape), (shard_elements, *contiguous(shape)), self.offset),
                )
            )
        if rest:
            shape = self.chunk_shape(rest)
            found.append(
                Piece(
                    full=(shape, stride, num_whole * self.chunk * stride[dim]),
                    ranked=(shape, contiguous(shape), num_whole * shard_elements + self.offset),
                )
            )
        return tuple(found)


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of one dtype that travel in one buffer."""

    cuts: tuple[Cut, ...]
    world: int
    dtype: str

    @cached_property
    def shard_elements(self) -> int:
        """The size of every rank's shard, with what it is padded by."""
        last = self.cuts[-1]
        return last.offset + aligned(last.num_elements)

    @property
    def num_elements(self) -> int:
        """The size of the buffer of all ranks' shards."""
        return self.world * self.shard_elements

    @cached_property
    def full_elements(self) -> int:
        last = self.cuts[-1]
        return last.full_offset + aligned(last.spec.num_elements)

    @cached_property
    def has_padding(self) -> bool:
        """Whether a buffer of all ranks' shards has elements that belong to no parameter."""
        return self.num_elements != sum(cut.spec.num_elements for cut in self.cuts)

    @cached_property
    def is_direct(self) -> bool:
        """Whether the buffer of all ranks' shards already is the whole parameter, which is alone in it."""
        cut = self.cuts[0]
        return len(self.cuts) == 1 and cut.spec.dim == 0 and cut.num_elements == self.shard_elements

    @cached_property
    def splits(self) -> list[int] | None:
        """A rank's shard as sizes of chunks, and of gaps where there are any; None where one kernel cannot split it."""
        if any(cut.spec.dim or cut.spec.shape[0] % self.world or not cut.num_elements for cut in self.cuts):
            return None
        return [row[0][1] for row in self.rows]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Where ``splits`` lie in the buffer of whole parameters: one row for each rank; gaps lie nowhere."""
        found: list[Row] = []
        for cut in self.cuts:
            size = cut.num_elements
            found.append(((self.world, size), (size, 1), cut.full_offset))
            if gap := aligned(size) - size:
                found.append(((self.world, gap), (gap, 1), None))
        return tuple(found)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """How many elements lie behind each parameter's chunk that belong to none."""
        return tuple(aligned(cut.num_elements) - cut.num_elements for cut in self.cuts)

    @cached_property
    def packs_at_once(self) -> bool:
        """Whether one kernel can pack whole gradients into a buffer of all ranks' shards."""
        return all(cut.spec.dim == 0 and cut.num_elements for cut in self.cuts)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Of each parameter."""
        return tuple(cut.pieces(self.shard_elements) for cut in self.cuts)

    @property
    def itemsize(self) -> int:
        return self.cuts[0].spec.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_elements * self.itemsize

    @property
    def full_bytes(self) -> int:
        return sum(cut.spec.num_elements * cut.spec.itemsize for cut in self.cuts)


@dataclass(frozen=True)
class UnitLayout:
    """What is gathered and freed together."""

    name: str
    flats: tuple[FlatLayout, ...]  # one for each dtype
    # Another group of ranks has another layout for the same parameters.
    mesh: str = ""

    @property
    def shard_bytes(self) -> int:
        return sum(flat.shard_bytes for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        return sum(flat.full_bytes for flat in self.flats)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cut.name for flat in self.flats for cut in flat.cuts)


@dataclass(frozen=True)
class ShardPlan:
    """The units of a model, in the order of their forwards as far as that is known: declaration order."""

    units: tuple[UnitLayout, ...]

    @property
    def shard_bytes(self) -> int:
        """What each rank holds of the parameters between steps."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def full_bytes(self) -> int:
        return sum(unit.full_bytes for unit in self.units)

    @property
    def largest_full_bytes(self) -> int:
        return max((unit.full_bytes for unit in self.units), default=0)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when they cut and pack their parameters in the same way."""
        text = json.dumps([asdict(unit) for unit in self.units], separators=(",", ":"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def unit_of(self, name: str) -> UnitLayout:
        """The unit that a parameter belongs to."""
        for unit in self.units:
            if name in unit.names:
                return unit
        raise KeyError(f"No unit holds a parameter named {name!r}.")

    def __str__(self) -> str:
        from lockstep.shard.table import shard_table

        return shard_table(self)


def flat_layouts(specs: Iterable[ShardSpec], world: int) -> tuple[FlatLayout, ...]:
    """One layout for each dtype, parameters in the order given."""
    by_dtype: dict[str, list[ShardSpec]] = {}
    for spec in specs:
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return tuple(_flat_layout(group, world) for group in by_dtype.values())


def _flat_layout(specs: Sequence[ShardSpec], world: int) -> FlatLayout:
    cuts, offset, full_offset = [], 0, 0
    for spec in specs:
        cut = Cut(spec, world, offset, full_offset)
        cuts.append(cut)
        offset += aligned(cut.num_elements)
        full_offset += aligned(spec.num_elements)
    return FlatLayout(tuple(cuts), world, specs[0].dtype)


def aligned(num_elements: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape without gaps, the last dimension fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
