"""The state of a communication hook: what compression left out (error feedback) belongs to a rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.undo import Undo

# What torch's PowerSGD keeps from step to step; its own pickle has these and the options.
_POWER_SGD = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_POWER_SGD_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


def wrapper_of(model: nn.Module) -> nn.Module | None:
    """Find the data-parallel wrapper in any order of wrapping and compiling."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            return inner
        inner = getattr(inner, "_orig_mod", None)
    return None


def sharded_in(model: nn.Module) -> list[Any]:
    """Find the sharded models in one, each by its outermost module."""
    units = ((module, vars(module).get("_lockstep_unit")) for module in model.modules())
    return [module for module, unit in units if unit is not None and unit.parent is None]


def steps_of(model: nn.Module) -> list[Any]:
    """What reduces the gradients of a model, replicated or sharded."""
    step = getattr(wrapper_of(model), "step", None)
    roots = [module._lockstep_unit.root for module in sharded_in(model)]  # None before the first use
    sharded = [step for root in dict.fromkeys(roots) if root is not None for step in root.steps]
    return [*([] if step is None else [step]), *sharded]


def keeps_own_buffers(model: nn.Module) -> bool:
    """Whether data parallelism leaves buffers to each rank, so that they differ between ranks for good."""
    wrapper: Any = wrapper_of(model)
    if wrapper is not None:
        return not getattr(wrapper, "forward_sync_buffers", wrapper.broadcast_buffers)
    roots = [module._lockstep_unit.root for module in sharded_in(model)]
    return any(root is None or not root.syncs_buffers for root in roots)


def hook_of(model: nn.Module) -> Any:
    """Return the state that was given to ``register_comm_hook``, None where there is none."""
    states = (getattr(step.reducer.exchange, "state", None) for step in steps_of(model))
    found = next((state for state in states if state is not None), None)
    hooks = getattr(wrapper_of(model), "_comm_hooks", None)  # torch's own class
    if found is not None or not hooks:
        return found
    return hooks[0][1]


def hook_state(model: nn.Module) -> dict[str, Any] | None:
    """Collect the state of the hook on this rank."""
    state = hook_of(model)
    if state is None or isinstance(state, dist.ProcessGroup):
        return None
    kind = type(state).__name__
    if callable(getattr(state, "state_dict", None)):
        return {"kind": kind, "state": state.state_dict()}
    if kind == "PowerSGDState":
        return {"kind": kind, "state": _power_sgd_state(state)}
    warnings.warn(
        f"The state of the communication hook is a {kind} without state_dict(); it is not part of the checkpoint, so "
        "a resumed run is not bitwise equal if the hook keeps anything between steps.",
        stacklevel=4,
    )
    return None


def restore_hook(model: nn.Module, saved: dict[str, Any], undo: Undo) -> str | None:
    """Put the state back; returns why not, where that makes no sense."""
    state = hook_of(model)
    kind = None if state is None else type(state).__name__
    if kind != saved["kind"]:
        return f"the checkpoint holds the state of a hook ({saved['kind']}), and the model has {kind or 'none'}"
    undo.keep("the state of the communication hook", state)
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(saved["state"])
    else:
        undo.add("the hook's random numbers", state.rng.set_state, state.rng.get_state())
        _restore_power_sgd(state, saved["state"], _device_of(model))
    return None


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _power_sgd_state(state: Any) -> dict[str, Any]:
    name, key, position, has_gauss, gauss = state.rng.get_state()
    assert name == "MT19937"
    saved: dict[str, Any] = {field: getattr(state, field) for field in _POWER_SGD}
    saved |= {field: dict(getattr(state, field)) for field in _POWER_SGD_TENSORS}
    return {**saved, "rng": [key.tolist(), int(position), int(has_gauss), float(gauss)]}


def _restore_power_sgd(state: Any, saved: dict[str, Any], device: torch.device) -> None:
    import numpy

    for field in _POWER_SGD:
        setattr(state, field, saved[field])
    for field in _POWER_SGD_TENSORS:
        setattr(state, field, {index: tensor.to(device) for index, tensor in saved[field].items()})
    key, position, has_gauss, gauss = saved["rng"]
    state.rng.set_state(("MT19937", numpy.array(key, dtype=numpy.uint32), position, has_gauss, gauss))
