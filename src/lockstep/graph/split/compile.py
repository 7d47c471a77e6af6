"""Compiles the parts of a split graph one after the other, each with what the parts before really hand over.

[Note: real strides]  A compiler may give an output other strides than the traced program had (channels last).  The next
part has to be compiled for those.  Only a run of the compiled part shows them, so AOTAutograd is asked to answer the
first call with fake tensors; everything it does around the compiled code runs as it will run later.

[Note: a context for each part]  The tracing context is where AOTAutograd leaves what it found out about a graph, for
when the backward is compiled: often only when it first runs, after all parts.  One context for all parts would then
hold what belongs to the last; so each part has a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.graph.split.parts import Part, Split, attribute


def compile_parts(
    split: Split, example_inputs: Sequence[Any], compiler: Callable[..., Any], configs: dict[str, Any]
) -> fx.GraphModule:
    """Compile every part and return the module that calls them."""
    fake_mode = torch_private.fake_mode_for(example_inputs)
    values = _values_at_start(split.whole, example_inputs, fake_mode)
    grad_mode = torch.is_grad_enabled()
    try:
        for part in split.parts:
            torch.set_grad_enabled(grad_mode)  # a part may leave another mode behind, as the user's program does
            inputs = [values[node] for node in part.inputs]
            compiled, outputs = _compile(part, inputs, fake_mode, compiler, configs)
            values.update(zip(part.outputs, outputs, strict=True))
            delattr(split.caller, part.name)  # a module may not be replaced by a function otherwise
            setattr(split.caller, part.name, compiled)
    finally:
        torch.set_grad_enabled(grad_mode)
    return split.caller


def _values_at_start(gm: fx.GraphModule, example_inputs: Sequence[Any], fake_mode: Any) -> dict[fx.Node, Any]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, example_inputs, strict=True))
    values |= {node: attribute(gm, node) for node in gm.graph.nodes if node.op == "get_attr"}
    for node, value in values.items():
        if isinstance(value, Tensor):
            values[node] = torch_private.fake_tensor(value, fake_mode)
    return values


def _compile(
    part: Part, inputs: list[Any], fake_mode: Any, compiler: Callable[..., Any], configs: dict[str, Any]
) -> tuple[Any, Sequence[Any]]:
    for node, value in zip(part.module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["example_value"] = value  # passes before AOTAutograd read the strides here
    with torch_private.saved_tensor_hooks_wait(), torch_private.tracing_context_of_a_part() as answered_with_fakes:
        # [Note: a context for each part]
        compiled = compiler(part.module, inputs, **configs)
        # [Note: real strides]  A compiler without AOTAutograd runs the operators as traced, and so does this.
        run = compiled if answered_with_fakes() else torch_private.fake_copy(part.module, fake_mode)
        with torch_private.run_on_fakes(fake_mode):
            outputs = run(*inputs)
    return compiled, outputs
