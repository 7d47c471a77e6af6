"""What Python knows while a program is made, and would not be asked again when it runs.

A program holds the numbers and flags that Python had when it was made: whether modules train, a dropout's rate, the
settings of optimizers.  These are read before every step; another value means another program.  What a step changes by
itself in Python (a counter in a module, Python's own random numbers) no program can follow, and is found by comparing
before and after.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.program.batch import exact
from lockstep.program.recipe import Recipe
from lockstep.program.record import Record
from lockstep.program.torch_state import TORCH_STATE, why_not_now
from lockstep.program.world import World

_PLAIN = (int, float, bool, str, type(None))
# Of a group of parameters: what is no setting, or changes nothing in the result.
_NO_SETTINGS = ("params", "initial_lr", "capturable")


class ModuleGuard:
    """The plain numbers, flags and words that the modules of a model have; what else Python knows is in ``World``."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (vars(module), name, f"{path}.{name}" if path else name)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and (not name.startswith("_") or name == "_is_hf_initialized")
        ]
        self._identities: list[int] | None = None  # of the values that were read last, see look.py
        self._plain: list[Any] = []
        self._values: tuple[Any, ...] = ()

    def values(self) -> tuple[Any, ...]:
        """All of them as they are now."""
        held = [entries.get(name) for entries, name, _ in self._places]
        identities = list(map(id, held))
        if identities != self._identities:
            self._identities = identities
            self._plain = [v for v in held if isinstance(v, _PLAIN)]
            self._values = tuple([exact(v) if isinstance(v, _PLAIN) else id(v) for v in held])  # maybe anything by now
        return self._values

    def changed(self, before: tuple[Any, ...]) -> list[str]:
        """The names of those that are not what they were."""
        pairs = zip(self._places, before, self.values(), strict=True)
        return [shown for (_, _, shown), old, new in pairs if old != new]


# What a compiler writes into the environment while it compiles; no forward reads that.
_COMPILERS = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")


class Environment:
    """The variables of the environment, which a forward may read: another set of them means another program."""

    def __init__(self) -> None:
        self._raw: dict[Any, Any] = {}
        self._value: frozenset[tuple[Any, Any]] = frozenset()

    def value(self) -> frozenset[tuple[Any, Any]]:
        """All of them as they are now; comparing what lies below ``os.environ`` costs a microsecond."""
        now = getattr(os.environ, "_data", os.environ)
        if now != self._raw:
            self._raw = dict(now)
            self._value = frozenset(
                item for item in self._raw.items() if not os.fsdecode(item[0]).startswith(_COMPILERS)
            )
        return self._value


