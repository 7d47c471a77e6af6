"""Native mixed precision: parameters in a low dtype from the forward to the end of the backward, full outside.

``parameter.data`` is swapped before the forward and swapped back when the backward ends, so that optimizers and
checkpoints only ever see full precision.  Gradients are produced in the low dtype, reduced in ``reduce_dtype`` and
handed out in full precision; gradients added up in ``no_sync()`` are added up in full precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.engine.grads import set_gradient


class MixedPrecisionParameters:
    """The two versions of each parameter, and which one the module holds now."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        self.config = config
        self._parameters = [
            p for p in module.parameters() if p.is_floating_point() and not getattr(p, "_ddp_ignored", False)
        ]
        self._is_low = False
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = torch.empty(  # type: ignore[attr-defined]
                0, dtype=config.param_dtype or parameter.dtype, device=parameter.device
            )
        cast_buffers(module.buffers(), config.buffer_dtype)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.config.reduce_dtype or self.config.param_dtype

    def lower(self) -> None:
        """Before a forward: swap in copies of the parameters in ``param_dtype``."""
        if self.config.param_dtype is None:
            return
        self.restore()  # a forward without a backward (evaluation) left the copies in place
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter.data = parameter.data.to(self.config.param_dtype)
        self._is_low = True

    def restore(self) -> None:
        """After a backward: swap the full parameters back in."""
        if not self._is_low:
            return
        self._is_low = False
        for parameter in self._parameters:
            full = parameter._fp_param  # type: ignore[attr-defined]
            parameter.data = full
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != full.dtype:
                set_gradient(parameter, None)
                set_gradient(parameter, gradient.to(full.dtype))


def cast_buffers(buffers: Iterable[torch.Tensor], dtype: torch.dtype | None) -> None:
    for buffer in buffers:
        if dtype is not None and buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
            buffer.data = buffer.data.to(dtype)
