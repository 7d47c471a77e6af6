"""Weight averaging: an exponential average of the parameters, updated after every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.bucket import local_tensor
from lockstep.state_dict import plain_key


class WeightAverage:
    """``average = decay * average + (1 - decay) * parameter``, begun with the parameters as they are.

    Everything it does is on the device and the same in each step, so that it can be a part of a program.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
        self._parameters = list(model.parameters())
        names = {id(p): plain_key(name) for name, p in model.named_parameters()}
        self._names = [names[id(p)] for p in self._parameters]
        self.values: list[Tensor] = [p.detach().clone() for p in self._parameters]

    def update(self) -> None:
        """Take the parameters in as they are now."""
        with torch.no_grad():
            # Of a sharded model each rank averages what it holds.
            mine, now = ([local_tensor(t.detach()) for t in part] for part in (self.values, self._parameters))
            torch_private.foreach_lerp(mine, now, 1.0 - self.decay)

    def named(self) -> dict[str, Tensor]:
        """The averages alone, by name."""
        return dict(zip(self._names, self.values, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the plain model's names, with its buffers as they are: ``load_state_dict`` takes it."""
        averages = self.named()
        found: dict[str, Tensor] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            name = plain_key(key)
            found[name] = averages[name].clone() if name in averages else self._shared(value, averages)
        return found

    def _shared(self, value: Any, averages: Mapping[str, Tensor]) -> Any:
        """What a key stands for that is no parameter's first name: a second name of one (tied), or a buffer."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if value is parameter:
                return averages[name].clone()
        return value.detach().clone() if isinstance(value, Tensor) else value

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take averages back that ``state_dict`` gave."""
        missing = [name for name in self._names if name not in values]
        if missing:
            raise KeyError(f"The averages of {', '.join(missing[:5])} are not there ({len(missing)} in all).")
        with torch.no_grad():
            for name, value in zip(self._names, self.values, strict=True):
                value.copy_(values[name])
