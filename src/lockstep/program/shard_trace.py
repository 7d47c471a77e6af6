"""A sharded model's forward and backward in a trace of the whole step.

What goes into a program are the shards of this rank.  A unit's first forward puts a gather into it, and for the time of
its forward the modules have the whole parameters, which are leaves of autograd there; the gradients of these leave for
the step, and the shards of their means come back.

[Note: gathered again]  A unit that is freed after its forward is gathered a second time in the backward.  What autograd
saves of the first gathering is saved as its place in it, and found in the second one, which is put into the program
when it is first asked for: behind the gradient of the unit's output, so that no compiler can bring it forward.

[Note: absent]  Between its forward and the backward, and where it never ran, a freed unit has no parameters to read.
The loop has shards there; a program would take them for constants.  So who reads one makes the step untraceable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep import torch_private
from lockstep.engine.used import find_tensors
from lockstep.program.shards import Shards
from lockstep.program.untraceable import Untraceable
from lockstep.shard.graph_ops import views_of
from lockstep.shard.nest import cast_floats
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.unit import Unit


@dataclass(frozen=True)
class _Place:
    """A tensor that autograd saved, as what it is of the whole parameters of a store."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ShardTrace:
    """One trace of one sharded model."""

    def __init__(self, shards: Shards) -> None:
        """Made before the trace begins: what it makes is no part of it."""
        self._shards = shards
        self._stores = shards.stores
        self._absent = {p: _Absent.of(p) for unit in shards.root.units for p in unit.parameters}
        self.use({})

    def use(self, locals_of: Mapping[int, Tensor]) -> None:
        """Begin, with the program's shards by ``id`` of their parameter."""
        self._locals = locals_of
        self._leaves: dict[int, list[Tensor]] = {}  # whole parameters, by number of their store
        self._numbers: dict[int, int] = {}  # by the memory that a flat tensor of whole parameters lies in
        self._seconds: dict[int, Tensor] = {}  # gathered again
        self._gradient_of: dict[Unit, Tensor] = {}  # of an output
        self._latest: list[Tensor] = []  # the gradient that came to any unit last
        self._depth: Counter[Unit] = Counter()  # of calls within each other
        self._is_backward = False

    # ---------------------------------------------------------------- the modules

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let units run in the trace, as long as the context lasts."""
        units = self._shards.root.units
        before = [(p, owner, name) for unit in units for p in unit.parameters for owner, name in _owners(p)]
        registered = [owner._parameters[name] for _, owner, name in before]
        for unit in units:
            unit.traced_by = self.call
            self._hide(unit)
        try:
            is_any_again = any(map(self._gathers_again, units))
            with saved_tensors_hooks(self._pack, self._unpack) if is_any_again else nullcontext():
                yield
        finally:
            for unit in units:
                unit.traced_by = None
            for (_, owner, name), parameter in zip(before, registered, strict=True):
                owner._parameters[name] = parameter

    def call(self, unit: Unit, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module of a unit, in the forward or (checkpoints) once more in the backward."""
        policy = unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floats(policy.param_dtype, args), cast_floats(policy.param_dtype, kwargs)
        numbers = self._numbers_of(unit)
        first = [self._first_leaves(number) for number in numbers]
        is_again = self._is_backward and self._gathers_again(unit)
        self._show(unit, [self._leaves_in(number, self._again(number)) for number in numbers] if is_again else first)
        self._depth[unit] += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth[unit] -= 1
            if self._is_backward:
                self._show(unit, first)
            elif unit.frees_after_forward and not self._depth[unit]:
                self._hide(unit)
        if policy.output_dtype is not None:
            output = cast_floats(policy.output_dtype, output)
        if torch.is_grad_enabled() and not self._is_backward:
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note_gradient, unit))
        return output

    def _numbers_of(self, unit: Unit) -> list[int]:
        return [number for number, (owner, _) in enumerate(self._stores) if owner is unit]

    def _show(self, unit: Unit, leaves: list[list[Tensor]]) -> None:
        for store, wholes in zip(unit.stores, leaves, strict=True):
            for parameter, whole in zip(store.parameters, wholes, strict=True):
                _register(parameter, whole)

    def _hide(self, unit: Unit) -> None:
        """See [Note: absent]."""
        for parameter in unit.parameters:
            _register(parameter, self._absent[parameter])

    # ---------------------------------------------------------------- whole parameters

    def _first_leaves(self, number: int) -> list[Tensor]:
        if number not in self._leaves:
            unit, store = self._stores[number]
            if unit.mesh.is_alone:
                shards = [self._locals[id(p.sharded)] for p in store.parameters]
                wholes = [t.view(p.shape).to(store.dtype) for t, p in zip(shards, store.parameters, strict=True)]
                self._leaves[number] = _leaves(store.parameters, wholes)
            else:
                flat = self._gather(number, again=False, after=[])
                if self._gathers_again(unit):
                    self._numbers[torch_private.storage_of(flat)] = number
                self._leaves[number] = self._leaves_in(number, flat)
        return self._leaves[number]

    def _leaves_in(self, number: int, flat: Tensor) -> list[Tensor]:
        _, store = self._stores[number]
        _, _, _, sizes, ndims = store.graph_facts
        return _leaves(store.parameters, views_of(flat, sizes, ndims))

    @staticmethod
    def _gathers_again(unit: Unit) -> bool:
        return unit.gathers_again and not unit.mesh.is_alone

    def _gather(self, number: int, *, again: bool, after: list[Tensor]) -> Tensor:
        _, store = self._stores[number]
        shards = [self._locals[id(parameter.sharded)] for parameter in store.parameters]
        flat, _ = torch.ops.lockstep.program_gather(shards, after, number, again)
        return flat  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- gathered again

    def _pack(self, tensor: Tensor) -> Any:
        number = self._numbers.get(torch_private.storage_of(tensor)) if self._numbers else None
        if number is None or tensor.dtype is not self._stores[number][1].dtype:
            return tensor
        return _Place(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> Any:
        if not isinstance(saved, _Place):
            return saved
        return self._again(saved.number).as_strided(saved.shape, saved.stride, saved.offset)

    def _again(self, number: int) -> Tensor:
        if number not in self._seconds:
            unit, _ = self._stores[number]
            gradient = self._gradient_of.get(unit)
            after = [gradient] if gradient is not None else self._latest
            self._seconds[number] = self._gather(number, again=True, after=after)
        return self._seconds[number]

    def _note_gradient(self, unit: Unit, gradient: Tensor) -> None:
        self._gradient_of.setdefault(unit, gradient)
        self._latest = [gradient]

    # ---------------------------------------------------------------- gradients

    def gradients(self, loss: Tensor) -> dict[int, Tensor]:
        """The gradients of whole parameters, by ``id`` of the sharded ones."""
        self._is_backward = True
        self._latest = [loss.detach()]
        for unit in {self._stores[number][0] for number in self._leaves}:  # for what checkpoints run once more
            self._show(unit, [self._leaves[number] for number in self._numbers_of(unit)])
        pairs = [
            (parameter, leaf)
            for number, leaves in self._leaves.items()
            for parameter, leaf in zip(self._stores[number][1].parameters, leaves, strict=True)
            if leaf.requires_grad
        ]
        found = torch.autograd.grad(loss, [leaf for _, leaf in pairs], allow_unused=True)
        return {id(p.sharded): g.detach() for (p, _), g in zip(pairs, found, strict=True) if g is not None}

    def reduced(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Whole gradients in, this rank's shards of their means out."""
        shards = self._shards
        if not shards.is_needed:
            return self._reduced_alone(gradients)
        tokens = []
        for bucket in shards.step.reducer.buckets:
            coming = [gradients[id(slot.leaf)] for slot in bucket.slots]
            tokens.append(torch.ops.lockstep.program_launch(coming, [], shards.serial, bucket.index))
        return shards.parts_of(torch.ops.lockstep.program_collect(tokens, shards.serial))

    def _reduced_alone(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        found = {}
        for unit, store in self._stores:
            for parameter in store.parameters:
                gradient = gradients.get(id(parameter.sharded))
                if gradient is not None:
                    gradient = gradient.to(unit.wants_reduce_dtype or gradient.dtype)
                    gradient = gradient if unit.divisor is None else gradient / unit.divisor
                    found[id(parameter.sharded)] = gradient.to(parameter.sharded.dtype)
        return found

    def sum(self, value: Tensor) -> Tensor:
        """Add a number up over all shards."""
        if not self._shards.is_needed:
            return value
        return torch.ops.lockstep.program_sum(value, [])  # type: ignore[no-any-return]

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, of that of this rank's shards."""
        wide = norm.float() if norm.dtype.itemsize < 4 else norm
        return self.sum(wide.square()).sqrt().to(norm.dtype) if self._shards.is_needed else norm


def _leaves(parameters: list[ShardedParameter], wholes: list[Tensor]) -> list[Tensor]:
    found = []
    for parameter, whole in zip(parameters, wholes, strict=True):
        leaf = whole.detach().requires_grad_(parameter.sharded.requires_grad)
        if leaf.requires_grad:
            leaf.register_hook(Tensor.contiguous)  # as they are packed; where that is a copy, it is made at once
        found.append(leaf)
    return found


def _owners(parameter: ShardedParameter) -> Iterator[tuple[Any, str]]:
    for reference, name in parameter.owners:
        owner = reference()
        if owner is not None:
            yield owner, name


def _register(parameter: ShardedParameter, tensor: Tensor) -> None:
    for owner, name in _owners(parameter):
        owner._parameters[name] = tensor


# What may be asked of a parameter that is not there: facts that are the same whole and cut.
_FACTS = frozenset(
    (
        *("shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "itemsize", "names"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_nested", "is_quantized"),
    )
)
_QUESTIONS = frozenset(("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__"))


class _Absent(Tensor):
    """Stands for a whole parameter that is not gathered; it has facts, and no values."""

    @staticmethod
    def of(parameter: ShardedParameter) -> Tensor:
        like = parameter.local
        plain = torch.empty(1, dtype=like.dtype, device=like.device).expand(parameter.shape)
        made: Any = plain.as_subclass(_Absent)
        made._lockstep_name = parameter.name
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if asked in _FACTS or name in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})
        names = [vars(a).get("_lockstep_name", "") for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)]
        raise Untraceable(
            f"{', '.join(filter(None, names)) or 'a parameter'} is read outside of the forward of its unit, where a "
            "sharded model has only a part of it"
        )
