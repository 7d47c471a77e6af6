"""Shards that the program has replaced: another shard in its place is taken up, anything else is an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor

from lockstep.shard.parameter import ShardedParameter


class Registered:
    """Where modules have the parameters of a model, looked at before every forward."""

    def __init__(self, parameters: Iterable[ShardedParameter]) -> None:
        self._places = [(places, name, parameter) for parameter in parameters for places, name in parameter.places]

    def follow(self) -> bool:
        """Take up shards in the place of ours; returns whether there are any, and raises for anything else."""
        changed = False
        for places, name, parameter in self._places:
            found = places.get(name)
            if found is parameter.sharded or found is parameter.full:
                continue
            if not _is_like(found, parameter.sharded) or not parameter.follow_module():
                raise _replaced(parameter, found)
            changed = True
        return changed


def _is_like(found: Any, shard: Any) -> bool:
    """Whether what is registered in the place of a shard is cut as that one is."""
    return (
        isinstance(found, DTensor)
        and (found.shape, found.dtype, found.placements) == (shard.shape, shard.dtype, shard.placements)
        and found.device_mesh == shard.device_mesh
    )


def _replaced(parameter: ShardedParameter, by: Any) -> RuntimeError:
    found = "is no longer there" if by is None else f"was replaced by a {type(by).__name__} that is not cut as it was"
    return RuntimeError(
        f"Parameter '{parameter.name}' of a sharded model {found}, so it would not be what trains. Fix: write into it "
        "(`with torch.no_grad(): weight.copy_(...)`, or load_state_dict), or change the module before fully_shard."
    )
