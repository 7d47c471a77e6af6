"""``lockstep.compile`` and ``lockstep.explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.ddp import DistributedDataParallel
from lockstep.ddp.activate import activate
from lockstep.ddp.options import Overlap
from lockstep.graph.backend import STRATEGIES
from lockstep.graph.explain import Explanation

if TYPE_CHECKING:
    from lockstep.shard.explain import ShardExplanation
    from lockstep.shard.module import ShardedModule

__all__ = ["compile", "explain"]


def compile(model: Any, *, overlap: Overlap | None = None, verbose: bool = False, **options: Any) -> Any:
    """``torch.compile`` for a wrapped model, with the two choices that concern its communication.

    Args:
        model: a wrapped module, a module that holds one, or what else ``torch.compile`` takes.
        overlap: as in :class:`lockstep.DistributedDataParallel`; None leaves what the wrapper was made with.
        verbose: print :func:`explain` after the first three steps, on rank 0.
        options: everything that ``torch.compile`` takes (``backend``, ``mode``, ``options``, ``fullgraph``, ...).
    """
    if overlap not in (None, *STRATEGIES):
        raise ValueError(f"overlap must be one of {', '.join(STRATEGIES)} or None, got {overlap!r}.")
    wrappers = _wrappers_in(model)
    if overlap is not None and not wrappers:
        raise ValueError(f"overlap={overlap!r} is for wrapped models, and there is no lockstep.DDP in {type(model)}.")
    for wrapper in wrappers:
        if overlap is not None:
            wrapper.overlap = overlap
        wrapper._parts.compilation.explains_when_settled = verbose
    activate()  # the model may be wrapped later, and the backend "lockstep" be asked for now
    return torch.compile(model, **options)


def explain(model: nn.Module) -> Explanation | ShardExplanation:
    """What was compiled of a wrapped model so far; run a step or two first.

    The graphs, the buckets that each launches and where in its backward, what was left to the hooks and why, compiled
    modules that never ran, and predicted and measured exposed communication.  Of a sharded model: where each unit was
    gathered, how long this rank waited for it, and from where its gradients left.  Print it, or use its fields.
    """
    wrappers = _wrappers_in(model)
    sharded = [] if wrappers or not isinstance(model, nn.Module) else _sharded_in(model)
    if len(sharded) == 1:
        from lockstep.shard.explain import explain_root

        return explain_root(sharded[0]._lockstep_root)
    if len(wrappers) != 1:
        raise ValueError(
            "explain() needs a model with one lockstep.DDP or one sharded model in it, and found "
            f"{len(wrappers) + len(sharded)}. Call it with that one."
        )
    return wrappers[0].explain_compilation()


def _sharded_in(model: nn.Module) -> list[ShardedModule]:
    """The outermost sharded modules; nothing is imported for a model that has none."""
    found: list[Any] = [module for module in model.modules() if "_lockstep_unit" in vars(module)]
    outermost = {module._lockstep_unit: module for module in found if module._lockstep_unit.parent is None}
    return list(outermost.values())


def _wrappers_in(model: Any) -> list[DistributedDataParallel]:
    if not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
