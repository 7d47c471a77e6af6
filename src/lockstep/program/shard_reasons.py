"""Why a step of a sharded model cannot be one program, each reason as people would say it."""

from __future__ import annotations

from typing import Any

from lockstep.program import precompiling
from lockstep.program.by_bucket import ELEMENTWISE
from lockstep.program.options import Options
from lockstep.program.parts import Parallel
from lockstep.shard.exchange import HookExchange
from lockstep.shard.root import Root
from lockstep.shard.store import FlatStore
from lockstep.shard.unit import Unit


def why_not_sharded(options: Options, parallel: Parallel) -> list[str]:
    """What is known before the first step, without asking the other ranks; empty where nothing is sharded."""
    if not parallel.sharded:
        return []
    units = _units_of(parallel)
    found = _of_models(parallel) + _of_units(units)
    found += [
        f"{type(optimizer).__name__} is not known to look at each element by itself, and a program has its shards only"
        for optimizer in options.optimizers
        if type(optimizer) not in ELEMENTWISE
    ]
    if options.accumulate > 1 and any(map(_reduces_in_another_dtype, units)):
        found.append("micro-batches add up in reduce_dtype, in memory of the loop (accumulate)")
    return found + _of_others(options, units)


def why_not_captured_sharded(options: Options, parallel: Parallel) -> list[str]:
    """As ``why_not_sharded``, for a CUDA graph, which runs the loop's own kernels."""
    if not parallel.sharded:
        return []
    units = _units_of(parallel)
    found = _of_models(parallel) + _of_units(units) + _of_others(options, units)
    if options.accumulate > 1:
        found.append("micro-batches of sharded models add up whole gradients, in memory of the loop (accumulate)")
    backends = {unit.links.gather.backend(unit.device) for unit in units if not unit.mesh.is_alone}
    found += [f"collectives of {name} cannot be captured, only those of nccl" for name in sorted(backends - {"nccl"})]
    return found


def _units_of(parallel: Parallel) -> list[Unit]:
    return [unit for module in parallel.sharded for unit in module._lockstep_units()]


def _of_models(parallel: Parallel) -> list[str]:
    found = []
    if parallel.wrappers:
        found.append("a replicated model is around sharded ones, or beside them")
    if len(parallel.sharded) > 1:
        found.append("there are several sharded models in the model")
    return found


def _of_others(options: Options, units: list[Unit]) -> list[str]:
    sharded = {id(parameter.sharded) for unit in units for parameter in unit.parameters}
    others = [p for p in options.parameters() if id(p) not in sharded]
    names = {id(p): name for name, p in options.model.named_parameters()} if others else {}
    shown = ", ".join(names.get(id(p), "one of an optimizer's") for p in others[:5])
    return [f"these parameters are not sharded with the rest: {shown}"] if others else []


def _of_units(units: list[Unit]) -> list[str]:
    parameters = [parameter for unit in units for parameter in unit.parameters]
    meshes = {unit.mesh.mesh for unit in units if unit.parameters}
    checks: dict[str, Any] = {
        "the sharded model has no parameters": not parameters,
        "units of the sharded model are on several meshes": len(meshes) > 1,
        "shards have replicas (a 2D mesh)": any(unit.mesh.num_replicas > 1 for unit in units),
        "shards are offloaded to the host": any(unit.offloads for unit in units),
        "parameters with an all-gather of their own run Python to gather": any(unit.has_own_gathers for unit in units),
        "parameters are cut by tensor parallelism, too": any(p.whole_spec is not None for p in parameters),
    }
    return [reason for reason, applies in checks.items() if applies]


def _reduces_in_another_dtype(unit: Unit) -> bool:
    wanted = unit.wants_reduce_dtype
    return wanted is not None and any(isinstance(s, FlatStore) and s.dtype != wanted for s in unit.stores)


def why_not_now(root: Root) -> str:
    """What may change from step to step; empty if this one may be a program.  Ranks tell each other the answer."""
    team = root.teams[0]
    step, attendance = team.step, root.attendance
    checks = {
        "set_requires_gradient_sync(False): gradients stay on their rank": not all(u.syncs for u in team.units),
        "set_reshard_after_backward(False) keeps whole parameters after a step": not all(
            unit.reshard_after_backward for unit in root.units
        ),
        "set_sync_buffers() exchanges buffers in each step": root.syncs_buffers,
        "set_manual_backward_finalization(): finalize_backward() is called by hand": step.ends_by_hand,
        f"nonfinite={step.reducer.finiteness.policy!r} decides on the host before the update": (
            step.reducer.finiteness.waits
        ),
        "a communication hook sees whole gradients of the loop": isinstance(team.exchange, HookExchange),
        "join() is in use, and some ranks are out of data": attendance.is_idle or attendance.num_active is not None,
        "ranks of this group have no way to tell each other that they all can": (
            step.reducer.world > 1 and step.closing.union.control is None and precompiling.active is None
        ),
    }
    return next((reason for reason, applies in checks.items() if applies), "")


def why_not_captured_now(root: Root) -> str:
    """As ``why_not_now``, for a CUDA graph; whatever Python is asked for in a step would be lost in a replay."""
    units = root.teams[0].units
    comms = [comm for unit in units for comm in (unit.gather_comm, unit.scatter_comm) if comm is not None]
    checks = {
        "set_keep_unsharded_storage() keeps memory that is not the program's": any(u.keeps_storage for u in units),
        "set_all_reduce_hook() runs Python in each step": any(u.all_reduce_hook is not None for u in units),
        "memory of the process group cannot be a program's": any(u.uses_group_memory for u in units),
        "a collective of your own may keep state in Python; one that keeps none says so by can_be_captured = True": (
            not all(getattr(comm, "can_be_captured", False) for comm in comms)
        ),
    }
    return why_not_now(root) or next((reason for reason, applies in checks.items() if applies), "")
