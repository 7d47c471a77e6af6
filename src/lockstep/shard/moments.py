"""The moments of a unit in a step: before and after its forward, before and after its backward.

    before_forward    gather, start gathering what runs next; have autograd tell when the backward has left the inputs
    after_forward     free; have autograd tell when the backward comes to the outputs
    before_backward   gather again, start gathering what ran before
    after_backward    free

[Note: recomputation]  A checkpoint runs the forward again inside the backward.  The unit is whole then if the
backward has come to its outputs before; if not (the checkpoint is around the unit), it is a forward like any other, but
that the unit stays whole, since its backward comes next, and is not part of the order of forwards.

[Note: second derivatives]  A backward that is recorded itself (``create_graph``) will be gone through once more, and no
unit is told when that comes to it.  So what it has gathered stays whole until a backward has brought gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.used import find_tensors
from lockstep.shard.nest import cast_floats, map_tensors
from lockstep.shard.root import root_of
from lockstep.shard.unit import Phase, Unit

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@torch_private.leave_to_python
def before_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    root = root_of(unit)
    if root.running is None:
        root.forget_broken_backward()
    if unit.phase is Phase.BACKWARD:  # see [Note: recomputation]
        unit.wait()
        return _cast_inputs(unit, args, kwargs)
    is_first = unit.phase is not Phase.FORWARD
    if root.running is None:
        args, kwargs = _move_inputs(unit, args, kwargs)
        root.begin_forward(unit)
    if is_first or unit.num_modules == 1:
        unit.calls.begin_round()
    if is_first and unit.num_modules > 1:
        unit.modules_to_run = set(unit.modules)
    unit.phase = Phase.FORWARD
    args, kwargs = _cast_inputs(unit, args, kwargs)
    if not torch_private.in_backward():
        unit.refresh()
    unit.wait()
    if is_first and not torch_private.in_backward():
        for following in root.next_in_forward(unit):
            if following is not unit:
                following.start_ahead()
    return _watch_inputs(unit, args, kwargs)


@torch_private.leave_to_python
def after_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    root = root_of(unit)
    if unit.phase is Phase.BACKWARD:
        return _cast_output(unit, output)
    if unit.num_modules > 1:
        unit.modules_to_run.discard(module)
    if not unit.modules_to_run:
        unit.phase = Phase.IDLE
        if not torch_private.in_backward():
            root.note_ran(unit)
        if _frees_now(unit):
            _require_own_memory(unit, output)
            unit.free_after_forward()
    output = _cast_output(unit, output)
    if torch.is_grad_enabled():
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(_Before(unit))
    if root.running is unit:
        if root.attendance.is_idle and torch.is_grad_enabled():  # see uneven.py, [Note: zeros]
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(torch.zeros_like)
        for other in root.units:
            if other.modules_to_run and other is not unit:  # only some of its modules have run
                other.modules_to_run.clear()
                other.phase = Phase.IDLE
                root.note_ran(other)
                if _frees_now(other):
                    other.free_after_forward()
        root.end_forward(output)
    return output


def _frees_now(unit: Unit) -> bool:
    """Whether a unit is of no use after its forward.

    The root is needed at once by its backward.  After an evaluation none comes, and ``model.parameters()`` would be the
    whole ones: clipping or dropping gradients there would miss those of the shards.
    """
    if root_of(unit).is_recorded:
        return False  # see [Note: second derivatives]
    if torch_private.in_backward() and torch.is_grad_enabled():
        return False  # its backward is next, see [Note: recomputation]
    is_open = unit.reshard_after_forward is None and unit.gathers_in_backward
    return unit.frees_after_forward or (is_open and not torch.is_grad_enabled())


def _require_own_memory(unit: Unit, output: Any) -> None:
    """Raise if a unit that is about to be freed returns one of its parameters, or a view of one."""
    for tensor in find_tensors(output):
        for store in unit.stores:
            if store.holds(tensor):
                raise RuntimeError(
                    f"{unit.name} returns a parameter of its own, or a view of one (shape {tuple(tensor.shape)}), and "
                    "is freed after its forward: what was returned would have no memory. Fix: return a clone(), or "
                    "shard that module with reshard_after_forward=False."
                )


class _Before:
    """The hook on an output; an object, so that it has a name in traces of autograd."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, gradient: Tensor) -> None:
        _before_backward(self._unit)


@torch_private.leave_to_python
def _before_backward(unit: Unit) -> None:
    root = root_of(unit)
    root.note_backward()
    root.is_recorded = root.is_recorded or torch.is_grad_enabled()  # see [Note: second derivatives]
    if unit.phase is Phase.BACKWARD and unit.is_full:
        return
    unit.phase = Phase.BACKWARD
    with torch_private.RecordFunction(f"lockstep::before_backward {unit.name}"):
        if unit.parameters:
            root.team_of(unit).begin_unit(unit)
        if unit.gathers_in_backward:
            unit.wait()
        for following in root.next_in_backward(unit):
            if following.gathers_in_backward:
                following.start_ahead()


@torch_private.leave_to_python
def _after_backward(unit: Unit, node: Any) -> None:
    root = root_of(unit)
    is_over, round_is_over = unit.calls.end(node)
    if is_over and unit.parameters:
        root.team_of(unit).end_unit(unit)
    if not round_is_over:
        return  # see calls.py, [Note: rounds]
    unit.phase = Phase.IDLE
    if unit.reshard_after_backward and not root.is_recorded:
        unit.reshard()


class _After(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs when all of the unit's backward has run."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        unit.calls.note(ctx)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        _after_backward(ctx.unit, ctx)
        return (None, *gradients)


def _watch_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if not torch.is_grad_enabled():
        return args, kwargs
    watched = [t for t in find_tensors((args, kwargs)) if t.requires_grad]
    if not watched:
        unit.calls.note_unwatched()
        return args, kwargs
    outputs = iter(_After.apply(unit, *watched))
    by_id: dict[int, Tensor] = {id(t): o for t, o in zip(watched, outputs, strict=True)}

    def exchange(tensor: Tensor) -> Tensor:
        return by_id.get(id(tensor), tensor)

    return map_tensors(exchange, args), map_tensors(exchange, kwargs)


def _cast_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    policy = unit.policy
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    return cast_floats(policy.param_dtype, args), cast_floats(policy.param_dtype, kwargs)


def _cast_output(unit: Unit, output: Any) -> Any:
    dtype = unit.policy.output_dtype
    return output if dtype is None else cast_floats(dtype, output)


def _move_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """As torch does, for the outermost unit only."""
    if unit.device.type == "cpu" or not (args or kwargs):
        return args, kwargs
    (moved,), (moved_kwargs,) = torch_private.inputs_to_device(args, kwargs, unit.device, False)
    return moved, moved_kwargs