class Surroundings:
    """All that a program was made for and does not ask again: numbers of modules, what else Python holds, hooks."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.numbers = ModuleGuard(recipe.options.model)
        self._world = World(recipe.options.model, recipe.options.loss)
        self._environment = Environment()
        self._num_ours = 1 if recipe.parallel.wrappers else 0

    def values(self) -> tuple[Any, ...]:
        """All of it as it is now; another value means another program."""
        around = tuple([read() for _, read in TORCH_STATE])
        return (self.numbers.values(), self._world.values(), self._hooks(), self._environment.value(), around)

    @staticmethod
    def forbid(record: Record) -> bool:
        """Whether this call, as it is made, is none for a program; the reason is noted."""
        reason = why_not_now()
        if reason:
            record.fall_back(reason)
        return bool(reason)

    def changed(self, before: tuple[Any, ...]) -> str:
        """Say what a step has changed by itself, which no program can follow; empty if nothing."""
        numbers = self.numbers.changed(before[0])
        if numbers:
            return f"the step changes a number in Python: {', '.join(numbers[:5])}"
        where = self._world.changed(before[1])
        return f"the step changes what Python holds ({where})" if where else ""

    def versions(self) -> dict[int, tuple[int, str]]:
        """What to give ``written`` after a step."""
        return self._world.versions()

    def written(self, before: dict[int, tuple[int, str]]) -> str:
        """Say which tensor a step has written to that no program is given, or would write back; empty if none."""
        now = self._world.versions()
        found = [label for key, (version, label) in before.items() if key in now and now[key][0] != version]
        where = f" ({found[0]})" if found and found[0] else ""
        return f"the step writes to a tensor that is no buffer of the model{where}" if found else ""

    def named(self, before: tuple[Any, ...]) -> tuple[str, bool]:
        """What is not what it was, for people, and whether it may be a number; something is."""
        numbers = self.numbers.changed(before[0])
        if numbers:
            return f"{', '.join(numbers[:5])} (of the model)", True
        where = self._world.changed(before[1])
        if where:
            return f"what Python holds ({where})", True
        variables = sorted({os.fsdecode(name) for name, _ in before[3] ^ self._environment.value()})
        if variables:
            return f"{', '.join(variables[:5])} (of the environment)", False
        settings = [name for (name, read), old in zip(TORCH_STATE, before[4], strict=True) if read() != old]
        if settings:
            return f"{', '.join(settings[:5])} (of torch)", False
        return "what hooks there are, or what the model consists of", False

    def objects(self) -> list[Any]:
        """What a program has to keep alive, since it knows it by identity."""
        return self._world.objects()

    @property
    def has_hooks(self) -> bool:
        """Whether hooks of others look at gradients, or at the steps of optimizers."""
        return any(map(any, self._hooks()))

    def _hooks(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        parameters = [p for p in self._recipe.parameters if p.requires_grad]
        return (
            tuple([torch_private.has_hooks(p, num_ours=self._num_ours) for p in parameters]),
            tuple(map(torch_private.optimizer_has_hooks, self._recipe.options.optimizers)),
        )


Settings = tuple[tuple[tuple[str, Hashable], ...], ...]  # by group of parameters


def optimizer_settings(optimizers: Sequence[torch.optim.Optimizer], *, with_rates: bool) -> Settings:
    """The settings of optimizers, without what is a tensor; of torch's own without what others keep in its groups."""
    return tuple(
        tuple(
            (name, _hashable(value))
            for name, value in group.items()
            if name not in _NO_SETTINGS
            and (with_rates or name != "lr")
            and not isinstance(value, Tensor)
            and (name in optimizer.defaults or not _is_torchs(optimizer))
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    )


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _hashable(value: Any) -> Hashable:
    """A setting as something that can be compared and looked up."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value if isinstance(value, Hashable) else repr(value)


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; of a sharded one, what this rank has."""
    is_plain = type(tensor) is nn.Parameter or not hasattr(tensor, "device_mesh")
    return (tensor if is_plain else torch_private.local_of(tensor)).data_ptr()


def memory_of(parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> Hashable:
    """Where a program finds parameters and the state of optimizers: loading a checkpoint replaces the second.

    Without ``parameters``, for a program that is given all tensors anew: only which there are.
    """
    states = tuple((id(o.state), tuple(map(len, o.state.values()))) for o in optimizers)
    held = [s.values() for o in optimizers for s in o.state.values()] if parameters else []
    tensors = tuple([id(v) for values in held for v in values if isinstance(v, Tensor)])
    return (tuple([_address(p) for p in parameters]), states, tensors)


def trains(parameters: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which parameters are not frozen."""
    return tuple([p.requires_grad for p in parameters])


class TrainedInWindow:
    """What trains as a window begins.

    What was added up for a parameter that is frozen since is the loop's to reduce: no program knows of it.
    """

    def __init__(self) -> None:
        self.as_it_began: tuple[bool, ...] = ()
        self._has_changed = False

    def has_changed(self, parameters: Sequence[Tensor], index: int) -> bool:
        """Whether other parameters train in micro-step ``index``, or did before it, than in the first of its window."""
        now = trains(parameters)
        if index == 0:
            self.as_it_began, self._has_changed = now, False
        self._has_changed = self._has_changed or now != self.as_it_began
        return self._has_changed
