"""What torch and libraries ask a sharded module's state for, by torch's private names: views, which decide nothing.

torch's pipelines reduce by them what micro-batches have added up, and programs look here for meshes and shards.  They
have slots, so that whoever looks at all that a module holds (program/world.py) does not come to the unit by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.shard.moments import after_forward, before_forward
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.root import Root, root_of
from lockstep.shard.unit import Unit


@dataclass(frozen=True, slots=True)
class State:
    """``FSDPState`` of a unit."""

    unit: Unit

    @property
    def _is_root(self) -> bool | None:
        """None until it is known."""
        return None if self.unit.root is None else self.unit.parent is None

    @property
    def _state_ctx(self) -> Context:
        return Context(root_of(self.unit))

    @property
    def _fsdp_param_groups(self) -> list[Group]:
        return [Group(self.unit)] if self.unit.parameters else []

    @property
    def _fsdp_param_group(self) -> Group | None:
        return Group(self.unit) if self.unit.parameters else None

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return _modules_of(self.unit)

    @property
    def _device(self) -> Any:
        return self.unit.device

    @property
    def _mp_policy(self) -> Any:
        return self.unit.policy

    def _lazy_init(self) -> None:
        root_of(self.unit)

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return before_forward(self.unit, module, args, kwargs)

    def _post_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return after_forward(self.unit, module, output)

    def _root_post_backward_final_callback(self) -> None:
        root_of(self.unit).reduce_accumulated()


@dataclass(frozen=True, slots=True)
class Context:
    """``FSDPStateContext`` of a model."""

    root: Root

    @property
    def all_states(self) -> list[State]:
        return [State(unit) for unit in self.root.units]


@dataclass(frozen=True, slots=True)
class Group:
    """``FSDPParamGroup``: the parameters of a unit."""

    unit: Unit

    @property
    def fsdp_params(self) -> list[Parameter]:
        return [Parameter(parameter) for parameter in self.unit.parameters]

    @property
    def mesh_info(self) -> MeshInfo:
        return MeshInfo(self.unit.mesh)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return _modules_of(self.unit)

    @property
    def device(self) -> Any:
        return self.unit.device

    @property
    def mp_policy(self) -> Any:
        return self.unit.policy

    @property
    def _module_fqn(self) -> str:
        """Where its modules are in the model."""
        tops = _modules_of(self.unit.top())
        names = [name for top in tops for name, module in top.named_modules() if module in self.unit.modules]
        return ", ".join(names)

    @property
    def is_unsharded(self) -> bool:
        return self.unit.is_full

    @property
    def is_sharded(self) -> bool:
        return not self.unit.is_full

    def unshard(self, async_op: bool = False) -> None:
        root_of(self.unit)
        self.unit.refresh()
        self.unit.start_gather()

    def wait_for_unshard(self) -> None:
        self.unit.wait()

    def reshard(self) -> None:
        self.unit.reshard()

    def post_backward(self, *unused: Any) -> None:
        """All units of the model leave together here."""
        root_of(self.unit).reduce_accumulated()


@dataclass(frozen=True, slots=True)
class Parameter:
    """``FSDPParam``."""

    parameter: ShardedParameter

    @property
    def _param_fqn(self) -> str:
        return self.parameter.name

    @property
    def sharded_param(self) -> nn.Parameter:
        return self.parameter.sharded

    @property
    def _sharded_param_data(self) -> Tensor:
        return self.parameter.local.view(-1)

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The whole, which has memory while it is gathered."""
        return self.parameter.full

    _unsharded_param = unsharded_param

    @property
    def mesh_info(self) -> MeshInfo:
        return MeshInfo(self.parameter.mesh)


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """``FSDPMeshInfo``, or ``HSDPMeshInfo`` where shards are replicated."""

    of: Any

    @property
    def mesh(self) -> Any:
        return self.of.mesh

    @property
    def shard_mesh_dim(self) -> int | None:
        return self.of.shard_axis  # type: ignore[no-any-return]

    @property
    def shard_process_group(self) -> Any:
        return self.of.shard_group

    @property
    def shard_mesh_size(self) -> int:
        return self.of.world  # type: ignore[no-any-return]

    @property
    def shard_mesh_rank(self) -> int:
        return self.of.rank  # type: ignore[no-any-return]

    @property
    def replicate_mesh_dim(self) -> int | None:
        return self.of.replicate_axis  # type: ignore[no-any-return]

    @property
    def replicate_process_group(self) -> Any:
        return self.of.replicate_group

    @property
    def replicate_mesh_size(self) -> int:
        return self.of.num_replicas  # type: ignore[no-any-return]


def _modules_of(unit: Unit) -> tuple[nn.Module, ...]:
    return tuple(module for reference in unit.module_references if (module := reference()) is not None)
