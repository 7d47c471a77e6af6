"""An optimizer that was built before its model was sharded updates parameters that nobody uses any more: say so."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.shard.parameter import name_of_origin

_checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizers, and how many parameters
_is_installed = False


def install() -> None:
    """Look at every optimizer before its first step from now on."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if _checked.get(optimizer) == len(parameters):
        return
    names = [name for p in parameters if (name := name_of_origin(p)) is not None]
    if names:
        raise RuntimeError(
            f"This optimizer was built before fully_shard replaced its parameters ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}), so its steps would change nothing. Build it after fully_shard."
        )
    _checked[optimizer] = len(parameters)
