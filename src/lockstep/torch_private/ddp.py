"""What torch's DistributedDataParallel is made of and hands to its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

# torch's own class, whatever stands in its place: dynamo asks it which wrapper is running.  So this part must be loaded
# before ``install()`` puts something there; it sees to that.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel

# The location enum and the precision dataclass are what users pass in; they must be torch's own objects.
BufferCommHookLocation = _BufferCommHookLocation
MixedPrecision = _MixedPrecision

# Public in use, but not exported as far as type checkers see: the bucket class hooks are annotated with, and the
# built-in hooks' names.
GradBucket: Any = dist.GradBucket  # type: ignore[attr-defined]
BuiltinCommHookType: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]

# Moves nested inputs to the device on a side stream, with RRefs and dataclasses, exactly as DDP users know it.
inputs_to_device: Callable[..., Any] = _to_kwargs
# And gives their floating point tensors another dtype, by the same walk.
cast_forward_inputs: Callable[..., Any] = _cast_forward_inputs


class WatchedJoin(Join):
    """torch's context for uneven inputs; a rank without data waits for the others by ``wait_for``.

    torch waits for this collective by itself, where a peer that is gone or stopped cannot be seen.
    """

    wait_for: Callable[[Any], None]

    def _get_num_nonjoined_procs(self) -> Any:
        number = torch.zeros(1, device=self._device)
        self.wait_for(dist.all_reduce(number, group=self._process_group, async_op=True))
        return number.item()


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """The fused-optimizer wrapper behind ``_register_fused_optim``."""
    from torch.distributed.algorithms._optimizer_overlap import (  # type: ignore[attr-defined]
        _as_overlapped_optim,
    )

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)


def in_backward_optimizer_handles(parameter: torch.Tensor) -> list[Any]:
    """Hook handles that ``_apply_optimizer_in_backward`` left on a parameter; DDP has to take them over."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return list(param_to_optim_hook_handle_map.get(parameter, []))
