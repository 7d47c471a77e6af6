"""Updates of shards by a compiled optimizer: counted and checked as those of any other optimizer are.

The hook that stands before every optimizer's step is traced with it, once.  So it leaves an operator in the graph,
which does when the graph runs what the hook would have done.  Every sharded parameter has the number of its model with
it, and a tensor of one element, to which the operator says that it writes, so that no compiler drops it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.step import SyncStep
from lockstep.engine.step_guard import SoleOptimizer, before_update

_library = torch.library.Library("lockstep", "FRAGMENT")
_library.define(
    "update(Tensor(a!) tally, int number, int[] places) -> ()",
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag),
)

_numbers = count()
_tallies: weakref.WeakValueDictionary[int, Tally] = weakref.WeakValueDictionary()


class Tally:
    """By which graphs know the shards of one step (``engine/step.py``)."""

    def __init__(self, step: SyncStep) -> None:
        self._tensor = torch.zeros(1)
        self._leaves: list[int] = []
        self._optimizers: dict[tuple[int, ...], SoleOptimizer] = {}  # by the places that they update
        self._step = weakref.ref(step)
        self._number = next(_numbers)
        _tallies[self._number] = self

    def mark(self, parameters: Sequence[Any]) -> None:
        """Give these parameters the tally, and their place in it."""
        self._leaves = [id(parameter) for parameter in parameters]
        self._optimizers.clear()
        for place, parameter in enumerate(parameters):
            parameter._lockstep_tally = (self._number, self._tensor, place)

    def before_update(self, places: Sequence[int]) -> None:
        step = self._step()
        if step is not None:
            step.reducer.finiteness.refuse_compiled(step.reducer.slots)
            updated = tuple(places)
            if updated not in self._optimizers:
                self._optimizers[updated] = SoleOptimizer({self._leaves[place] for place in places})
            self._optimizers[updated].note_settings()
            before_update(step, lambda: {self._leaves[place] for place in places})


def trace_update(optimizer: Any) -> None:
    """In a step that is being traced: leave the operator for each model that it updates."""
    tallies: dict[int, Tensor] = {}
    places: dict[int, list[int]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mark = getattr(parameter, "_lockstep_tally", None)
            if mark is not None:
                tallies[mark[0]] = mark[1]
                places.setdefault(mark[0], []).append(mark[2])
    for number, tally in tallies.items():
        torch.ops.lockstep.update(tally, number, places[number])


@torch.library.impl(_library, "update", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _update(tally: Tensor, number: int, places: list[int]) -> None:
    known = _tallies.get(number)
    if known is not None:
        known.before_update(places)


@torch.library.register_fake("lockstep::update", lib=_library)
def _fake_update(tally: Tensor, number: int, places: list[int]) -> None:
    return None
