"""The ranks that a unit is sharded over, and its copies are kept on: facts of a DeviceMesh, and the links along it.

[Note: two groups for one set of ranks]  Gradients are scattered on a process group of their own.  Collectives of one
group are paired by the order in which ranks issue them; when the backward gathers a unit and when it scatters another
depends on what a rank's backward reached first (a parameter may be unused there).  On two groups, each has its own
order, and both are the same on every rank.  A communication hook of the program's chooses its group itself, mostly the
one that gathers are on; so with a hook, gathers move to a group that nobody else has.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep import torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.transport import Transport


@dataclass(frozen=True, eq=False)
class ShardMesh:
    """At most one dimension of a mesh to shard over, and at most one over which shards are replicated."""

    mesh: DeviceMesh  # of data parallelism
    shard_axis: int | None = 0
    replicate_axis: int | None = None
    spmd: DeviceMesh | None = None  # where parameters are DTensors on a larger mesh of which this is a part
    shard_dims: tuple[int, ...] = ()  # which dimensions of that one are sharded over
    replicate_dims: tuple[int, ...] = ()

    @cached_property
    def shard_group(self) -> Any:
        """The ranks that have one shard each; some group to stand in where nothing is sharded."""
        return self.mesh.get_group(self.replicate_axis if self.shard_axis is None else self.shard_axis)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that have one shard each."""
        names = self.mesh.mesh_dim_names
        if self.mesh.ndim == 1 or self.shard_axis is None or names is None:
            return self.mesh
        return self.mesh[names[self.shard_axis]]

    @cached_property
    def world(self) -> int:
        """How many shards there are."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to gather from: copies do then (a benchmark sees to it that they do not)."""
        return self.world == 1

    @cached_property
    def rank(self) -> int:
        return 0 if self.shard_axis is None else int(self.shard_group.rank())

    @cached_property
    def replicate_group(self) -> Any:
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @cached_property
    def num_replicas(self) -> int:
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that have a part of what is on this mesh, by their number in the world."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def shard_ranks(self) -> str:
        """Names the ranks that have one shard each, by their numbers in the world."""
        return " ".join(map(str, dist.get_process_group_ranks(self.shard_group)))

    @property
    def device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    @property
    def key(self) -> str:
        """Names the mesh, the same on all of its ranks."""
        return f"{self.mesh.device_type} {self.num_replicas} x {self.world}"


def take_mesh(mesh: DeviceMesh | None, dims: Any = None) -> ShardMesh:
    """The mesh given, or all ranks, which meet now if they have not."""
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        mesh = init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))
    if dims is not None:
        return _part_of(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    return ShardMesh(mesh) if mesh.ndim == 1 else ShardMesh(mesh, 1, 0)


def _part_of(mesh: DeviceMesh, dims: Any) -> ShardMesh:
    """The dimensions of a larger mesh that are for data parallelism."""
    shard, replicate = _names(dims.shard), _names(dims.replicate)
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*shard, *replicate):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    if len(shard) > 1 or len(replicate) > 1:
        raise NotImplementedError(
            "dp_mesh_dims with several dimensions to shard or to replicate over: flatten them into one dimension of "
            "the mesh first."
        )
    part = mesh[(*replicate, *shard)] if replicate and shard else mesh[(*replicate, *shard)[0]]
    shard_axis = None if not shard else len(replicate)
    replicate_axis = 0 if replicate else None
    return ShardMesh(
        part, shard_axis, replicate_axis, mesh, tuple(map(names.index, shard)), tuple(map(names.index, replicate))
    )


def _names(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


# Made once for each set of ranks; they go with the group that they stand beside.
_scatter_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_gather_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_keeper_groups: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
_whole_groups: dict[tuple[int, ...], Any] = {}


def scatter_group(mesh: ShardMesh) -> Any:
    """The group on which gradients of this mesh are scattered; made at a place that all of its ranks pass."""
    return _group_beside(mesh, _scatter_groups)


def _group_beside(mesh: ShardMesh, known: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    """Another group of the ranks that have one shard each."""
    shard_group = mesh.shard_group
    group = known.get(shard_group)
    if group is None:
        ranks = dist.get_process_group_ranks(shard_group)
        is_alone = mesh.world == 1
        name = f"beside {shard_group.group_name}"
        group = shard_group if is_alone else torch_private.new_group_of(ranks, name)
        known[shard_group] = group
    return group


def whole_group(mesh: ShardMesh) -> Any:
    """The group of all ranks of the mesh, replicas and shards, on which they compare."""
    if mesh.replicate_axis is None or mesh.shard_axis is None:
        return mesh.shard_group
    default = torch_private.default_group()
    ranks = mesh.ranks
    if set(ranks) == set(range(default.size())):
        return default
    key = (id(default), *sorted(ranks))
    if key not in _whole_groups:
        _whole_groups[key] = torch_private.new_group_of(sorted(ranks), "a whole mesh")
    return _whole_groups[key]


class Links:
    """The ways along a mesh: to gather on, to scatter on, and between replicas."""

    def __init__(self, mesh: ShardMesh, watch: Watch | None = None, *, own_scatter_group: bool = True) -> None:
        self.mesh = mesh
        watch = Watch(None, mesh.rank) if watch is None else watch
        self.gather = Transport(mesh.shard_group, watch)
        self._watch = watch
        self._keepers: Transport | None = None
        self.replicas = Transport(mesh.replicate_group, watch) if mesh.num_replicas > 1 else None
        self.use_own_scatter_group(own_scatter_group)

    def keepers(self, num: int) -> Transport:
        """The way between ``num`` neighbours; made at a place that they all pass."""
        if self._keepers is None:
            shard_group = self.mesh.shard_group
            known = _keeper_groups.setdefault(shard_group, {})
            if num not in known:
                ranks = dist.get_process_group_ranks(shard_group)
                first = self.mesh.rank // num * num
                name = f"neighbours in {shard_group.group_name}"
                known[num] = torch_private.new_group_of(ranks[first : first + num], name)
            self._keepers = Transport(known[num], self._watch)
        return self._keepers

    def gather_apart(self) -> None:
        """Gather on a group that nobody else has; called at a place that all ranks pass."""
        self.gather = Transport(_group_beside(self.mesh, _gather_groups), self._watch)

    def use_own_scatter_group(self, is_own: bool) -> None:
        """See [Note: two groups for one set of ranks]."""
        self.has_own_scatter_group = is_own
        self.scatter = Transport(scatter_group(self.mesh) if is_own else self.mesh.shard_group, self._watch)
