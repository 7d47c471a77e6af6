"""What the engine needs of whoever owns the memory of gradients; what each method is for is said in ``grad_memory.py``.

GradMemory    of a replicated model: ``.grad`` and flat buffers (``grad_memory.py``)
ShardMemory   of a sharded one: whole gradients, and ``.grad`` of the shards (``shard/memory.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from lockstep.engine.bucket import LiveBucket, Slot

NOTHING: Mapping[Slot, Tensor] = {}


class GradOwnership(Enum):
    """See grad_memory.py, [Note: who owns .grad]."""

    ALIAS = "alias"
    PERSISTENT = "persistent"
    OWN = "own"


class Memory(Protocol):
    """Moves gradients into the flat buffers of a model, and what comes back out of them."""

    ownership: GradOwnership
    reduce_dtype: torch.dtype | None
    is_shared: bool

    def serve_hook(self, device: torch.device) -> None: ...

    def travel_dtype(self, bucket: LiveBucket) -> torch.dtype: ...

    def zeros(self, bucket: LiveBucket, dtype: torch.dtype) -> Tensor: ...

    # ---------------------------------------------------------------- into the buffer

    def stage(self, slot: Slot, gradient: Tensor | None, scale: float) -> None: ...

    def put(self, slot: Slot, gradient: Tensor, scale: float) -> None: ...

    def fold(self, slot: Slot, scale: float) -> None: ...

    def absorb(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor], scale: float) -> None: ...

    def can_fold(self, slots: Sequence[Slot]) -> bool: ...

    def pack(self, bucket: LiveBucket, gradients: Sequence[Tensor | None], scale: float, *, takes: bool) -> Tensor: ...

    def take_packed(self, bucket: LiveBucket, flat: Tensor) -> None: ...

    # ---------------------------------------------------------------- out of the buffer

    def hand_out(
        self,
        bucket: LiveBucket,
        is_used: Callable[[Slot], bool] | None = None,
        *,
        in_place: bool = False,
        into: Mapping[Slot, Tensor] = ...,
    ) -> None: ...

    def add(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None = None) -> None: ...

    def give_back(self, bucket: LiveBucket, scale: float) -> None: ...
