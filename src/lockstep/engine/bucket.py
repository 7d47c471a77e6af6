"""The live side of a plan: parameters with their state in the current window, and the bucket they travel in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.errors import ParameterPlace
from lockstep.plan import Bucket

# On the CPU, gradients of this size and more move into the flat buffer as soon as they are there. Freed one by one,
# their memory is used again for the next gradient; freed bucket by bucket, it becomes holes in the heap.
STAGE_BYTES = 64 * 1024

_dtype_of = attrgetter("dtype")


class Slot:
    """One parameter's place in its bucket, and what happened to it in the current window."""

    __slots__ = (
        "accumulator",
        "accumulator_kind",
        "bucket",
        "dirty",
        "expected_fires",
        "found_unused",
        "held",
        "hook_id",
        "inner",
        "is_dense_row_major",
        "is_dtensor",
        "is_taken",
        "leaf",
        "name",
        "num_elements",
        "num_fires",
        "offset",
        "owner",
        "parameter",
        "position",
        "ready",
        "shape",
        "stages_early",
        "stays_put",
        "stride",
    )

    def __init__(self, name: str, parameter: nn.Parameter, owner: str, position: int) -> None:
        self.name = name
        self.parameter = parameter
        self.leaf: Tensor = parameter  # what optimizers have; of a sharded model the shard
        self.owner = owner
        self.position = position  # in declaration order
        local = local_tensor(parameter)
        self.is_dtensor = local is not parameter
        self.shape = tuple(local.shape)  # plain tuples: newer torch takes nothing else where it makes an alias
        self.stride = local.stride()
        self.num_elements = local.numel()
        self.is_dense_row_major = local.is_contiguous()
        self.stages_early = False
        self.bucket: LiveBucket
        self.offset = 0
        # Holds a gradient that no reduction has seen yet (set by every backward, cleared by a reduction).
        self.dirty = False
        self.ready = False  # counted as complete in this window
        self.found_unused = False
        # Its gradient was taken out of .grad into the flat buffer: what .grad holds from then on came afterwards.
        self.is_taken = False
        self.held: Tensor | None = None  # the tensor that was in .grad, to be put back with the result
        self.stays_put = False  # others look at the memory of that tensor: the result is copied into it
        self.accumulator: Any = None  # autograd's node that adds into .grad, once asked for
        self.accumulator_kind: Any = None  # for what the parameter was then
        self.hook_id = 0
        self.inner = 0  # the tensor behind the parameter that the hook is on
        self.num_fires = 0
        self.expected_fires: int | None = None

    @property
    def place(self) -> ParameterPlace:
        return ParameterPlace(self.name, self.owner, self.bucket.spec.index, self.position)


