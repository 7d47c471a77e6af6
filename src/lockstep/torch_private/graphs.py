"""Nodes of traced graphs: what they stand for, where they come from, what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def gradient_positions(output: Any) -> dict[int, int]:
    """For each plain input of a joint graph that gets a gradient: which output that is.  Empty for other graphs."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described = output.meta.get("desc") or ()
    return {
        what.grad_of.idx: position
        for position, what in enumerate(described)
        if isinstance(what, GradAOTOutput) and isinstance(what.grad_of, PlainAOTInput)
    }


def inputs_changed(output: Any) -> set[int]:
    """The plain inputs of a joint graph whose values change when it has run: what autograd keeps of them is stale."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput

    return {
        what.mutated_input.idx
        for what in output.meta.get("desc") or ()
        if isinstance(what, InputMutationAOTOutput) and isinstance(what.mutated_input, PlainAOTInput)
    }


def plain_inputs(graph: Any) -> dict[int, Any]:
    """The placeholders of a joint graph by the index of the argument they stand for."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return {
        node.meta["desc"].idx: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("desc"), PlainAOTInput)
    }


def copy_node_origin(source: Any, target: Any) -> None:
    """Let ``target`` count as coming from where ``source`` comes from: partitioners and traces read these keys."""
    for key in ("stack_trace", "seq_nr", "partitioner_tag", "nn_module_stack", "autograd_backward"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def new_graph_input(gm: Any, name: str, tensor: torch.Tensor, like: torch.Tensor) -> Any:
    """Give a graph that dynamo traced one more input, the last; ``like`` is a tensor of its trace.

    What compiles such a graph asks every input for its source in the user's program, and for a tensor without values.
    """
    last = list(gm.graph.find_nodes(op="placeholder"))
    before = last[-1].next if last else next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(before):
        node = gm.graph.placeholder(name)
    node._dynamo_source = None
    node.meta["example_value"] = like.fake_mode.from_tensor(tensor)  # type: ignore[attr-defined]
    return node


def size_hint(size: Any) -> int:
    """A number for a size that may be symbolic: what it was when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def node_flops(node: Any) -> float:
    """Floating point operations of a graph node that torch has a formula for; 0 for others."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(node.target, "_overloadpacket", None)
    formula = flop_registry.get(packet) if packet is not None else None
    if formula is None:
        return 0.0

    def value(x: Any) -> Any:
        # A symbolic size that is made a number becomes one for good: the graph would be compiled for this size only.
        found = x.meta.get("val") if isinstance(x, torch.fx.Node) else x
        if isinstance(found, torch.Tensor) and not all(isinstance(size, int) for size in found.shape):
            return torch.empty([size_hint(size) for size in found.shape], dtype=found.dtype, device="meta")
        return size_hint(found) if isinstance(found, torch.SymInt) else found

    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
        return float(formula(*args, **kwargs, out_val=value(node)))
    except Exception:  # a formula that wants something else, or several results
        return 0.0


def enters_autocast(target: Any) -> bool:
    """Whether a node of a traced graph begins an autocast region; the public context manager leaves no such node."""
    return target is torch.amp._enter_autocast  # type: ignore[attr-defined]


def exit_autocast() -> Callable[..., Any]:
    """The function that ends an autocast region inside a graph."""
    return torch.amp._exit_autocast  # type: ignore[attr-defined, no-any-return]


def exits_autocast(target: Any) -> bool:
    """Whether a node of a traced graph ends an autocast region."""
    return target is torch.amp._exit_autocast  # type: ignore[attr-defined]


def sets_grad_mode(target: Any) -> bool:
    """Whether a node of a traced graph switches gradients on or off (``no_grad`` becomes two of them)."""
    return target is torch._C._set_grad_enabled


def graph_input_name(node: Any) -> str:
    """What the program calls an input of a graph that dynamo traced; the node's own name is made up."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return str(node.target)
    return re.sub(r"^L\['(\w+)'\]", r"\1", name)
