"""What a program is made for, and what of it is another in every step, so that no program would be used twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.program.batch import Batch
from lockstep.program.guards import Surroundings
from lockstep.program.options import Options

MOST_NEW = 8  # kinds in a row that were never seen before; more where more programs may be made
_MOST_SHOWN = 5
_STAYS = "where it stays as it is, a program is made"


class Kind(NamedTuple):
    """One kind of micro-step: steps of the same kind may be run by the same program."""

    moment: tuple[bool, bool]  # the first of a window, the last
    batch: Hashable
    around: Any  # what Python holds, see ``Surroundings``
    settings: Any  # of optimizers, where they update
    trained: tuple[bool, ...]
    autocast: tuple[Any, ...]
    units: Hashable = ()  # how the units of a sharded model are set


class Restless:
    """Looks at the kinds of steps as they come, and says what keeps changing if none of them comes again."""

    def __init__(self, surroundings: Surroundings, options: Options) -> None:
        self._surroundings = surroundings
        self._optimizers = options.optimizers
        self._most_new = max(MOST_NEW, options.max_programs)
        self._last: dict[tuple[bool, bool], tuple[Kind, str]] = {}  # by moment: the kind, and the shapes of its batch
        self._num_new: Counter[tuple[bool, bool]] = Counter()
        self._told: set[str] = set()
        self._pair: tuple[tuple[Kind, str], tuple[Kind, str]] | None = None  # the last two, if both were new

    def look(self, kind: Kind, batch: Batch, *, is_new: bool) -> str:
        """Note the kind of this step; returns a reason against programs when too many in a row were new."""
        shapes = batch.shown() if is_new else ""
        before, self._last[kind.moment] = self._last.get(kind.moment), (kind, shapes)
        if not is_new or before is None:
            self._num_new[kind.moment] = 0
            self._pair = None
            return ""
        self._num_new[kind.moment] += 1
        self._pair = (before, (kind, shapes))
        if self._num_new[kind.moment] < self._most_new:
            return ""
        what, instead = self.difference(before[0], kind, before[1], shapes)
        subject = what.partition(" (")[0]
        if subject in self._told:
            return ""
        self._told.add(subject)
        return f"this changes from step to step: {what}; a program is made for one value of it; {instead}"

    def why_none_yet(self) -> str:
        """What the last two steps differ in, if both were new: a program is made when a kind of step comes again."""
        if self._pair is None:
            return ""
        (old, old_shapes), (new, new_shapes) = self._pair
        what, _ = self.difference(old, new, old_shapes, new_shapes)
        return f"a program is made when a kind of step comes again; the last two differ in {what}"

    def difference(self, old: Kind, new: Kind, old_shapes: str, new_shapes: str) -> tuple[str, str]:
        """What two kinds differ in, and what could be done about it, as parts of a sentence."""
        if old.settings != new.settings:
            names = _settings_that_differ(old.settings, new.settings, self._optimizers)
            return names, "no program of this optimizer can read it as a tensor"
        if old.around != new.around:
            what, is_number = self._surroundings.named(old.around)
            return what, "as a tensor (a buffer of the model, say) it needs no new one" if is_number else _STAYS
        if old.batch != new.batch:
            if old_shapes != new_shapes:
                shapes = f"{old_shapes}, then {new_shapes}"
                return f"the shape of batches ({shapes})", "padded to a few shapes they need few programs"
            return "a number or word in the batch", "a number that is a tensor needs no new one"
        if old.units != new.units:
            return "how the units of the model are set", _STAYS
        return ("which parameters train", _STAYS) if old.trained != new.trained else ("the use of autocast", _STAYS)


def _settings_that_differ(old: Any, new: Any, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    owners = [type(o).__name__ for o in optimizers for _ in o.param_groups]
    found: dict[str, None] = {}
    for owner, one, other in zip(owners, old, new, strict=False):
        before, now = dict(one), dict(other)
        found |= {f"{name} of {owner}": None for name in now if before.get(name) != now[name]}
    return ", ".join(list(found)[:_MOST_SHOWN]) or "the number of parameter groups"
