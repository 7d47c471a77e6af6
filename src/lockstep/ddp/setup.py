"""The steps of wrapping a module, one function each: name the parameters, place, plan, describe.

Where torch's DistributedDataParallel has a well-known error for a bad argument, the same type and words are used,
since scripts and tests match on them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from lockstep import torch_private
from lockstep.agree.model import ModelDescription, TensorDescription
from lockstep.ddp.options import Options
from lockstep.engine.bucket import Slot, is_dense, local_tensor
from lockstep.plan import BucketCaps, ParameterSpec, Plan, build_plan
from lockstep.version import __version__


@dataclass(frozen=True)
class Placement:
    """Where the module lives, and where its inputs go."""

    device: torch.device
    device_type: str
    is_multi_device: bool
    device_ids: list[int] | None
    output_device: int | None


@dataclass(frozen=True)
class Wrapped:
    """A module, and what is known of it when it is wrapped."""

    module: nn.Module
    ignored: set[str]  # names of parameters and buffers that stay local
    parameters: list[nn.Parameter]
    placement: Placement
    caps: BucketCaps
    slots: list[Slot]
    plan: Plan


def take_module(module: nn.Module, options: Options) -> Wrapped:
    """Name the parameters of a module, see where it lives, and plan."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ())) | set(options.delayed_names)
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    check_parameters(named, all_delayed=bool(options.delayed_names))
    parameters = [p for _, p in named]
    placement = choose_placement(
        parameters or [p for _, p in options.delay_all_reduce_named_params or ()],
        options.device_ids,
        options.output_device,
    )
    caps = options.caps()
    slots = trainable_slots(module, ignored)
    plan = choose_plan(specs_of(slots, sparse_parameter_names(module)), caps, options.given_plan())
    return Wrapped(module, ignored, parameters, placement, caps, slots, plan)


# ---------------------------------------------------------------- process group


def choose_process_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Choose what to reduce over.  Tensor-parallel parameters need no preparation: their local parts travel."""
    if device_mesh is not None:
        return device_mesh.get_group(mesh_dim=0)
    return process_group if process_group is not None else torch_private.default_group()


# ---------------------------------------------------------------- parameters


def trainable_slots(module: nn.Module, ignored: set[str], also: Container[int] = ()) -> list[Slot]:
    """Every parameter that needs a gradient, once, in declaration order, with the module that owns it.

    ``also`` holds the ``id()`` of parameters to take in although they need none now.
    """
    slots: list[Slot] = []
    seen: set[int] = set()
    for module_name, owner in module.named_modules():
        for parameter_name, parameter in owner.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            wanted = parameter.requires_grad or id(parameter) in also
            if wanted and name not in ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                slots.append(Slot(name, parameter, type(owner).__name__, position=len(slots)))
    return slots


def has_sync_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())


def sparse_parameter_names(module: nn.Module) -> set[str]:
    """Weights of embeddings that produce sparse gradients."""
    return {
        f"{name}.weight" if name else "weight"
        for name, owner in module.named_modules()
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
    }


def renormalised_parameter_names(module: nn.Module) -> set[str]:
    """Weights of embeddings that a forward renormalises, in the rows that it looks up."""
    found = {
        id(owner.weight)
        for owner in module.modules()
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in found} if found else set()


def check_parameters(parameters: Sequence[tuple[str, nn.Parameter]], all_delayed: bool) -> None:
    if not all_delayed and not any(p.requires_grad for _, p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    uninitialized = [name for name, p in parameters if isinstance(p, UninitializedParameter)]
    if uninitialized:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            f"pass to correctly initialize the modules. Uninitialized: {', '.join(uninitialized[:5])}"
        )
    on_meta = [name for name, p in parameters if p.is_meta]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} parameters are on the meta device and hold no values, for example {on_meta[0]}. "
            "Materialise the module first: module.to_empty(device=...), then initialise it or load a checkpoint, then "
            "wrap it."
        )


def choose_placement(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in parameters}
    kinds = {device.type for device in devices}
    if len(kinds) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )
    kind = kinds.pop()
    device = parameters[0].device
    is_multi = len(devices) > 1
    if not device_ids or kind == "cpu" or is_multi:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Placement(device, kind, is_multi, None, None)
    index = _device_index(device_ids[0])
    output = index if output_device is None else _device_index(output_device)
    return Placement(device, kind, is_multi, [index], output)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return device.index if device.index is not None else torch.accelerator.current_device_index()


# ---------------------------------------------------------------- plan


def specs_of(slots: Iterable[Slot], sparse_names: set[str]) -> list[ParameterSpec]:
    """The plan's view of the parameters.  Devices are numbered by first use, so that ranks agree on them."""
    ordinals: dict[torch.device, int] = {}
    specs = []
    for slot in slots:
        local = local_tensor(slot.parameter)
        if not is_dense(local):
            raise ValueError(
                f"Parameter {slot.name} ({slot.owner}) does not fill its memory without gaps (stride "
                f"{local.stride()} for shape {tuple(local.shape)}). Make it contiguous before wrapping."
            )
        ordinal = ordinals.setdefault(local.device, len(ordinals))
        specs.append(
            ParameterSpec(
                name=slot.name,
                shape=tuple(local.shape),
                dtype=str(local.dtype).removeprefix("torch."),
                itemsize=local.element_size(),
                device=f"{local.device.type}:{ordinal}",
                stride=tuple(local.stride()),
                sparse=slot.name in sparse_names,
            )
        )
    return specs


def choose_plan(
    specs: list[ParameterSpec],
    caps: BucketCaps,
    given: Plan | None,
    ready_order: list[str] | None = None,
) -> Plan:
    """The plan given by the user (a resumed run keeps its layout), or a new one."""
    if given is None:
        return build_plan(specs, caps, ready_order=ready_order)
    planned = {spec.name: spec for spec in given.parameters}
    for spec in specs:
        if planned.pop(spec.name, None) != spec:
            raise ValueError(
                f"The given plan does not fit this module: parameter {spec.name} is missing from it or has another "
                "shape, dtype, stride or device. Build the plan anew (plan=None)."
            )
    if planned:
        raise ValueError(
            f"The given plan names a parameter that this module does not train: {next(iter(planned))}. Build the plan "
            "anew (plan=None)."
        )
    return given


# ---------------------------------------------------------------- what ranks agree on


def describe(
    module: nn.Module, ignored: set[str], options: dict[str, Any], plan: Plan | None, with_buffers: bool
) -> ModelDescription:
    sparse = sparse_parameter_names(module)
    parameters = tuple(_describe(n, p, n in sparse) for n, p in module.named_parameters() if n not in ignored)
    buffers = tuple(_describe(n, b, False) for n, b in module.named_buffers() if n not in ignored)
    return ModelDescription(
        versions={"torch": str(torch.__version__), "lockstep": __version__},
        options={name: str(value) for name, value in options.items()},
        parameters=parameters,
        buffers=buffers if with_buffers else (),
        plan_digest=plan.digest if plan is not None else "",
    )


def _describe(name: str, tensor: torch.Tensor, sparse: bool) -> TensorDescription:
    local = local_tensor(tensor)
    dtype = str(local.dtype).removeprefix("torch.")
    return TensorDescription(name, tuple(local.shape), dtype, tuple(local.stride()), bool(tensor.requires_grad), sparse)