class LiveBucket:
    """A bucket of the plan with its slots, its flat buffer while it fills and travels, and its countdown."""

    __slots__ = (
        "all_row_major",
        "collect_name",
        "covered",
        "dtype_now",
        "flat",
        "flight",
        "got_extra",
        "gradients",
        "has_landed",
        "has_left",
        "has_more",
        "has_taken",
        "in_place",
        "is_held",
        "is_sparse",
        "launch_name",
        "launched_ns",
        "layout",
        "left_because",
        "left_in_graph",
        "num_due",
        "num_pending",
        "parameters",
        "parts",
        "persistent",
        "skipped",
        "slots",
        "spare",
        "spec",
        "waits_for_end",
        "was_watched",
    )

    def __init__(self, spec: Bucket, slots: Sequence[Slot]) -> None:
        self.spec = spec
        self.slots = list(slots)
        self.is_sparse = spec.sparse
        for slot, offset in zip(slots, spec.offsets, strict=True):
            slot.bucket = self
            slot.offset = offset
            slot.stages_early = (
                len(slots) > 1
                and slot.parameter.device.type == "cpu"
                and not slot.is_dtensor
                and slot.num_elements * slot.parameter.element_size() >= STAGE_BYTES
            )
        self.layout = [(tuple(slot.shape), tuple(slot.stride), slot.offset) for slot in slots]
        # The same words in traces as in the code and the reports.
        self.launch_name = f"lockstep::launch bucket {spec.index}"
        self.collect_name = f"lockstep::collect bucket {spec.index}"
        self.parameters: list[Tensor] = [local_tensor(slot.parameter) for slot in slots]
        # The usual case, for which one call packs.
        self.all_row_major = all(
            slot.is_dense_row_major and slot.num_elements and not slot.is_dtensor for slot in slots
        )
        # Memory: the buffer of this window, the one kept for the next.
        self.flat: Tensor | None = None
        self.parts: list[Tensor] | None = None  # views of it by slot, where they were made for nobody else
        self.has_taken = False  # some gradients lie in the flat buffer already
        self.in_place = False  # the flat buffer is the memory that the gradients lay in anyway
        self.gradients: list[Tensor | None] = []  # what was packed, by slot
        self.spare: Tensor | None = None  # the last flat buffer, to be used again once nobody's .grad lies in it
        self.persistent: Tensor | None = None
        self.dtype_now: torch.dtype | None = None  # what it travels in, once asked for in this window
        # The countdown, and the flight.
        self.num_pending = len(self.slots)  # slots that hooks will bring, and deliveries of graphs
        self.num_due = 0  # deliveries of graphs that are still to come in this pass
        self.covered: set[Slot] | None = None  # the slots that those will bring
        self.has_left = False
        self.has_landed = False
        self.has_more = False  # what is handed out now is not all of this window: something came late
        self.skipped = False
        self.flight: Any = None
        self.launched_ns = 0
        # For compiled graphs: whether it became whole inside one the last time, and why not.
        self.left_in_graph = False
        self.left_because = ""
        # Something came from outside of the graphs in the last window, perhaps after it had left: it is held this time.
        self.waits_for_end = False
        self.is_held = False  # until the end of the pass
        self.got_extra = False
        self.was_watched = False  # a window has passed with it

    def open(self, *, is_full: bool = True) -> None:
        """A new window begins; in a full one a graph may launch it."""
        self.num_pending = len(self.slots)
        self.num_due = 0
        self.covered = self.dtype_now = None
        self.has_left = self.has_landed = self.skipped = self.is_held = self.got_extra = False
        if is_full:
            self.left_in_graph = False

    def mark_taken(self, slots: Sequence[Slot]) -> None:
        """The gradients of these lie in the flat buffer from now on."""
        self.has_taken = True
        for slot in slots:
            slot.is_taken = True

    def forget_buffer(self) -> None:
        """Let go of the flat buffer, when its content was handed out or is not wanted."""
        self.flat = self.flight = self.parts = self.dtype_now = None
        self.gradients = []
        self.in_place = False
        if self.has_taken:
            self.has_taken = False
            for slot in self.slots:
                slot.is_taken = False
                slot.held = None
                slot.stays_put = False

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def shown_names(self) -> str:
        """Its parameters, for messages."""
        names = self.spec.names
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

    def travel_dtype(self) -> torch.dtype:
        """The dtype it travels in: the widest of its parameters, which may have been cast since the last window."""
        if self.dtype_now is None:
            dtypes = set(map(_dtype_of, map(_data_of, self.slots)))
            widest = dtypes.pop()
            for dtype in dtypes:
                widest = torch.promote_types(widest, dtype)
            self.dtype_now = widest
        return self.dtype_now

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of ``flat``, in the parameter's own shape and memory order."""
        return [torch_private.alias(flat, shape, stride, offset) for shape, stride, offset in self.layout]

    def view(self, slot: Slot) -> Tensor:
        """One parameter's part of the flat buffer."""
        assert self.flat is not None
        return torch_private.alias(self.flat, slot.shape, slot.stride, slot.offset)


_data_of = attrgetter("parameter")
_grad_of = attrgetter("parameter.grad")
_is_taken = attrgetter("is_taken")


def are_all_none(values: Iterable[object]) -> bool:
    """Whether there is nothing among these; a loop in C, since it is asked of every parameter in every window."""
    return all(map(is_, values, repeat(None)))


def have_no_gradient(slots: Iterable[Slot]) -> bool:
    """Whether nothing lies in ``.grad`` of any of them."""
    return are_all_none(map(_grad_of, slots))


def are_all_taken(slots: Iterable[Slot]) -> bool:
    """Whether the gradients of all of them lie in the flat buffer."""
    return all(map(_is_taken, slots))


def has_lost_hook(slot: Slot) -> bool:
    """Whether the hook on a parameter went with what was behind it (``torch.utils.swap_tensors``)."""
    return slot.inner != 0 and slot.inner != torch_private.inner_tensor(slot.parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lives here; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def local_part(tensor: Tensor) -> Tensor:
    """As ``local_tensor``, but the very tensor that a DTensor is around: what is written to it, others see."""
    return torch_private.local_of(tensor) if hasattr(tensor, "to_local") else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one block of memory without gaps or overlap, in whatever order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flatten_gradient(gradient: Tensor | None, slot: Slot, like: Tensor) -> Tensor:
    """A gradient as one row in the parameter's memory order, in the dtype it travels in; zeros for none.

    ``like`` gives dtype and device.
    """
    if gradient is None:
        return like.new_zeros(slot.num_elements)
    gradient = local_tensor(gradient).detach()
    if gradient.dtype != like.dtype:
        gradient = gradient.to(like.dtype)
    return gradient.reshape(-1) if slot.is_dense_row_major else in_memory_order(gradient, slot.shape, slot.stride)


def in_memory_order(gradient: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A gradient as one row, in the order of a dense tensor of this shape and stride."""
    if gradient.stride() != tuple(stride):
        gradient = torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
