"""Which train steps are in the middle of their micro-batches: two of them cannot add up in the same gradients.

The first micro-batch of a window drops the gradients that there are, and the last one uses all that there are.  A step
that comes in between of another's would drop its gradients, and leave its own to be added to.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def note(step: Any, *, is_open: bool) -> None:
    """Remember whether a step is in the middle of its micro-batches now."""
    if is_open:
        _open.add(step)
    else:
        _open.discard(step)


def require_alone(step: Any) -> None:
    """Raise if another step is in the middle of micro-batches that add up in gradients of the same parameters."""
    if _why_not_alone(step):
        gc.collect()  # it may be one that nobody has any more, which other ranks have collected already
    if reason := _why_not_alone(step):
        raise RuntimeError(reason)


def _why_not_alone(step: Any) -> str:
    for other in list(_open):
        theirs = set(map(id, other._recipe.parameters)) if other is not step else set()
        # What is frozen, and has no gradient, adds nothing up.
        ours = [p for p in step._recipe.parameters if p.requires_grad or p.grad is not None]
        shared = [id(parameter) for parameter in ours if id(parameter) in theirs]
        if not shared:
            continue
        names = {id(parameter): name for name, parameter in step._options.model.named_parameters()}
        name = names.get(shared[0], "a parameter")
        return (
            f"Another TrainStep is in the middle of its micro-batches ({other._micro} of {other._options.accumulate} "
            f"are in the gradients of {name}{' and others' if len(shared) > 1 else ''}); this one would drop them. "
            "Call the other one until it updates (its is_last is True before that call), or call its reset()."
        )
    return ""
