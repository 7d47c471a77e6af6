"""One parameter of a unit: the shard that this rank keeps, and the whole that a forward runs on.

The shard is what the module has registered between uses, and what optimizers and checkpoints see: a DTensor.  The whole
parameter is a leaf of autograd of its own; its memory comes and goes, while the object stays, so that graphs that were
recorded with it find it filled again in their backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from lockstep import torch_private
from lockstep.shard.layout import ShardSpec, contiguous
from lockstep.shard.mesh import ShardMesh

# A number and a name for every parameter that was cut, and for the whole that is gathered of it, as long as they live:
# an ``id`` may be given again.
_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
_numbers = count()

# A module, and what it calls the parameter.  A unit must not keep its modules: they go when the program lets them go.
Owner = tuple[weakref.ref[nn.Module], str]


def name_of_origin(parameter: Tensor) -> str | None:
    """The name of a whole parameter whose shards are trained in its place; None for any other."""
    found = _origins.get(parameter)
    return None if found is None else found[1]


class ShardedParameter:
    """A parameter that is cut over the ranks of a mesh."""

    def __init__(self, name: str, parameter: nn.Parameter, owners: Sequence[Owner], mesh: ShardMesh, dim: int) -> None:
        self.name = name  # from the root, once that is known
        self.owners = list(owners)
        self.mesh = mesh
        self.dim = dim
        # Parameters of tensor parallelism are DTensors already: what is cut is the part of this rank.
        self.whole_spec: Any = torch_private.spec_of(parameter) if isinstance(parameter, DTensor) else None
        local = torch_private.local_of(parameter) if self.whole_spec is not None else parameter
        self.shape = tuple(local.shape)
        self._refuse_what_cannot_be_cut(parameter, local)
        if parameter not in _origins:
            _origins[parameter] = (next(_numbers), name)
        self.origin: int = _origins[parameter][0]
        self.full: nn.Parameter | None = None
        self.sharded = self._shard(parameter, local.detach())
        self.register(self.sharded)
        modules = [(reference(), name) for reference, name in owners]
        # Where they have it, but for modules that keep their parameters elsewhere.
        self.places = [(m._parameters, n) for m, n in modules if m is not None and m._parameters.get(n) is self.sharded]

    def _refuse_what_cannot_be_cut(self, parameter: Tensor, local: Tensor) -> None:
        if not parameter.is_contiguous() or not local.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: {self.name} has param.shape="
                f"{tuple(parameter.shape)} and param.stride()={parameter.stride()}. Call .contiguous() on it first."
            )

    @property
    def gathers_itself(self) -> bool:
        """Whether it brings its own all-gather (own_gather.py)."""
        local = self.local
        has = [hasattr(local, f"fsdp_{moment}_all_gather") for moment in ("pre", "post")]
        if has[0] != has[1]:
            raise AssertionError(
                f"Parameter {self.name}: both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
                f"all-gather extensions, and {type(local).__name__} has one of them."
            )
        return has[0]

    def _cut(self, local: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in memory of its own."""
        rank, chunks = self.mesh.rank, local.chunk(self.mesh.world, self.dim)
        if rank >= len(chunks):
            return local.narrow(self.dim, 0, 0).clone()
        if local.is_meta:
            return chunks[rank].contiguous()
        return chunks[rank].clone(memory_format=torch.contiguous_format)

    def shard_of(self, whole: object) -> Tensor | None:
        """A shard of a whole tensor that is cut as this parameter is; None where it is not one to cut."""
        if type(whole) not in (Tensor, nn.Parameter) or self.whole_spec is not None or type(self.local) is not Tensor:
            return None
        assert isinstance(whole, Tensor)
        if tuple(whole.shape) != self.shape:
            return None  # the module says so better
        mine = self._cut(whole.detach())
        if not self.local.is_meta:  # where it is, it can only be assigned
            mine = mine.to(self.local.device)
        spec = torch_private.spec_of(self.sharded)
        meta = spec.tensor_meta._replace(dtype=mine.dtype)
        return torch_private.dtensor_around(mine, replace(spec, tensor_meta=meta))

    def _shard(self, parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
        mine = self._cut(local)
        mesh, placements = self._placements()
        with torch.no_grad():
            dtensor = DTensor.from_local(
                mine,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(parameter.shape),
                stride=contiguous(tuple(parameter.shape)),
            )
        sharded = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        torch_private.set_local(sharded, mine)
        return sharded

    def _placements(self) -> tuple[Any, tuple[Any, ...]]:
        """Where the shards lie, as a DTensor says it."""
        mine = Shard(self.dim)
        replicas = () if self.mesh.replicate_axis is None else (Replicate(),)

        def shards(placement: Any) -> tuple[Any, ...]:
            return () if self.mesh.shard_axis is None else (placement,)

        if self.whole_spec is None:
            if self.mesh.spmd is not None:
                raise ValueError(
                    "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                    f"distribute_module). Got plain tensor for parameter '{self.owners[0][1]}'."
                )
            return self.mesh.mesh, (*replicas, *shards(mine))
        theirs = self.whole_spec.placements
        if self.mesh.spmd is not None:
            return self._placements_on_whole_mesh(theirs)
        num_cuts = 1
        for size, placement in zip(self.whole_spec.mesh.shape, theirs, strict=True):
            if getattr(placement, "dim", None) == self.dim:
                num_cuts *= size
        once_more = torch_private.strided_shard(self.dim, num_cuts) if num_cuts > 1 else mine
        joined = torch_private.joined_mesh([self.mesh.mesh, self.whole_spec.mesh])
        return joined, (*replicas, *shards(once_more), *theirs)

    def _placements_on_whole_mesh(self, theirs: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        mesh = self.whole_spec.mesh
        if mesh is not self.mesh.spmd and mesh != self.mesh.spmd:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh "
                "objects"
            )
        placements = list(theirs)
        for kind, dims in (("shard", self.mesh.shard_dims), ("replicate", self.mesh.replicate_dims)):
            for dim in dims:
                if not isinstance(placements[dim], Replicate):
                    raise ValueError(
                        f"Expected Replicate() on DP {kind} dim '{mesh.mesh_dim_names[dim]}' (index {dim}) but got "
                        f"{placements[dim]}"
                    )
        if not self.mesh.shard_dims:
            return mesh, tuple(placements)
        (axis,) = self.mesh.shard_dims
        num_cuts = 1
        for other in range(axis + 1, mesh.ndim):
            if getattr(theirs[other], "dim", None) == self.dim:
                num_cuts *= mesh.size(other)
        placements[axis] = torch_private.strided_shard(self.dim, num_cuts) if num_cuts > 1 else Shard(self.dim)
        return mesh, tuple(placements)

    # ---------------------------------------------------------------- facts

    @property
    def spec(self) -> ShardSpec:
        """What the layout needs to know; the dtype may change as long as nothing was laid out."""
        dtype = self.sharded.dtype
        return ShardSpec(self.name, self.shape, str(dtype).removeprefix("torch."), dtype.itemsize, self.dim)

    @property
    def local(self) -> Tensor:
        """The part of this rank."""
        return torch_private.local_of(self.sharded)

    @property
    def owner_name(self) -> str:
        return type(self.owners[0][0]()).__name__.removeprefix("FSDP")

    # ---------------------------------------------------------------- what the module has

    def register(self, parameter: Tensor) -> None:
        """Let the modules that own it have this one; their ``register_parameter`` would take ten times as long."""
        for reference, name in self.owners:
            module = reference()
            if module is None:
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter  # type: ignore[assignment]
            else:
                setattr(module, name, parameter)

    def follow_module(self) -> bool:
        """Take what is registered now for the shard, if the program replaced it; returns whether it did."""
        reference, name = self.owners[0]
        module = reference()
        registered = None if module is None else module._parameters.get(name)
        if registered is None or registered is self.sharded or registered is self.full:
            return False
        if not isinstance(registered, DTensor):
            return False
        self.sharded = registered
        self.register(registered)  # for the other owners
        return True

    # ---------------------------------------------------------------- the whole

    def make_full(self, memory: Tensor, offset: int) -> None:
        """Make the whole parameter on ``memory``, which may be empty for now."""
        whole = torch_private.alias(memory, self.shape, contiguous(self.shape), offset)
        if self.whole_spec is not None:
            whole = torch_private.dtensor_around(whole, self._spec_in(memory.dtype))
        self.take_full(whole)

    def take_full(self, whole: Tensor) -> None:
        """Let this be the whole parameter."""
        self._trains = self.sharded.requires_grad  # as the whole one was told
        self.full = nn.Parameter(whole, requires_grad=self._trains)
        _origins[self.full] = (self.origin, self.name)

    def _spec_in(self, dtype: torch.dtype) -> Any:
        spec = self.whole_spec
        if spec.tensor_meta is None or spec.tensor_meta.dtype == dtype:
            return spec
        return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of a whole gradient, which with tensor parallelism may still have to be summed up there."""
        if self.whole_spec is None or not isinstance(gradient, DTensor):
            return gradient
        ours = {*self.mesh.shard_dims, *self.mesh.replicate_dims} if self.mesh.spmd is not None else set()
        wanted = tuple(
            theirs if axis in ours else mine
            for axis, (theirs, mine) in enumerate(zip(gradient.placements, self.whole_spec.placements, strict=True))
        )
        if tuple(gradient.placements) != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return torch_private.local_of(gradient)

    def follow_requires_grad(self) -> None:
        """Let the whole one train if the shard does."""
        assert self.full is not None
        self._trains = self.sharded.requires_grad
        if self.full.requires_grad != self._trains:
            self.full.requires_grad_(self._trains)

    def take_requires_grad(self) -> None:
        """Freeze or unfreeze the shard, if the program has done so to the whole one, which the module had."""
        if self.full is not None and self.full.requires_grad != self._trains:
            self._trains = self.full.requires_grad
            self.sharded.requires_grad_(self._trains)
