"""The low-precision parameters, as the wrapper sees them: lowered before a forward, full again after the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.engine.mixed_precision import MixedPrecisionParameters
from lockstep.engine.step import SyncStep


class LowPrecision:
    """``mixed_precision=``; where it was not given, there is nothing to do."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        self.config = config
        self._parameters = MixedPrecisionParameters(config, module) if config is not None else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self._parameters.reduce_dtype if self._parameters is not None else None

    def serve(self, step: SyncStep) -> None:
        """Restore the parameters before gradients are handed out, and when a pass has ended."""
        if self._parameters is not None:
            step.before_hand_out = step.after_pass = self._parameters.restore

    def begin_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Lower the parameters, and cast the inputs."""
        if self._parameters is None:
            return inputs, kwargs
        if self.config.param_dtype is not None:
            inputs, kwargs = torch_private.cast_forward_inputs(self.config.param_dtype, *inputs, **kwargs)
        self._parameters.lower()
        return inputs, kwargs

    def restore(self) -> None:
        """Put the full parameters back, if they are not there."""
        if self._parameters is not None:
            self._parameters.restore()
