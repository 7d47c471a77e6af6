"""Why a step cannot be a program: known before it is tried, each reason as people would say it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.engine.exchange import HookExchange, has_one_collective
from lockstep.program.options import Options
from lockstep.program.parts import Parallel
from lockstep.program.shard_reasons import why_not_captured_sharded, why_not_sharded

JOINED = "join() is, or was, in use: ranks do different things in a step"


def why_not_captured(options: Options, parallel: Parallel) -> list[str]:
    """Why the step cannot be captured as a CUDA graph; empty if it may be tried."""
    device = parallel.device
    if device.type != "cuda":
        return [f"the model is on {device.type}; there are CUDA graphs on CUDA devices only"]
    found = _why_no_program(parallel) + _optimizer_hooks(options) + why_not_captured_sharded(options, parallel)
    for wrapper in parallel.wrappers:
        transport = wrapper.step.reducer.transport
        if not transport.is_alone and transport.backend(device) != "nccl":
            found.append(f"collectives of {transport.backend(device)} cannot be captured, only those of nccl")
        if transport.world > 1 and wrapper.step.closing.union.control is None:
            found.append("ranks of this group have no way to tell each other that they can all replay")
        found += _hook_reason(wrapper)
    for optimizer in options.optimizers:
        found += _optimizer_reason(optimizer, options)
    return found


def why_not_graph(options: Options, parallel: Parallel) -> list[str]:
    """Why the whole step cannot be one compiled program; empty if it may be tried."""
    found = _why_no_program(parallel) + why_not_sharded(options, parallel) + _optimizer_hooks(options)
    for optimizer in options.optimizers:
        if not _is_torchs(optimizer):
            found.append(f"{_name(optimizer)} is not one of torch's optimizers, and what it does in Python is unknown")
        elif isinstance(optimizer, torch.optim.SparseAdam):
            found.append("SparseAdam is for sparse gradients")
    for name, parameter in options.model.named_parameters():
        if torch_private.has_hooks(parameter, num_ours=1 if parallel.wrappers else 0):
            found.append(f"a hook looks at the gradient of {name}")
            break
    for name, parameter in options.model.named_parameters() if parallel.wrappers else ():
        if hasattr(parameter, "device_mesh"):
            found.append(f"{name} is a DTensor, of which a wrapper reduces the part that a rank has from Python")
            break
    for name, module in options.model.named_modules():
        if isinstance(module, nn.RNNBase):
            named = f"{name} ({type(module).__name__})" if name else type(module).__name__
            found.append(f"{named} is a recurrent layer, of which a program would hold every place of the sequence")
            break
    if options.average is not None and not isinstance(options.average, float):
        found.append("the weight average is kept by Python code of its own; average=0.999 is a part of the program")
    return found


def _why_no_program(parallel: Parallel) -> list[str]:
    found = []
    if parallel.foreign:
        found.append("torch's DistributedDataParallel reduces from C++ of its own; use lockstep.DDP")
    if len(parallel.wrappers) > 1:
        found.append("there are several data-parallel wrappers in the model")
    for wrapper in parallel.wrappers:
        found += _wrapper_reasons(wrapper)
    return found


def _wrapper_reasons(wrapper: Any) -> list[str]:
    step = wrapper.step
    checks = {
        "find_unused_parameters=True asks in each step what was used": step.finds_unused,
        "static_graph=True learns from Python what is used": step.static.is_on,
        "optimizers that step in the backward": step.after_bucket is not None,
        "mixed_precision= casts from Python": wrapper._options.mixed_precision is not None,
        "delayed parameters are reduced from Python": wrapper._parts.delayed is not None,
        "finalize_backward() is called by hand": step.ends_by_hand,
        f"nonfinite={step.reducer.finiteness.policy!r} decides on the host before the update": (
            step.reducer.finiteness.waits
        ),
        'check="collective" compares each collective on the host': step.reducer.transport.audit is not None,
        "sparse gradients have another size in each step": any(b.is_sparse for b in step.reducer.buckets),
        "buffers are synchronised by a hook": wrapper._parts.buffers.hook is not None,
    }
    return [reason for reason, applies in checks.items() if applies]


def _optimizer_hooks(options: Options) -> list[str]:
    hooked = [o for o in options.optimizers if torch_private.optimizer_has_hooks(o)]
    return [f"hooks look at the steps of {_name(optimizer)}" for optimizer in hooked]


def _hook_reason(wrapper: Any) -> list[str]:
    exchange = wrapper.step.reducer.exchange
    if not isinstance(exchange, HookExchange):
        return []
    if has_one_collective(exchange.hook) or getattr(exchange.hook, "can_be_captured", False):
        return []
    return [
        f"the communication hook {exchange.name} may keep state in Python; a hook that keeps none says so by "
        "hook.can_be_captured = True"
    ]


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def takes_rate_as_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a program of this optimizer can be given another learning rate without being made again."""
    groups = optimizer.param_groups
    return all("capturable" in group for group in groups) or all(group.get("fused") for group in groups)


def _optimizer_reason(optimizer: torch.optim.Optimizer, options: Options) -> list[str]:
    name, groups = _name(optimizer), optimizer.param_groups
    if not all("capturable" in group for group in groups) and type(optimizer) is not torch.optim.SGD:
        return [f"{name} has no option capturable=, so what it does in Python in each step would be lost"]
    if any(group.get("differentiable") for group in groups):
        return [f"{name} was made with differentiable=True"]
    if options.schedulers and not takes_rate_as_tensor(optimizer):
        return [f"{name} keeps its learning rate in Python; with fused=True a schedule needs no new program"]
    if options.scales and not all(group.get("fused") for group in groups):
        return [f"with a gradient scaler {name} asks the GPU whether to skip; with fused=True it skips there itself"]
    return []
