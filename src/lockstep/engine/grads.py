"""What is done to ``.grad`` whoever owns the memory that it lies in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.engine.bucket import LiveBucket, Slot


def accumulate(slot: Slot, gradient: Tensor) -> None:
    """Add a gradient to ``.grad`` as autograd would."""
    if gradient.shape != slot.parameter.shape:
        raise ValueError(
            f"The gradient of {slot.name} has shape {tuple(gradient.shape)}, the parameter "
            f"{tuple(slot.parameter.shape)}."
        )
    before = slot.parameter.grad
    with torch.no_grad():
        if before is None:
            slot.parameter.grad = gradient.detach().clone()
        else:
            before.add_(gradient)


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Let ``.grad`` of a parameter be this tensor."""
    parameter.grad = gradient


def set_late_aside(bucket: LiveBucket) -> list[Tensor | None]:
    """Take what came after the bucket had left out of ``.grad``, by slot: it is free for the result then."""
    late = [slot.parameter.grad for slot in bucket.slots]
    for slot in bucket.slots:
        slot.parameter.grad = None
    return late


def move_out_of(flat: Tensor, values: Iterable[Tensor | None]) -> None:
    """Give those that lie in ``flat`` memory of their own, before something else is written there."""
    home = flat.untyped_storage().data_ptr()
    for value in values:
        if value is not None and value.untyped_storage().data_ptr() == home:
            value.data = value.clone()


def leave_memory(slots: Iterable[Slot], buffers: Iterable[Tensor]) -> None:
    """Give every .grad that lies in one of these buffers memory of its own."""
    homes = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for slot in slots:
        gradient = slot.parameter.grad
        if gradient is None or gradient.is_sparse or slot.is_dtensor:
            continue  # such a gradient never lies in a flat buffer
        if gradient.untyped_storage().data_ptr() in homes:
            gradient.data = gradient.clone()
