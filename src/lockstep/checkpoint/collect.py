"""Collecting: everything a training run consists of, as JSON and named tensors.

Shared state is the same on all ranks (model, optimizer, scheduler, scaler, data position, plan); a rank's own state is
not (random numbers, what a compression hook left out).  Names are the plain model's, whatever it is wrapped in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.checkpoint.hook_state import hook_state, keeps_own_buffers, steps_of, wrapper_of
from lockstep.checkpoint.optimizers import can_go_by_name, optimizer_state, parameter_names
from lockstep.checkpoint.pieces import Held, held
from lockstep.checkpoint.rng import rng_state
from lockstep.checkpoint.tree import TAG, encode
from lockstep.state_dict import own_state, unwrap

_COMPILED = "_orig_mod."


@dataclass
class Collected:
    """What one rank has to say: two trees, and the tensors that they name."""

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    replicated: dict[str, Held] = field(default_factory=dict)  # equal on all ranks; each rank writes a share
    of_rank_zero: dict[str, Held] = field(default_factory=dict)  # whatever rank 0 has counts
    sharded: dict[str, Held] = field(default_factory=dict)
    of_rank: dict[str, Held] = field(default_factory=dict)
    # Which copy of the model this rank belongs to, where each copy is itself spread over ranks.
    copy: int = 0
    # Tensors already seen, so that tied ones are written once; they are held so that no id is given twice.
    _seen: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = field(default_factory=dict)

    def take(self, place: str, tensor: torch.Tensor, into: dict[str, Held]) -> str:
        """Name a tensor and keep it to be written; one that was seen before has its name already."""
        found = held(tensor, place)
        if found.is_sharded and self.copy:
            found = replace(found, is_writer=False)
        local = found.local
        # A conjugate, or a negative, is the same memory read in another way.
        layout = (tuple(local.shape), local.stride(), local.dtype, local.device, local.is_conj(), local.is_neg())
        key = (local.data_ptr(), *layout, found.shape, into is self.of_rank)
        if local.numel() and key in self._seen:
            return self._seen[key][0]
        name, number = place, 1
        taken = (self.replicated, self.of_rank_zero, self.sharded, self.of_rank)
        while any(name in tensors for tensors in taken):
            number += 1
            name = f"{place}#{number}"
        (self.sharded if found.is_sharded else into)[name] = found
        self._seen[key] = (name, local)
        return name


def plain_keys(model: nn.Module) -> dict[str, Any]:
    """Return the state of the plain model, by names without any wrapper."""
    return {key.replace(_COMPILED, ""): value for key, value in own_state(model).items()}


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    scheduler: Any,
    scaler: Any,
    data: Any,
    extra: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
) -> Collected:
    """Collect the state of this rank; nothing is copied yet."""
    require_objects(model, optimizer, "state_dict", scheduler=scheduler, scaler=scaler, data=data)
    _require_whole_step(model)
    result = Collected(copy=_copy_of(model))

    def replicated(place: str, tensor: torch.Tensor) -> str:
        return result.take(place, tensor, result.replicated)

    def of_rank_zero(place: str, tensor: torch.Tensor) -> str:
        return result.take(place, tensor, result.of_rank_zero)

    def of_rank(place: str, tensor: torch.Tensor) -> str:
        return result.take(place, tensor, result.of_rank)

    parameters = set(parameter_names(model).values())
    if TAG in plain_keys(model):
        raise ValueError(f"the model has a parameter or buffer whose whole name is {TAG!r}, which cannot be stored")
    result.shared["model"] = {
        # Buffers may differ between ranks within a step; those of rank 0 are the ones that count, as in training.
        key: encode(value, f"model/{key}", replicated if key in parameters else of_rank_zero)
        for key, value in _tied_parameters_first(plain_keys(model), parameters)
    }
    if optimizer is not None:
        result.shared["optimizer"] = encode(optimizer_state(model, optimizer), "optimizer", replicated)
    for name, part in (("scheduler", scheduler), ("scaler", scaler), ("data", data)):
        if part is not None:
            result.shared[name] = encode(part.state_dict(), name, of_rank_zero)
    for name, given in (("extra", extra), ("per_rank", per_rank)):
        require_mapping(name, given)
    result.shared["extra"] = {
        key: encode(optimizer_state(model, value), f"extra/{key}", replicated)
        if can_go_by_name(model, value)
        else encode(state_of_object(value), f"extra/{key}", of_rank_zero)
        for key, value in (extra or {}).items()
    }
    plan = getattr(wrapper_of(model), "plan", None)
    result.shared["plan"] = None if plan is None else plan.to_json()

    result.own["rng"] = encode(rng_state(), "rng", of_rank)
    hook = hook_state(model)
    if hook is not None:
        result.own["hook"] = encode(hook, "hook", of_rank)
    own_buffers = _own_buffers(model)
    if own_buffers:
        result.own["buffers"] = encode(own_buffers, "buffers", of_rank)
    result.own["per_rank"] = {
        key: encode(state_of_object(value), f"per_rank/{key}", of_rank) for key, value in (per_rank or {}).items()
    }
    return result


def _tied_parameters_first(state: dict[str, Any], parameters: set[str]) -> list[tuple[str, Any]]:
    """Put what a parameter's name stands for before its other names, which then refer to it."""
    return sorted(state.items(), key=lambda item: item[0] not in parameters)


def _own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that data parallelism leaves to each rank, which differ between ranks for good."""
    if not keeps_own_buffers(model):
        return {}
    kept = plain_keys(model)
    named = ((key.replace(_COMPILED, ""), buffer) for key, buffer in unwrap(model).named_buffers())
    return {key: buffer for key, buffer in named if key in kept and torch_private.shard_of(buffer) is None}


def _copy_of(model: nn.Module) -> int:
    """Tell which copy of the model this is; shards are written by the ranks of the first."""
    group: Any = getattr(wrapper_of(model), "process_group", None)
    return 0 if group is None else int(group.rank())


def _require_whole_step(model: nn.Module) -> None:
    if any(step.holds_local_gradients for step in steps_of(model)):
        raise ValueError(
            "the model holds gradients of no_sync() that were not reduced yet, and gradients are not part of a "
            "checkpoint: save after optimizer.step(), not between the passes of an accumulation"
        )


def state_of_object(value: Any) -> Any:
    """Return the state of a user's object: a generator's, what ``state_dict()`` says, or the value itself."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def require_objects(model: Any, optimizer: Any, method: str, **others: Any) -> None:
    """Raise TypeError for an object that cannot be what it was given as; all of ``others`` need ``method``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give the module, wrapped or not")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give one optimizer, and others by name, as in "
            'extra={"second": optimizer}'
        )
    for name, part in others.items():
        if part is not None and not callable(getattr(part, method, None)):
            raise TypeError(f"{name} is a {type(part).__name__}, which has no {method}(); plain values go to extra=")


def require_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a folder; an empty text, of a variable that was not set, say, is none."""
    if not os.fspath(path):
        raise ValueError("path is empty; give the folder of the checkpoints ('.' is the working directory)")
    return Path(path).absolute()


def require_mapping(name: str, given: Any) -> None:
    """Raise unless ``extra=`` or ``per_rank=`` is a dict with strings as keys."""
    fix = f'give a dict of names, as in {name}={{"loader": loader}}'
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} is {given!r:.200}, of type {type(given).__name__}; {fix}")
    if TAG in (given or {}):
        raise ValueError(f"{name} has the key {TAG!r}, which cannot be stored; {fix}")
    wrong = [key for key in given or () if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{name} has the key {wrong[0]!r:.200}, of type {type(wrong[0]).__name__}; {fix}")
