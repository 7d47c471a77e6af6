"""What objects were before they were given the state of a checkpoint, so that a load that fails changes nothing.

An object's own ``load_state_dict`` may refuse what it is given when it has taken half of it, and another object, or
another rank, may refuse when this one has taken all.  The tensors of the model are not kept: they are compared before,
and written last.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.rng import restore_rng, rng_state


class Undo:
    """A row of objects as they were, put back in the opposite order."""

    def __init__(self) -> None:
        self._ways_back: list[tuple[str, Callable[[], object]]] = []

    def add(self, what: str, put_back: Callable[..., object], *values: Any) -> None:
        """Note how something is put back, and with which values; ``what`` names it in messages."""
        self._ways_back.append((what, partial(put_back, *values)))

    def keep(self, what: str, target: Any) -> None:
        """Note what an object is now, before its ``load_state_dict`` or ``set_state`` is called."""
        if isinstance(target, torch.Generator):
            self.add(what, target.set_state, target.get_state())
            return
        if isinstance(target, nn.Module):
            self.add(what, target.load_state_dict, _in_host_memory(target.state_dict()))
            return
        attributes = getattr(target, "__dict__", {})
        before = dict(attributes)
        self.add(what, _put_back, attributes, before)
        # An optimizer of torch's makes new dicts and leaves the old ones as they were: nothing has to be copied.
        if not isinstance(target, torch.optim.Optimizer) and not _is_a_loader(target):
            with contextlib.suppress(Exception):  # where an object cannot say it now, its attributes have to do
                self.add(what, target.load_state_dict, copy.deepcopy(target.state_dict()))
                # What holds its state may have been changed, or replaced: so the attributes come first and last.
                self.add(what, _put_back, attributes, before)

    def keep_rng(self) -> None:
        """Note the random numbers of this process."""
        self.add("the random numbers", restore_rng, rng_state())

    def put_back(self) -> list[str]:
        """Put everything back; what could not be is named."""
        stuck = []
        while self._ways_back:
            what, way_back = self._ways_back.pop()
            try:
                way_back()
            except Exception as error:
                stuck.append(f"{what} ({type(error).__name__}: {error})")
        return stuck


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Give an object the attributes that it had, and no others; at no time is it without one of them."""
    attributes.update(before)
    for name in attributes.keys() - before.keys():
        del attributes[name]


def _is_a_loader(target: Any) -> bool:
    """Whether an object loads data: to ask one for its state may start its workers."""
    return hasattr(target, "num_workers")


def _in_host_memory(state: Any) -> Any:
    """A copy of a module's state, which takes no memory of a GPU."""
    kept = copy.copy(state)  # with what torch hangs to it
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        kept[key] = value.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)
    return kept
