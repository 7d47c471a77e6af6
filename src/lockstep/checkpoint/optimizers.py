"""The state of an optimizer by the names of the model's parameters, in place of its positions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.agree.drift import SETTINGS
from lockstep.checkpoint.pieces import held
from lockstep.checkpoint.reading import Reader, Region
from lockstep.checkpoint.tensorfile import DTYPES
from lockstep.checkpoint.tree import decode, tensor_names
from lockstep.checkpoint.undo import Undo
from lockstep.state_dict import unwrap

_COMPILED = "_orig_mod."


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its plain name."""
    return {id(p): name.replace(_COMPILED, "") for name, p in unwrap(model).named_parameters()}


def is_of(model: nn.Module | None, value: Any) -> bool:
    """Whether a value is an optimizer whose parameters are all the model's."""
    if model is None or not isinstance(value, torch.optim.Optimizer):
        return False
    names = parameter_names(model)
    return all(id(p) in names for group in value.param_groups for p in group["params"])


def can_go_by_name(model: nn.Module, value: Any) -> bool:
    """Whether all that an optimizer knows belongs to parameters of the model."""
    if not is_of(model, value):
        return False
    state = value.state_dict()
    kept = state["state"]
    return set(state) == {"state", "param_groups"} and all(type(k) is int and type(v) is dict for k, v in kept.items())


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by parameter name."""
    names = parameter_names(model)
    groups, order = [], []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise ValueError(
                f"the optimizer has {len(unknown)} parameter(s) that the model does not have (shapes {unknown[:5]}); "
                "give the module that holds them all as the model"
            )
        order += [names[id(p)] for p in group["params"]]
    state = optimizer.state_dict()
    odd = sorted(set(state) - {"state", "param_groups"})
    odd += [f"state[{key!r}]" for key in state["state"] if type(key) is not int]
    if odd:
        raise ValueError(
            f"the optimizer keeps what belongs to no parameter ({', '.join(odd[:5])}); give it as extra=, which keeps "
            "all of its state"
        )
    for group in state["param_groups"]:
        groups.append({**group, "params": [order[index] for index in group["params"]]})
    return {"state": {order[index]: values for index, values in state["state"].items()}, "param_groups": groups}


def goes_by_name(tree: Any) -> bool:
    """Whether a saved tree is the state of an optimizer by parameter name."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("state"), dict):
        return False
    groups = tree.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return False
    names = [name for group in groups for name in group["params"]]
    return bool(names) and all(isinstance(name, str) for name in names)


class SavedOptimizer:
    """An optimizer of the model, and the saved state that goes into it; ``what`` names it in messages."""

    def __init__(
        self, what: str, saved: dict[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module, reader: Reader
    ) -> None:
        self._what, self._saved, self._optimizer, self._reader = what, saved, optimizer, reader
        names = parameter_names(model)
        self._groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters: dict[str, torch.Tensor] = dict(
            zip([name for group in self._groups for name in group], parameters, strict=True)
        )

    def check(self) -> list[str]:
        """Say what does not fit."""
        saved = self._saved["param_groups"]
        if len(saved) != len(self._groups):
            return [f"{self._what} has {len(self._groups)} groups of parameters, and the saved one {len(saved)}"]
        problems = []
        current = self._optimizer.param_groups
        for number, (theirs, ours) in enumerate(zip(saved, self._groups, strict=True)):
            if set(theirs["params"]) != set(ours):
                odd = sorted(set(theirs["params"]) ^ set(ours))
                problems.append(f"group {number} of {self._what} differs in {', '.join(odd[:5])}")
            problems += _other_kind(number, theirs.keys(), current[number].keys())
        kept = self._saved["state"]
        problems += [
            f"what {self._what} has for {name} is no state there"
            for name in self._parameters
            if name in kept and not isinstance(kept[name], dict)
        ]
        return problems

    def regions(self) -> dict[str, Region]:
        """Find the part that this rank needs of each tensor that is sharded like its parameter."""
        found: dict[str, Region] = {}
        entries = self._reader.manifest.tensors
        for name, parameter in self._parameters.items():
            if torch_private.shard_of(parameter) is None:
                continue
            part = held(parameter, name)
            for value in tensor_names(self._saved["state"].get(name, {})):
                if entries[value].shape == tuple(parameter.shape):
                    found[value] = Region(part.offsets, tuple(part.local.shape))
        return found

    def restore(self, undo: Undo) -> None:
        """Put the state into the optimizer; ``undo`` is told what it was."""
        position = {name: number for number, name in enumerate(self._parameters)}
        state = {
            position[name]: decode(values, partial(self._state_like, self._parameters[name]))
            for name, values in self._saved["state"].items()
            if name in position
        }
        groups = []
        for group, ours in zip(self._saved["param_groups"], self._groups, strict=True):
            # Names that torch keeps with a group are this model's, which may be wrapped differently.
            options = {
                key: decode(value, self._reader.tensor)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            groups.append({**options, "params": [position[name] for name in ours]})
        for group, current in zip(groups, self._optimizer.param_groups, strict=True):
            if "param_names" in current:
                group["param_names"] = current["param_names"]
        undo.keep(self._what, self._optimizer)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _state_like(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Read a tensor of optimizer state; sharded like its parameter if it has the parameter's shape."""
        part = held(parameter, name)
        if not part.is_sharded or self._reader.manifest.tensors[name].shape != part.shape:
            return self._reader.tensor(name)
        dtype = DTYPES[self._reader.manifest.tensors[name].dtype]
        local = torch.empty(part.local.shape, dtype=dtype, device=part.local.device)
        self._reader.fill(local, name, part.offsets)
        return torch_private.dtensor_like(parameter, local)


def _other_kind(number: int, saved: Set[str], current: Set[str]) -> list[str]:
    """Say so if a group has the settings of an optimizer of another kind: they would be put in the place of its own.

    One side alone may have more: a newer torch, or a scheduler, adds settings.
    """
    gone, new = (
        [name for name in SETTINGS if name in a and name not in b] for a, b in ((saved, current), (current, saved))
    )
    if not gone or not new:
        return []
    return [
        f"group {number} was saved by an optimizer of another kind: it has {', '.join(gone)}, and this one has "
        f"{', '.join(new)}"
    ]
