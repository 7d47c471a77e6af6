"""The bucket as a communication hook sees it: the interface of ``torch.distributed.GradBucket``.

torch's class cannot be constructed from Python, so this one has the same methods; hooks only call methods.
"""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.engine.bucket import LiveBucket
from lockstep.errors import BadHookResult


class GradBucket:
    """A view on one launched bucket.  Gradients are parts of the buffer, so in-place changes show in both."""

    def __init__(self, bucket: LiveBucket, buffer: Tensor, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._is_last = is_last

    def index(self) -> int:
        """Place in the launch order, the same on all ranks."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The flat buffer (a sparse tensor for a sparse gradient)."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer that this hook, and hooks wrapped around it, see from now on."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """One tensor per parameter, in the order of ``parameters``."""
        buffer, num_elements = self._buffer, self._bucket.spec.num_elements
        if buffer.is_sparse:
            return [buffer]
        if tuple(buffer.shape) != (num_elements,) or not buffer.is_contiguous():
            raise BadHookResult(
                f"The buffer that was set on bucket {self.index()} has shape {tuple(buffer.shape)} and strides "
                f"{buffer.stride()}; gradients() needs {num_elements} elements in a row, as in the buffer it was given."
            )
        return self._bucket.views(buffer)

    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether this is the last bucket of the pass to be launched."""
        return self._is_last

    def __repr__(self) -> str:
        return f"GradBucket(index={self.index()}, parameters={list(self._bucket.spec.names)})"
