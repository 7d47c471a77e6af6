"""Settings of optimizers that change from step to step: numbers in the optimizer, inputs of a program.

A scheduler may move more than the rate: OneCycleLR and CyclicLR move a momentum or betas, others the weight decay.  A
program that holds such a number is good for one step.  So a setting that keeps changing becomes an input, where the
optimizer's arithmetic is known to do with a tensor in its place; the numbers in the optimizer stay plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NUM_CHANGES = 2  # of a setting, after which it is taken to go on changing
# Of which optimizers of torch the arithmetic was gone through, and tested: which of their settings may be a tensor.
_TAKEN: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("betas", "weight_decay", "eps"),
    torch.optim.AdamW: ("betas", "weight_decay", "eps"),
    torch.optim.SGD: ("momentum", "weight_decay"),
    torch.optim.RMSprop: ("momentum", "alpha", "weight_decay"),
}


class NotTaken(Exception):
    """An optimizer does something with a setting that a tensor cannot stand for."""


class Place(NamedTuple):
    """A setting of one group of parameters."""

    optimizer: int
    group: int
    name: str


class Numbers:
    """What a program reads of optimizers anew in each step: the rates, and the settings that keep changing."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._device = device
        self._dtype = torch.float64 if device.type == "cpu" else torch.float32
        self._tensors: list[Tensor] = []
        self._last: dict[Place, tuple[float, ...]] = {}
        self._num_changes: Counter[Place] = Counter()
        self._changing: set[Place] = set()

    # ---------------------------------------------------------------- which change

    def follow(self) -> bool:
        """Before an update: look at the settings; returns whether one more is an input from now on."""
        known = len(self._changing)
        for place, value in self._may_be_taken():
            last = self._last.get(place)
            if last is not None and value != last:
                self._num_changes[place] += 1
                if self._num_changes[place] >= _NUM_CHANGES:
                    self._changing.add(place)
            self._last[place] = value
        return len(self._changing) > known

    def _may_be_taken(self) -> Iterator[tuple[Place, tuple[float, ...]]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for name in _TAKEN.get(type(optimizer), ()):
                    value = group.get(name)
                    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
                    if all(type(v) in (int, float) for v in values):
                        yield Place(number, index, name), values

    def kind(self, settings: Sequence[Sequence[tuple[str, Any]]]) -> Hashable:
        """The settings that a program holds; of those that it reads, only on which side of 0 they are."""
        if not self._changing:
            return tuple(settings)
        groups = [(n, i) for n, optimizer in enumerate(self._optimizers) for i in range(len(optimizer.param_groups))]
        return tuple(
            tuple(
                (name, _signs(value) if Place(number, index, name) in self._changing else value)
                for name, value in group
            )
            for (number, index), group in zip(groups, settings, strict=True)
        )

    # ---------------------------------------------------------------- as inputs

    def tensors(self) -> list[Tensor]:
        """All of them as they are now, group by group: the rate, then what changes."""
        values = [
            float(v)
            for number, optimizer in enumerate(self._optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for v in (group["lr"], *self._values(number, index, group))
        ]
        while len(self._tensors) < len(values):
            self._tensors.append(torch.zeros((), dtype=self._dtype, device=self._device))
        for tensor, value in zip(self._tensors, values, strict=False):
            tensor.fill_(value)
        return self._tensors[: len(values)]

    def _values(self, number: int, index: int, group: dict[str, Any]) -> list[float]:
        found: list[float] = []
        for name in self._names(number, index):
            value = group[name]
            found += value if isinstance(value, (tuple, list)) else [value]
        return found

    def _names(self, number: int, index: int) -> list[str]:
        return sorted(p.name for p in self._changing if (p.optimizer, p.group) == (number, index))

    def in_place(self, optimizer: torch.optim.Optimizer, index: int, inputs: Iterator[Tensor]) -> dict[str, Any]:
        """The settings of a group for a stand-in, which computes with the program's inputs."""
        number = next(n for n, own in enumerate(self._optimizers) if own is optimizer)
        group = optimizer.param_groups[index]
        changed: dict[str, Any] = {"lr": next(inputs)}
        for name in self._names(number, index):
            value = group[name]
            if isinstance(value, (tuple, list)):
                changed[name] = tuple(Setting(v, next(inputs)) for v in value)
            else:
                changed[name] = Setting(value, next(inputs))
        return changed

    def as_inputs(self) -> AbstractContextManager[Any]:
        """Within this context torch's functions take settings as what they are read from."""
        return _Reading() if self._changing else nullcontext()


def _signs(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple((v > 0) - (v < 0) for v in values)


class Setting(float):
    """A number of an optimizer, with the tensor that a program reads it from.

    It compares as the number that it was when the program was made, since optimizers ask whether it is 0, which is a
    part of the program's kind; and it computes as the tensor.
    """

    tensor: Tensor

    def __new__(cls, value: float, tensor: Tensor) -> Setting:
        made = super().__new__(cls, value)
        made.tensor = tensor
        return made

    def __neg__(self) -> Setting:
        return Setting(-float(self), -self.tensor)


def _computing(name: str) -> Callable[[Setting, Any], Any]:
    of_numbers, of_tensors = getattr(float, name), getattr(Tensor, name)

    def compute(self: Setting, other: Any) -> Any:
        if isinstance(other, Tensor):
            return of_tensors(self.tensor, other)
        if not isinstance(other, (int, float)):
            return NotImplemented
        value = other.tensor if isinstance(other, Setting) else float(other)
        return Setting(of_numbers(self, float(other)), of_tensors(self.tensor, value))

    return compute


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(Setting, _side, _computing(_side))


# ---------------------------------------------------------------- torch's functions

# Those that take a tensor where they take a number.
_ALIKE = frozenset(
    name
    for plain in ("mul", "add", "sub", "div", "truediv", "true_divide", "pow", "rsub", "rdiv")
    for name in (plain, f"{plain}_", f"__{plain}__", f"__r{plain}__", f"__i{plain}__")
) | {"_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"}


class _Reading(TorchFunctionMode):
    """Puts the tensor of a setting in its place, in ways that each function understands; never the number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, Setting) for value in _flat([args, kwargs])):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        way = _WAYS.get(name.rstrip("_") if name.startswith("_foreach") else name)
        if name in _ALIKE:
            return func(*map(_read, args), **{key: _read(value) for key, value in kwargs.items()})
        if way is None:
            raise NotTaken(f"an optimizer gives a setting that changes in every step to {name}(), as a number")
        return way(func, *args, **kwargs)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value


def _read(value: Any) -> Any:
    return value.tensor if isinstance(value, Setting) else value


def _scaled(tensors: Sequence[Tensor], by: Any) -> list[Tensor]:
    by = _read(by)
    return [t * (by.to(t.dtype) if t.dim() == 0 else by) for t in tensors]  # two of no dimension would become wider


def _add(func: Any, tensors: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(other, (list, tuple)):
        other = [_read(other).to(tensor.dtype).expand_as(tensor) for tensor in tensors]
    return func(tensors, _scaled(other, alpha) if isinstance(alpha, Setting) else other)


def _lerp(func: Any, tensors: Any, ends: Any, weight: Any) -> Any:
    away = _scaled([end - tensor for tensor, end in zip(tensors, ends, strict=True)], weight)
    if not func.__name__.endswith("_"):
        return [tensor + distance for tensor, distance in zip(tensors, away, strict=True)]
    for tensor, distance in zip(tensors, away, strict=True):
        tensor.add_(distance)
    return tensors


def _of_product(func: Any, tensors: Any, one: Any, other: Any, value: Any = 1) -> Any:
    return func(tensors, _scaled(one, value), other)


def _pow(func: Any, base: Any, exponents: Any) -> Any:
    return [torch.pow(_read(base), exponent) for exponent in exponents]


_WAYS: dict[str, Callable[..., Any]] = {
    "_foreach_add": _add,
    "_foreach_lerp": _lerp,
    "_foreach_addcmul": _of_product,
    "_foreach_addcdiv": _of_product,
    "_foreach_pow": _pow,
}
