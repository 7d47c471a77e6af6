"""What is done around every optimizer's step for sharded models.

An optimizer that was built before its model was sharded, or while it was gathered, updates nothing: say so.  And a step
is counted as a write once it is over, since a closure may have gathered what it then changes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.engine.step_guard import steps_of
from lockstep.shard.parameter import name_of_origin
from lockstep.shard.updates import trace_update

_checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizers, and how many parameters
_is_installed = False


def install() -> None:
    """Look at every optimizer before its first step from now on."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling():
            trace_update(optimizer)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if _checked.get(optimizer) == len(parameters):
        return
    names = [name for p in parameters if (name := name_of_origin(p)) is not None]
    if names:
        raise RuntimeError(
            f"This optimizer holds whole parameters ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''}), not "
            "their shards, so its steps would change nothing. It was built before fully_shard, or while they were "
            "gathered: build it after, and after reshard()."
        )
    _checked[optimizer] = len(parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for reference in steps_of(optimizer):
        step = reference()
        if step is not None:
            step.num_writes += 1
