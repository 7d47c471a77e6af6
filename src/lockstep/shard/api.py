"""``lockstep.fully_shard``: torch's function by the same arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from lockstep.shard import close, local_ops, optimizer_guard
from lockstep.shard.auto import repeated_blocks
from lockstep.shard.mesh import ShardMesh, take_mesh
from lockstep.shard.module import ShardedModule, give_face, state_of
from lockstep.shard.parameter import Owner, ShardedParameter
from lockstep.shard.root import units_in
from lockstep.shard.unit import Unit


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    units: Literal["auto"] | None = None,
) -> Any:
    """Shard the parameters of a module, or of several as one unit, over the ranks of a mesh; in place.

    The arguments are those of ``torch.distributed.fsdp.fully_shard``, and so is their meaning: call it from the inside
    out; each call makes one unit, of the parameters that no unit inside has.  See docs/sharding.md for what differs.

    Args:
        units: ``"auto"`` makes a unit of every repeated block inside first, so that one call is enough.
    """
    if units not in (None, "auto"):
        raise ValueError(f'units must be "auto" or None, got {units!r}.')
    shard_mesh = take_mesh(mesh, dp_mesh_dims)
    given = [module] if isinstance(module, nn.Module) else list(module)
    frees, num_keepers = _frees_after_forward(reshard_after_forward, shard_mesh, dp_mesh_dims)
    options: dict[str, Any] = {
        "num_keepers": num_keepers,
        "placement": shard_placement_fn,
        "policy": mp_policy,
        "offload": offload_policy,
        "ignored": ignored_params or set(),
    }
    if units == "auto":
        for root in given:
            for block in repeated_blocks(root):
                shard_modules([block], shard_mesh, frees=True if frees is None else frees, **options)
    shard_modules(_outermost(given), shard_mesh, frees=frees, **options)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _frees_after_forward(value: bool | int | None, mesh: ShardMesh, dims: Any) -> tuple[bool | None, int]:
    """Whether a unit is freed after its forward, and how many ranks keep it between them then (0: all)."""
    if value is None or isinstance(value, bool):
        return value, 0
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        )
    if dims is not None:
        raise NotImplementedError("reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)")
    if value < 1 or value > mesh.world or mesh.world % value:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {mesh.world}, not {value}"
        )
    return value != 1, value if 1 < value < mesh.world else 0


def shard_modules(
    modules: Sequence[nn.Module],
    mesh: ShardMesh,
    *,
    frees: bool | None,
    num_keepers: int,
    placement: Callable[[nn.Parameter], Any] | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
) -> Unit:
    """Make one unit of these modules."""
    for module in modules:
        _require_shardable(module)
    owners = _parameters_of(modules, ignored)
    _move_to(mesh.device, [entry[0][1] for entry in owners.values()], _buffers_of(modules, ignored))
    parameters = [
        ShardedParameter(name, parameter, places, mesh, _dim_of(name, parameter, placement, mesh))
        for name, (_, parameter), places in ((entry[0][0], entry[0], entry[1]) for entry in owners.values())
    ]
    unit = Unit(
        modules,
        parameters,
        mesh,
        policy=policy,
        offload=offload,
        reshard_after_forward=frees,
        num_keepers=num_keepers,
    )
    for module in modules:
        for _, inner in units_in(module):
            if inner.root is not None:
                inner.root.dissolve()
            if inner.parent is None:
                inner.parent = weakref.ref(unit)
    for module in modules:
        give_face(module, unit)
    optimizer_guard.install()
    local_ops.install()
    close.install()
    return unit


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Without those that are inside another one of them."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in inside]


def _require_shardable(module: nn.Module) -> None:
    if isinstance(module, ShardedModule):
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module:\n{module}"
        )
    other = next((m for m in module.modules() if isinstance(m, FSDPModule) and not isinstance(m, ShardedModule)), None)
    if other is not None:
        raise ValueError(
            f"{type(other).__name__} inside {type(module).__name__} was sharded by torch's own fully_shard. Shard all "
            "of a model by one of the two: import it from lockstep everywhere, or call lockstep.install() first."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")


Entry = tuple[tuple[str, nn.Parameter], list[Owner]]


def _own_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters belong to the unit: all inside, but for units and what is in them."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        found.append((prefix, module))
        for name, child in module.named_children():
            if not isinstance(child, ShardedModule):
                walk(f"{prefix}{name}.", child)

    for module in modules:
        walk("", module)
    return found


def _parameters_of(modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> dict[int, Entry]:
    """Each parameter once, with its name and everyone who has it."""
    left_out = {id(parameter) for parameter in ignored}
    found: dict[int, Entry] = {}
    for prefix, module in _own_modules(modules):
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in left_out:
                continue
            if getattr(module, "sparse", False) is True:
                raise NotImplementedError(
                    f"{prefix}{name} has sparse gradients ({type(module).__name__}(sparse=True)), which have no "
                    "shards. Set sparse=False, or leave the parameter out by ignored_params."
                )
            if parameter.ndim == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {prefix}{name} to a 1D tensor with numel equal to 1."
                )
            entry = found.setdefault(id(parameter), ((f"{prefix}{name}", parameter), []))
            entry[1].append((weakref.ref(module), name))
    return found


def _buffers_of(modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> list[Tensor]:
    return [b for _, module in _own_modules(modules) for b in module._buffers.values() if b is not None]


def _move_to(device: torch.device, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
    for tensor in (*parameters, *buffers):
        if tensor.device == device or tensor.device.type == "meta":
            continue
        if isinstance(tensor, DTensor):
            kind = tensor.device_mesh.device_type
            if kind != device.type:
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                    f"{kind} for DTensor and {device.type} for FSDP"
                )
            raise AssertionError(f"Expects DTensor to be moved to {kind} but got {tensor.device}")
        tensor.data = tensor.to(device)


def _dim_of(
    name: str, parameter: nn.Parameter, placement: Callable[[nn.Parameter], Any] | None, mesh: ShardMesh
) -> int:
    chosen: Any = None if placement is None else placement(parameter)
    own = getattr(chosen, "mesh_info", None)
    if own is not None and own.mesh == mesh.mesh and own.shard_mesh_dim == mesh.shard_axis:
        chosen = chosen.placement
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard):
        raise NotImplementedError(
            f"shard_placement_fn returned {type(chosen).__name__} for {name}; a Shard or None is what is there yet (a "
            "mesh for single parameters is not: shard the modules that have them by a call of their own)."
        )
    dim = chosen.dim + parameter.ndim if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < parameter.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {parameter.ndim}D tensor: {name}")
    return dim
