"""The live side of a plan: parameters with their state in the current window, and the bucket they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.errors import ParameterPlace
from lockstep.plan import Bucket

# On the CPU, gradients of this size and more move into the flat buffer as soon as they are there. Freed one by one,
# their memory is used again for the next gradient; freed bucket by bucket, it becomes holes in the heap.
STAGE_BYTES = 64 * 1024


class Slot:
    """One parameter's place in its bucket, and what happened to it in the current window."""

    __slots__ = (
        "accumulator",
        "bucket",
        "dirty",
        "expected_fires",
        "found_unused",
        "is_dense_row_major",
        "is_divided",
        "is_dtensor",
        "kept_grad",
        "kept_value",
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
        "stride",
    )

    def __init__(self, name: str, parameter: nn.Parameter, owner: str, position: int) -> None:
        self.name = name
        self.parameter = parameter
        self.owner = owner
        self.position = position  # in declaration order
        local = local_tensor(parameter)
        self.is_dtensor = local is not parameter
        self.shape = local.shape
        self.stride = local.stride()
        self.num_elements = local.numel()
        self.is_dense_row_major = local.is_contiguous()
        self.stages_early = False
        self.bucket: LiveBucket
        self.offset = 0
        # Holds a gradient that no reduction has seen yet (set by every backward, cleared by a reduction).
        self.dirty = False
        self.ready = False
        self.is_divided = False  # the gradient was divided on its way into the flat buffer
        self.found_unused = False
        # What lay in .grad when a compiled graph delivered, until autograd has filled .grad anew (engine/delivery.py).
        self.kept_grad: Tensor | None = None
        self.kept_value: Tensor | None = None  # a copy of it, where its memory was written over
        self.accumulator: Any = None  # autograd's node that adds into .grad, once asked for
        self.num_fires = 0
        self.expected_fires: int | None = None

    @property
    def place(self) -> ParameterPlace:
        return ParameterPlace(self.name, self.owner, self.bucket.spec.index, self.position)


class LiveBucket:
    """A bucket of the plan with its slots, its flat buffer while it travels, and its countdown."""

    __slots__ = (
        "all_row_major",
        "came_clean",
        "collect_name",
        "comes_from_graph",
        "flat",
        "flight",
        "gradients",
        "has_divided",
        "has_kept",
        "is_delivered",
        "is_recorded",
        "is_sparse",
        "launch_name",
        "launched_ns",
        "layout",
        "left_because",
        "num_adopted",
        "num_clean_needed",
        "num_clean_windows",
        "num_pending",
        "parameter_ids",
        "parameters",
        "persistent",
        "probe",
        "skipped",
        "slots",
        "spare",
        "spec",
        "staging",
        "views_of_flat",
        "was_sent",
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
        self.parameter_ids = [id(slot.parameter) for slot in slots]
        # The usual case, for which one call packs.
        self.all_row_major = all(
            slot.is_dense_row_major and slot.num_elements and not slot.is_dtensor for slot in slots
        )
        self.views_of_flat: list[Tensor] | None = None
        self.num_adopted = 0  # gradients that point into the flat buffer
        self.staging: Tensor | None = None  # the flat buffer, while it is filled before the launch
        self.spare: Tensor | None = None  # the last flat buffer, to be used again once nobody's .grad lies in it
        self.num_pending = len(self.slots)
        self.flat: Tensor | None = None
        self.persistent: Tensor | None = None
        self.gradients: list[Tensor | None] = []
        self.flight: Any = None
        self.skipped = False
        self.launched_ns = 0
        self.was_sent = False
        self.has_divided = False
        self.has_kept = False  # slots hold what lay in .grad before
        # Of buckets that a compiled graph delivers, see engine/delivery.py.
        self.is_delivered = False
        self.is_recorded = False
        self.came_clean = False
        self.comes_from_graph = False  # a graph launched it the last time
        self.left_because = ""  # why the last delivery was left to the hooks
        self.num_clean_windows = 0
        self.num_clean_needed = 1
        self.probe: Tensor | None = None  # what was handed out, while it is watched who else adds to it

    def clear(self) -> None:
        """Forget a launch."""
        self.flat = self.flight = self.views_of_flat = self.staging = None
        if self.has_divided:
            self.has_divided = False
            for slot in self.slots:
                slot.is_divided = False
        self.gradients = []
        self.num_adopted = 0
        self.has_kept = False
        self.is_delivered = self.was_sent = False

    @property
    def index(self) -> int:
        return self.spec.index

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of ``flat``, in the parameter's own shape and memory order."""
        return [torch_private.alias(flat, shape, stride, offset) for shape, stride, offset in self.layout]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lives here; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


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
