"""What a compiled program was made for, in words: compared before an artifact is used, so that a refusal names it.

Whether a program fits is not decided here.  The compiler finds it by a key over the traced graph, its own version
and its options; a program that does not fit is not found.  These facts say why before anything is loaded.
"""

from __future__ import annotations

import hashlib
import platform
import types
from typing import Any

import torch
import torch.distributed as dist

from lockstep import torch_private
from lockstep.program.guards import Settings
from lockstep.program.options import Options
from lockstep.program.parts import Parallel
from lockstep.shard import ShardedModule
from lockstep.shard.mesh import whole_group
from lockstep.version import __version__

_MOST_SHOWN = 6


def facts_of(options: Options, parallel: Parallel, told: dict[str, str], settings: Settings) -> dict[str, str]:
    """Everything that must be the same where an artifact is made and where it is used; ``told`` is of the step.

    ``settings`` are those of the optimizers when the step was made: a schedule may have moved them since.
    """
    facts = {
        "Lockstep": __version__,
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "processor": _processor(),
        "device": _device(parallel.device),
        "number of ranks": str(_world(parallel)),
        "threads of a rank (OMP_NUM_THREADS)": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        **{name: value for name, value in told.items() if name != "max_programs"},
    }
    sizes = [len(group["params"]) for o in options.optimizers for group in o.param_groups]
    for index, (group, size) in enumerate(zip(settings, sizes, strict=False)):
        facts[f"parameter group {index} of the optimizers"] = f"{size} parameters, {dict(group)}"
    facts["loss function"] = _code(options.loss)
    facts |= _model(options)
    for wrapper in parallel.wrappers:
        hook = wrapper.step.reducer.exchange.name
        facts["communication"] = hook
    return facts | {f"Inductor's {name}": value for name, value in torch_private.compiler_settings().items()}


def differences(made_for: dict[str, str], here: dict[str, str]) -> list[str]:
    """In what two sets of facts differ, for people; empty if in nothing."""
    found = [
        f"{name}: made for {made_for.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in dict.fromkeys([*made_for, *here])
        if made_for.get(name) != here.get(name)
    ]
    return found[:_MOST_SHOWN] + ([f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else [])


def _world(parallel: Parallel) -> int:
    for wrapper in parallel.wrappers:
        return int(wrapper._peers.world)
    for sharded in parallel.sharded:
        return int(whole_group(sharded._lockstep_unit.mesh).size())
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)}, capability {capability}, CUDA {torch.version.cuda}"


def _processor() -> str:
    """Kernels are compiled for all that this processor can do, so each of its features counts."""
    features = ""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        pass
    digest = _short(" ".join(sorted(features.split())))
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, features {digest}"


def _model(options: Options) -> dict[str, str]:
    model = options.model
    facts = {"model": type(_plain_module(model)).__qualname__}
    kinds = {kind.__qualname__: kind for kind in map(_class_of, model.modules())}
    users = {name: kind for name, kind in kinds.items() if not kind.__module__.startswith(("torch.", "lockstep."))}
    facts |= {f"code of {name}": _code(kind.forward) for name, kind in sorted(users.items())}
    modes = sorted(name for name, module in model.named_modules() if not module.training)
    facts["modules in evaluation mode"] = ", ".join(modes[:_MOST_SHOWN]) + f" ({len(modes)})" if modes else "none"
    for name, parameter in model.named_parameters():
        facts[f"parameter {_name(name)}"] = _tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in model.named_buffers():
        facts[f"buffer {_name(name)}"] = _tensor(buffer)
    return facts


def _class_of(module: Any) -> Any:
    """The class of a module; of a sharded one the user's."""
    kind = type(module)
    return kind.__mro__[kind._orig_cls_mro_index] if isinstance(module, ShardedModule) else kind


def _plain_module(model: Any) -> Any:
    """The module of the user, through wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__module__.startswith("lockstep."):
            inner = getattr(model, "module", None)
        if inner is None or inner is model:
            return model
        model = inner


def _name(name: str) -> str:
    return name.removeprefix("_orig_mod.").removeprefix("module.")


def _tensor(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} strides {list(tensor.stride())}"


def _code(function: Any) -> str:
    """The name of a function with a digest of what it does: other lines or comments do not count."""
    inner = function
    while not isinstance(inner, types.FunctionType):
        following = getattr(inner, "__func__", None) or getattr(inner, "func", None)
        if following is None:
            call = vars(type(inner)).get("__call__")
            following = call if isinstance(call, types.FunctionType) else None
        if following is None:
            return type(function).__qualname__
        inner = following
    return f"{inner.__qualname__} ({_short(repr(_words(inner.__code__)))})"


def _words(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(_words(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
