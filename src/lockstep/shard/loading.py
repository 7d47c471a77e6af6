"""State dicts that are loaded into a sharded model: into its shards, whatever is gathered, and of whole tensors too.

``set_model_state_dict`` cuts whole tensors where it finds shards, and a model that is gathered has none.  So each
module takes its part of what is whole itself, without asking another rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.unit import Unit


def take_part_in_loading(module: nn.Module, unit: Unit) -> None:
    """Let the modules of a unit load shards from now on; ``module`` is the one that was sharded."""
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)
    inside = set(module.modules())
    for parameter in unit.parameters:
        for reference, name in parameter.owners:
            owner = reference()
            if owner is not None and owner in inside:
                owner.register_load_state_dict_pre_hook(partial(_cut_whole, weakref.ref(parameter), name))


def _before_load(module: Any, *_: Any) -> None:
    module._lockstep_unit.reshard()


def _cut_whole(
    reference: weakref.ref[ShardedParameter], name: str, _: Any, state_dict: dict[str, Any], prefix: str, *__: Any
) -> None:
    """Put this rank's part in the place of a whole tensor; the dict is one that ``load_state_dict`` has made."""
    parameter = reference()
    shard = None if parameter is None else parameter.shard_of(state_dict.get(prefix + name))
    if shard is not None:
        state_dict[prefix + name] = shard


def _after_load(module: Any, _: Any) -> None:
    follow([module._lockstep_unit])


def follow(units: Sequence[Unit]) -> None:
    """Take up what was done to the shards."""
    changed = [unit.follow_modules() for unit in units]
    if any(changed) and units[0].root is not None:
        units[0].root.plan_anew()
