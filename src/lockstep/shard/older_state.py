"""What a state dict of the older class holds: whole tensors, or shards; chosen for a module by ``state_dict_type``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from lockstep import torch_private

_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_settings: weakref.WeakKeyDictionary[nn.Module, StateDictSettings] = weakref.WeakKeyDictionary()


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What ``state_dict()`` of this module gives."""
    found = _settings.get(module)
    return found or StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> StateDictSettings:
    """Choose; returns what was chosen before."""
    if state_dict_type not in _CONFIGS:
        raise NotImplementedError(
            f"{state_dict_type} has no meaning here, since shards are no flat parameters; take SHARDED_STATE_DICT."
        )
    kind, optim_kind = _CONFIGS[state_dict_type]
    before = get_state_dict_type(module)
    chosen = StateDictSettings(state_dict_type, state_dict_config or kind(), optim_state_dict_config or optim_kind())
    for one in _all_of(module):
        _settings[one] = chosen
    return before


def _all_of(module: nn.Module) -> list[nn.Module]:
    """A module and what is inside it: it may be one around those of the class."""
    return list(dict.fromkeys([module, *module.modules()]))


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Choose within this context."""
    before = {one: _settings.get(one) for one in _all_of(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for one, settings in before.items():
            if settings is None:
                _settings.pop(one, None)
            else:
                _settings[one] = settings


def as_chosen(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict of shards as the settings of ``module`` want it."""
    chosen = get_state_dict_type(module)
    config: Any = chosen.state_dict_config
    is_full = chosen.state_dict_type is StateDictType.FULL_STATE_DICT
    made: dict[str, Any] = {}
    for name, value in state.items():
        if is_full and isinstance(value, DTensor):
            value = value.full_tensor()  # on every rank, since it is a collective
        if isinstance(value, Tensor) and config.offload_to_cpu:
            value = value.cpu()
        made[name] = value
    return {} if is_full and config.rank0_only and dist.get_rank() != 0 else made


def cut_to_shards(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose whole tensors are cut as the parameters are."""
    shards = {name: value for name, value in module.state_dict().items() if isinstance(value, DTensor)}
    cut: dict[str, Any] = {}
    for name, value in state.items():
        target = shards.get(name)
        if target is not None and isinstance(value, Tensor) and not isinstance(value, DTensor):
            local = torch_private.local_of(target)
            with torch.no_grad():
                value = torch_private.dtensor_around(part_of(value, target).to(local), torch_private.spec_of(target))
        cut[name] = value
    return cut


def part_of(whole: Tensor, like: Any) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor."""
    part = whole
    for axis, placement in enumerate(like.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        size, rank = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
        chunks = part.chunk(size, dim)
        part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
    return part.contiguous()
