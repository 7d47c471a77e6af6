"""What fused optimizers do to lists of shards, done to the local parts at once.

A fused optimizer is one operator over all parameters, gradients and states.  A DTensor works out for every tensor of
every list how its result would be sharded, in every step, which takes longer than the operator itself, and has no rule
for some.  It is known beforehand: they combine element with element, so where all lists are cut alike, each rank
does to its parts what one process would do to the whole.

[Note: the ordinary way]  Whatever is not known to be cut alike goes where it would have gone: other meshes, placements
or shapes within a position of the lists, sums that are still to be made (``Partial``), tracing, classes of their own,
a rank outside of the mesh.  Foreach operators are left alone, as DTensors are as fast with those.

[Note: kinds]  Tensors that are cut alike mostly share the object that says how; so each such object is looked at
once, and gets a number that is the same for all that say the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep import torch_private

_NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_MAX_SPECS = 10_000

_PLAIN = {Tensor, nn.Parameter}


class _NotKnown(Exception):
    """It is not known beforehand that local parts are enough."""


def install() -> None:
    """Let DTensors take the short way for these operators from now on."""
    handlers = torch_private.dtensor_handlers()
    for operator in operators():
        handlers.setdefault(operator, _run)


def operators() -> list[Any]:
    """All of them that this torch has."""
    packets = [packet for name in _NAMES if (packet := getattr(torch.ops.aten, name, None)) is not None]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        local = _Locals(args[0])
        mine = [local.of(arg) for arg in args]
        named = {name: local.of(arg) for name, arg in kwargs.items()}
    except _NotKnown:
        _run_ordinarily(operator, args, kwargs)
    else:
        operator(*mine, **named)


def _run_ordinarily(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """See [Note: the ordinary way]."""
    handlers = torch_private.dtensor_handlers()
    handlers.pop(operator, None)
    try:
        operator(*args, **kwargs)
    finally:
        handlers[operator] = _run


class _Locals:
    """The local parts of an operator's arguments, which are cut as those of its first list are."""

    def __init__(self, first: Any) -> None:
        if not isinstance(first, (list, tuple)) or set(map(type, first)) != {DTensor}:
            raise _NotKnown
        self._first = first
        self._kinds = _kinds.of(first)
        meshes = {_kinds.mesh_of[kind] for kind in set(self._kinds)}
        if len(meshes) != 1 or None in meshes:
            raise _NotKnown
        self._mesh = meshes.pop()
        self._parts = _parts_of(first)

    def of(self, arg: Any) -> Any:
        """An argument with local parts in the place of DTensors."""
        if arg is self._first:
            return self._parts
        if isinstance(arg, Tensor):
            return self._number(arg)
        if not isinstance(arg, (list, tuple)) or not any(isinstance(found, Tensor) for found in arg[:1]):
            return arg
        types = set(map(type, arg))
        if types == {DTensor}:
            if _kinds.of(arg) != self._kinds:
                raise _NotKnown
            return _parts_of(arg)
        if types <= _PLAIN and not any(tensor.ndim for tensor in arg):
            return arg  # a number for each, the same for all its elements
        raise _NotKnown

    def _number(self, tensor: Tensor) -> Tensor:
        """One number for all of them."""
        if tensor.ndim:
            raise _NotKnown
        if type(tensor) in _PLAIN:
            return tensor
        if type(tensor) is DTensor:
            spec = torch_private.spec_of(tensor)
            if spec.mesh == self._mesh and all(isinstance(placement, Replicate) for placement in spec.placements):
                return _parts_of([tensor])[0]
        raise _NotKnown


def _parts_of(tensors: Any) -> list[Tensor]:
    parts = list(map(torch_private.local_of, tensors))
    if set(map(type, parts)) != {Tensor}:
        raise _NotKnown
    return parts


class _Kinds:
    """See [Note: kinds]."""

    def __init__(self) -> None:
        self.mesh_of: list[Any] = []  # of each kind; None where local parts may not be enough
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        self._specs: list[Any] = []  # kept, since an id may be given again

    def of(self, tensors: Any) -> list[int]:
        """The kind of each tensor."""
        found = list(map(self._known.get, map(id, map(torch_private.spec_of, tensors))))
        if None not in found:
            return found  # type: ignore[return-value]
        return [self._look(torch_private.spec_of(tensor)) for tensor in tensors]

    def _look(self, spec: Any) -> int:
        if spec.tensor_meta is None or len(self._specs) >= _MAX_SPECS:
            raise _NotKnown
        key = (spec.mesh, spec.placements, spec.tensor_meta.shape)
        number = self._numbers.get(key)
        if number is None:
            is_local = all(isinstance(placement, _local_placements()) for placement in spec.placements)
            number = self._numbers[key] = len(self.mesh_of)
            self.mesh_of.append(spec.mesh if is_local and spec.mesh.get_coordinate() is not None else None)
        if id(spec) not in self._known:
            self._known[id(spec)] = number
            self._specs.append(spec)
        return number


def _local_placements() -> tuple[type, ...]:
    return Replicate, Shard, type(torch_private.strided_shard(0, 2))


_kinds = _Kinds()
