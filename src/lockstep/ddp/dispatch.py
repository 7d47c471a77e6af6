"""Which wrapper a graph belongs to: the stand-in for dynamo's DDPOptimizer, as long as any wrapper of ours lives.

Dynamo asks for one per frame that it compiles.  Mostly that is a frame inside a wrapper's forward, whose graphs belong
to that wrapper.  Elsewhere it is found by the parameters among the graph's inputs: a block that a checkpoint compiles
anew inside the backward, or a function that calls the wrapper.

[Note: inlined]  Where a compiled function calls the wrapper, the wrapped module becomes a part of that function's
graph.  What the wrapper does before and after its forward (buffers, checks, hooks on outputs) is not for a graph; so
the forward leaves a mark in it, and the graph runs between those two.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.engine.registry import slot_of
from lockstep.engine.step_guard import SoleOptimizer, before_update

if TYPE_CHECKING:
    from lockstep.ddp.wrapper import DistributedDataParallel

_serials = count()
_wrappers: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()


def enter(wrapper: DistributedDataParallel) -> int:
    """Make a wrapper known; returns the number by which graphs name it."""
    serial = next(_serials)
    _wrappers[serial] = wrapper
    return serial


def any_alive() -> bool:
    """Whether there is a wrapper that a graph could belong to."""
    return bool(_wrappers)


def are_on(inputs: Any, device: torch.device) -> bool:
    """Whether all tensors among the inputs of a forward are on ``device`` already."""
    if isinstance(inputs, Tensor):
        return inputs.device == device
    if isinstance(inputs, dict):
        return all(are_on(value, device) for value in inputs.values())
    return not isinstance(inputs, (list, tuple)) or all(are_on(value, device) for value in inputs)


class GraphDispatcher:
    """Compiles a graph for the wrapper that it belongs to, with what the user's backend is."""

    def __init__(self, active: DistributedDataParallel | None, backend: Callable[..., Any]) -> None:
        self._active = active
        self._backend = backend

    def compile_fn(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """What dynamo calls with each graph of the frame."""
        inlined = _take_marks(gm)
        for wrapper, is_training in inlined.items():
            wrapper._parts.compilation.ask_once(is_training)
        owner = self._active or _owner_of(inputs)
        if owner is None:
            compiled = self._backend(gm, inputs, **options)
        else:
            compiled = owner._parts.compilation.compiler_for(self._backend).compile_fn(gm, inputs, **options)
        if inlined:
            return Inlined(compiled, inlined)
        # What a forward does to its own parameters is not an update.
        updated = _parameters_changed_by(gm, inputs) if self._active is None else []
        return Updating(compiled, updated) if updated else compiled


class Inlined:
    """A graph with the forward of a wrapper in it; see [Note: inlined]."""

    def __init__(self, compiled: Callable[..., Any], wrappers: dict[DistributedDataParallel, bool]) -> None:
        self._compiled = compiled
        self._wrappers = [(weakref.ref(wrapper), is_training) for wrapper, is_training in wrappers.items()]

    @torch_private.leave_to_python
    def __call__(self, *args: Any) -> Any:
        alive = [(w, is_training) for r, is_training in self._wrappers if (w := r()) is not None]
        for wrapper, is_training in alive:
            with torch.set_grad_enabled(is_training):
                wrapper._pre_forward()
        outputs = self._compiled(*args)
        for wrapper, is_training in alive:
            with torch.set_grad_enabled(is_training):
                wrapper._post_forward(outputs)
        return outputs


class Updating:
    """A graph that updates parameters (a compiled optimizer step): checked as the optimizer itself would be."""

    def __init__(self, compiled: Callable[..., Any], parameters: Sequence[Tensor]) -> None:
        self._compiled = compiled
        self._ids = {id(parameter) for parameter in parameters}
        steps = {found[0] for found in map(slot_of, parameters) if found is not None}
        self._steps = [weakref.ref(step) for step in steps]
        self._optimizer = SoleOptimizer(self._ids)

    @torch_private.leave_to_python
    def __call__(self, *args: Any) -> Any:
        self._optimizer.note_settings()
        for reference in self._steps:
            step = reference()
            if step is not None:
                step.reducer.finiteness.refuse_compiled(step.reducer.slots)
                before_update(step, lambda: self._ids)
        return self._compiled(*args)


def _parameters_changed_by(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """The parameters of wrapped models that operators of a graph change in place."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=False))
    # What an optimizer has is not an input to dynamo, but belongs to the graph.
    values |= {node: getattr(gm, node.target, None) for node in gm.graph.nodes if node.op == "get_attr"}
    known = {node: value for node, value in values.items() if isinstance(value, Tensor) and slot_of(value) is not None}
    changed: list[Tensor] = []
    for node in gm.graph.nodes if known else ():
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name.split(".")[0].endswith("_") and node.args:
            first = node.args[0]
            targets = first if isinstance(first, (list, tuple)) else (first,)
            changed += [known[target] for target in targets if isinstance(target, fx.Node) and target in known]
    return changed


def _take_marks(gm: fx.GraphModule) -> dict[DistributedDataParallel, bool]:
    """Take the marks out of a graph: the wrappers that were inlined, and whether gradients are wanted there."""
    found: dict[DistributedDataParallel, bool] = {}
    marks = gm.graph.find_nodes(op="call_function", target=torch.ops.lockstep.forward_of)
    marks += gm.graph.find_nodes(op="call_function", target=torch.ops.lockstep.forward_of.default)
    for mark in marks:
        serial, is_training = mark.args
        wrapper = _wrappers.get(serial)
        if wrapper is not None:
            found[wrapper] = found.get(wrapper, False) or is_training
        gm.graph.erase_node(mark)
    if marks:
        gm.recompile()
    return found


def _owner_of(inputs: Sequence[Any]) -> DistributedDataParallel | None:
    """The wrapper that most of a graph's parameters belong to."""
    steps = Counter(found[0] for value in inputs if isinstance(value, Tensor) and (found := slot_of(value)) is not None)
    for step, _ in steps.most_common(1):
        return next((wrapper for wrapper in list(_wrappers.values()) if wrapper.step is step), None)
    return None
