"""Optimizer state by the older class's methods: under the parameters' names, whole or as shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from lockstep import torch_private
from lockstep.shard import older_state

State = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: State | None = None, group: Any = None
) -> State:
    """The state under names; whole or as shards, as ``state_dict_type`` of ``model`` says."""
    chosen = older_state.get_state_dict_type(model)
    config: Any = chosen.optim_state_dict_config
    is_full = chosen.state_dict_type is StateDictType.FULL_STATE_DICT
    return _named(
        model,
        optim,
        optim_state_dict,
        is_full=is_full,
        to_cpu=bool(getattr(config, "offload_to_cpu", False)),
        rank0_only=is_full and bool(getattr(config, "rank0_only", False)),
    )


def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
) -> State:
    """Whole tensors on the host, by default on rank 0 only."""
    return _named(model, optim, None, is_full=True, to_cpu=True, rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> State:
    """DTensors, as the parameters are."""
    return _named(model, optim, None, is_full=False, to_cpu=False, rank0_only=False)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> State:
    """What ``optim.load_state_dict`` takes, of a state under names whose tensors are whole or shards.

    Where ``state_dict_type`` says that rank 0 alone has it, the others are given it.
    """
    config: Any = older_state.get_state_dict_type(model).optim_state_dict_config
    if getattr(config, "rank0_only", False):
        told = [optim_state_dict]
        dist.broadcast_object_list(told, src=0)
        optim_state_dict = told[0]
    names = _names_by_position(model, optim)
    positions = {name: position for position, name in names.items()}
    unknown = sorted(set(optim_state_dict["state"]) - set(positions))
    if unknown:
        raise ValueError(f"The optimizer state has parameters that this optimizer does not: {', '.join(unknown[:5])}.")
    parameters = dict(model.named_parameters())
    state = {
        (name if is_named_optimizer else positions[name]): _cut(values, parameters[name])
        for name, values in optim_state_dict["state"].items()
    }
    groups = [
        {**saved, "params": [name if is_named_optimizer else positions[name] for name in saved["params"]]}
        for saved in optim_state_dict["param_groups"]
    ]
    made = {"state": state, "param_groups": groups}
    if load_directly:
        optim.load_state_dict(made)
    return made


def shard_full_optim_state_dict(
    full_optim_state_dict: State, model: nn.Module, optim_input: Any = None, optim: Any = None
) -> State:
    """As ``optim_state_dict_to_load``, by an older name."""
    if optim is None:
        raise ValueError("shard_full_optim_state_dict needs the optimizer: give it as optim.")
    return optim_state_dict_to_load(model, optim, full_optim_state_dict)


def _names_by_position(model: nn.Module, optim: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optim.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in names for parameter in parameters)
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's {len(parameters)} parameters are not the model's: it was built for "
            "another one, or before sharding."
        )
    return {position: names[id(parameter)] for position, parameter in enumerate(parameters)}


def _named(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: State | None,
    *,
    is_full: bool,
    to_cpu: bool,
    rank0_only: bool,
) -> State:
    names = _names_by_position(model, optim)
    own = optim.state_dict() if given is None else given

    def shown(value: Any) -> Any:
        if is_full and isinstance(value, DTensor):
            value = value.full_tensor()  # on every rank, since it is a collective
        elif is_full and isinstance(value, Tensor):
            value = value.clone()  # as that is a copy
        return value.cpu() if to_cpu and isinstance(value, Tensor) else value

    state = {names[key]: {what: shown(v) for what, v in values.items()} for key, values in own["state"].items()}
    if rank0_only and dist.get_rank() != 0:
        return {}
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in own["param_groups"]]
    return {"state": state, "param_groups": groups}


def _cut(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of one parameter, with whole tensors cut as it is."""
    made: dict[str, Any] = {}
    for what, value in values.items():
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
        if is_whole and isinstance(parameter, DTensor):
            part = older_state.part_of(value, parameter).to(torch_private.local_of(parameter).device)
            value = torch_private.dtensor_like(parameter, part)
        made[what] = value
    return made
