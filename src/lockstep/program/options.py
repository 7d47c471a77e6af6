"""What a train step is given: checked once, with the value that was given and the fix in every message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Loss = Callable[[Any, Any], Any]


class Mode(Enum):
    """How a step is run."""

    AUTO = "auto"
    LOOP = "loop"
    COMPILED = "compiled"
    GRAPH = "graph"
    CAPTURED = "captured"


@dataclass(frozen=True)
class Options:
    """The checked arguments of a :class:`lockstep.TrainStep`."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    loss: Loss
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    scaler: Any
    schedulers: tuple[Any, ...]
    average: Any
    mode: Mode
    max_programs: int
    update_by_bucket: bool

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler is at work."""
        return self.scaler is not None and self.scaler.is_enabled()

    def parameters(self) -> list[Tensor]:
        """Everything with a gradient: the model's parameters, then what only an optimizer has."""
        found = {id(p): p for p in self.model.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update({id(p): p for p in group["params"] if id(p) not in found})
        return list(found.values())


def check_options(
    model: Any,
    optimizer: Any,
    loss: Any,
    *,
    clip_norm: Any,
    clip_value: Any,
    accumulate: Any,
    scaler: Any,
    scheduler: Any,
    average: Any,
    mode: Any,
    max_programs: Any,
    update_by_bucket: Any,
) -> Options:
    """Make the options of what a user gave, or say what is wrong with it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not callable(loss):
        raise TypeError(f"loss must be a function of the model and a batch, got {type(loss).__name__}.")
    modes = [m.value for m in Mode]
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, got {mode!r}.")
    if clip_norm is not None and clip_value is not None:
        raise ValueError("clip_norm and clip_value were both given; clip by one of them.")
    optimizers = _optimizers(model, optimizer)
    return Options(
        model=model,
        optimizers=optimizers,
        loss=loss,
        clip_norm=_positive("clip_norm", clip_norm),
        clip_value=_positive("clip_value", clip_value),
        accumulate=_count("accumulate", accumulate),
        scaler=_scaler(scaler),
        schedulers=_schedulers(scheduler, optimizers),
        average=_average(average),
        mode=Mode(mode),
        max_programs=_count("max_programs", max_programs),
        update_by_bucket=_flag("update_by_bucket", update_by_bucket),
    )


def _positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number above 0 or None, got {value!r}.")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


def _several(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) else [value]


def _optimizers(model: nn.Module, given: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = _several(given)
    if not optimizers:
        raise ValueError("optimizer is an empty list; at least one optimizer is needed.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(optimizer)}.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS runs the model again inside its step, by a closure; write that loop by hand.")
    names = {id(p): name for name, p in model.named_parameters()}
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        members = [p for group in optimizer.param_groups for p in group["params"]]
        if members and not any(id(p) in names for p in members):
            raise ValueError(
                f"None of the {len(members)} parameters of {type(optimizer).__name__} is a parameter of the model. Was "
                "the optimizer made before the model was sharded or moved? Make it from model.parameters() afterwards."
            )
        for parameter in members:
            if owner.setdefault(id(parameter), index) != index:
                name = names.get(id(parameter), "one that is not the model's")
                raise ValueError(f"The parameter {name} belongs to two optimizers; give it to one of them.")
    return tuple(optimizers)


def _scaler(scaler: Any) -> Any:
    needed = ("scale", "unscale_", "step", "update", "is_enabled")
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in needed):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}.")
    return scaler


def _schedulers(given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...]:
    if given is None:
        return ()
    schedulers = _several(given)
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a number of yours; call its step() yourself, after an epoch. The rate that it "
                "sets is used from the next step on, in every mode."
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be a torch.optim.lr_scheduler or a list of them, got {type(scheduler)}.")
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ValueError(f"{type(scheduler).__name__} belongs to an optimizer that is not one of this step's.")
    return tuple(schedulers)


def _average(average: Any) -> Any:
    if average is None or callable(getattr(average, "update_parameters", None)):
        return average
    if isinstance(average, bool) or not isinstance(average, (int, float)) or not 0 < average < 1:
        raise ValueError(
            "average must be the decay of an exponential average, between 0 and 1, or a "
            f"torch.optim.swa_utils.AveragedModel, got {average!r}."
        )
    return float(average)
