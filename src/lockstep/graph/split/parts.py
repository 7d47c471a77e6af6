"""Cuts a traced graph into parts that run one after the other, and the graph that calls them.

What a part takes from the parts before it comes in one of five ways; `Crossing` decides which:

    a tensor or an integer     an input of the part, and an output of the part that made it
    a constant                 written into the part
    a float or a boolean       computed again in the part: compilers take and return tensors and sizes, and a float that
                               they fold into a constant has no place among the outputs
    a module                   an attribute of each part that uses it: the body of a higher-order operator
    anything else              not at all: the graph is not cut between the node that makes it and the last user
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep import torch_private

_UNKNOWN = object()
_NOT_COMPUTED = ("placeholder", "get_attr", "output")


@dataclass
class Part:
    """A piece of a graph as a module of its own."""

    name: str
    module: fx.GraphModule
    inputs: list[fx.Node]  # nodes of the graph that was cut
    outputs: list[fx.Node]


@dataclass
class Split:
    """A graph, the parts that it was cut into, and the module that runs them in its place."""

    whole: fx.GraphModule
    parts: list[Part]
    caller: fx.GraphModule  # holds the parts, by their names


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a ``get_attr`` or ``call_module`` node refers to."""
    return operator.attrgetter(str(node.target))(gm)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", _UNKNOWN)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


class Crossing:
    """The nodes of a graph in an order that can be cut, and how the value of each gets over a cut."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.order = _unpack_early(gm.graph)
        self._position = {node: index for index, node in enumerate(self.order)}
        self._covered = self._uncuttable()
        self._symbols: dict[Any, fx.Node] = {}
        for node in gm.graph.nodes:
            value = _value(node)
            if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr.is_Symbol:
                self._symbols.setdefault(value.node.expr, node)

    def is_constant(self, node: fx.Node) -> bool:
        return node.op not in _NOT_COMPUTED and isinstance(_value(node), (bool, int, float))

    def is_module(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(attribute(self.gm, node), nn.Module)

    def is_repeated(self, node: fx.Node) -> bool:
        if node.op in _NOT_COMPUTED or not isinstance(_value(node), (torch.SymFloat, torch.SymBool)):
            return False
        return _is_item(node) or all(_scalar(_value(argument)) for argument in node.all_input_nodes)

    def is_passed(self, node: fx.Node) -> bool:
        return not (self.is_constant(node) or self.is_module(node) or self.is_repeated(node))

    def symbols_of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that define the sizes of this value; a compiled part must be given each of them by itself."""
        value = _value(node)
        if not isinstance(value, (Tensor, torch.SymInt)):
            return []
        from torch.fx.experimental.symbolic_shapes import free_symbols  # loads sympy, which eager training needs not

        found = (self._symbols.get(symbol) for symbol in sorted(free_symbols(value), key=str))
        return [definition for definition in found if definition is not None]

    def may_cut_after(self, node: fx.Node) -> bool:
        return not self._covered[self._position[node]]

    def has_output(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a part of these nodes would hand anything to the parts after it, or to the caller."""
        inside = set(nodes)
        return any(
            self.is_passed(node) and any(user not in inside and not _ends_mode(user) for user in node.users)
            for node in nodes
        )

    def _uncuttable(self) -> list[bool]:
        """Per node, whether the graph must not be cut right after it."""
        change = [0] * (len(self.order) + 1)
        depth = 0
        for index, node in enumerate(self.order):
            depth += _opens_level(node) - _closes_level(node)
            if depth > 0:
                change[index] += 1
                change[index + 1] -= 1
            value = _value(node)
            passes = value is _UNKNOWN or value is None or isinstance(value, Tensor) or _scalar(value)
            if not passes and not torch_private.enters_autocast(node.target):
                last = max((self._position.get(user, len(self.order)) for user in node.users), default=index)
                change[index] += 1
                change[last] -= 1
        covered, running = [], 0
        for index in range(len(self.order)):
            running += change[index]
            covered.append(running > 0)
        return covered


def _unpack_early(graph: fx.Graph) -> list[fx.Node]:
    """The computing nodes in order, each list or tuple taken apart right where it is made, so its items can cross."""
    order: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in _NOT_COMPUTED or _unpacks(node):
            continue
        order.append(node)
        _append_unpacking(node, order)
    return order


def _append_unpacking(node: fx.Node, order: list[fx.Node]) -> None:
    for user in node.users:
        if _unpacks(user) and user.args[0] is node:
            order.append(user)
            _append_unpacking(user, order)


def _unpacks(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not operator.getitem or len(node.all_input_nodes) != 1:
        return False
    source = node.all_input_nodes[0]
    return source.op not in _NOT_COMPUTED and isinstance(_value(source), (tuple, list))


# The levels of function transforms (vmap, grad, jvp): the tensors inside belong to a level and cannot leave it.
def _opens_level(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name.endswith("increment_nesting") or name == "_enter_dual_level"


def _closes_level(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name.endswith("decrement_nesting") or name == "_exit_dual_level"


def _ends_mode(node: fx.Node) -> bool:
    return torch_private.exits_autocast(node.target)


def cut(crossing: Crossing, pieces: Sequence[list[fx.Node]]) -> Split:
    """One part per piece; ``pieces`` are consecutive runs of ``crossing.order``.  Changes the graph: do not run it."""
    home = {node: index for index, piece in enumerate(pieces) for node in piece}
    _keep_what_floats_came_from(crossing, pieces, home)
    takers = [_Taker(crossing, home, index) for index in range(len(pieces))]
    for taker, piece in zip(takers, pieces, strict=True):
        for node in piece:
            if not _ends_mode(node):
                taker.take_arguments(node)
    caller = _Taker(crossing, home, len(pieces))
    caller.take_arguments(crossing.gm.graph.output_node())

    wanted = {node for taker in (*takers, caller) for node in taker.inputs}
    modes = _Modes()
    parts = []
    for index, (taker, piece) in enumerate(zip(takers, pieces, strict=True)):
        outputs = [node for node in piece if node in wanted]
        graph = _part_graph(taker, piece, outputs, modes)
        module = _graph_module(crossing.gm, graph, f"Part{index}")
        _carry_over(crossing.gm, module)
        parts.append(Part(f"lockstep_part_{index}", module, list(taker.inputs), outputs))
    modules = {part.name: part.module for part in parts}
    graph = _caller_graph(caller, parts, modes)
    return Split(crossing.gm, parts, _graph_module(crossing.gm, graph, "SplitGraph", modules))


def _keep_what_floats_came_from(crossing: Crossing, pieces: Sequence[list[fx.Node]], home: dict[fx.Node, int]) -> None:
    """A part that computes ``t.item()`` again must not see what happened to ``t`` in between: it gets a copy."""
    for node in list(home):
        if not (_is_item(node) and crossing.is_repeated(node)):
            continue
        source = node.all_input_nodes[0]
        if source.op == "placeholder" and all(_is_item(user) for user in source.users):
            continue  # how dynamo passes a float of the program; nothing can write to it
        piece = pieces[home[node]]
        with crossing.gm.graph.inserting_before(node):
            copy = source
            for method in ("detach", "clone"):
                copy = crossing.gm.graph.call_method(method, (copy,))
                copy.meta = dict(source.meta)
                if isinstance(_value(source), Tensor):
                    copy.meta["example_value"] = _value(source).detach()
                home[copy] = home[node]
                piece.insert(piece.index(node), copy)
        node.replace_input_with(source, copy)


class _Taker:
    """What one part (or the caller of all parts) needs from outside of itself."""

    def __init__(self, crossing: Crossing, home: dict[fx.Node, int], index: int) -> None:
        self.crossing, self._home, self._index = crossing, home, index
        self.inputs: dict[fx.Node, None] = {}
        self.modules: dict[fx.Node, None] = {}
        self.repeated: dict[fx.Node, None] = {}

    def take_arguments(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            self._take(argument)

    def literal(self, node: fx.Node) -> Any:
        """What stands for a node of another part that was not taken: its constant value."""
        assert self.crossing.is_constant(node), f"{node} crosses a cut but was not taken"
        return _value(node)

    def _take(self, node: fx.Node) -> None:
        here = self._home.get(node) == self._index
        if here or node in self.repeated or self.crossing.is_constant(node):
            return
        if self.crossing.is_module(node):
            self.modules[node] = None
        elif self.crossing.is_repeated(node):
            self.take_arguments(node)
            self.repeated[node] = None
        else:
            self.inputs[node] = None
            for definition in self.crossing.symbols_of(node):
                # A size that this part defines itself cannot be one of its inputs.
                if self._home.get(definition, -1) < self._index:
                    self.inputs.setdefault(definition)


class _Modes:
    """The autocast regions and the gradient mode that are in force between two parts."""

    def __init__(self) -> None:
        self.autocasts: list[fx.Node] = []
        self.set_grad: fx.Node | None = None

    def after(self, node: fx.Node) -> None:
        if torch_private.enters_autocast(node.target):
            self.autocasts.append(node)
        elif torch_private.exits_autocast(node.target):
            self.autocasts.remove(node.all_input_nodes[0])
        elif torch_private.sets_grad_mode(node.target):
            self.set_grad = node


def _part_graph(taker: _Taker, piece: list[fx.Node], outputs: list[fx.Node], modes: _Modes) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> Any:
        return copies[node] if node in copies else taker.literal(node)

    for node in taker.inputs:
        copies[node] = graph.placeholder(node.name, type_expr=node.type)
        copies[node].meta = dict(node.meta)
        # What an earlier part computed has no place in the user's program to guard on.
        copies[node]._dynamo_source = getattr(node, "_dynamo_source", None)  # type: ignore[attr-defined]
    # [Note: modes are entered inside]  Every part is called in the gradient mode of the whole graph and goes from there
    # to the mode that is in force at its start: whether a part has a backward is decided by the mode it is called in.
    resumed = [*([modes.set_grad] if modes.set_grad is not None else []), *modes.autocasts]
    for node in (*taker.modules, *resumed, *taker.repeated, *piece):
        copies[node] = graph.node_copy(node, copy_of)
    for node in piece:
        modes.after(node)
    for node in reversed(modes.autocasts):
        graph.call_function(torch_private.exit_autocast(), (copies[node],))
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def _caller_graph(taker: _Taker, parts: list[Part], modes: _Modes) -> fx.Graph:
    whole = taker.crossing.gm.graph
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in whole.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    needed = {node for part in parts for node in part.inputs} | set(taker.inputs)
    for node in whole.nodes:
        if node.op == "get_attr" and node in needed:
            copies[node] = graph.node_copy(node)
    for part in parts:
        if modes.set_grad is not None and part is not parts[0]:
            # [Note: modes are entered inside]
            graph.create_node(modes.set_grad.op, modes.set_grad.target, (torch.is_grad_enabled(),))
        call = graph.call_module(part.name, tuple(copies[node] for node in part.inputs))
        for index, node in enumerate(part.outputs):
            copies[node] = graph.call_function(operator.getitem, (call, index))
    for node in (*taker.modules, *taker.repeated):
        copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else taker.literal(n))
    output = whole.output_node()
    graph.output(fx.map_arg(output.args[0], lambda n: copies[n] if n in copies else taker.literal(n)))
    return graph


def _graph_module(
    gm: fx.GraphModule, graph: fx.Graph, name: str, parts: dict[str, fx.GraphModule] | None = None
) -> fx.GraphModule:
    root: dict[str, Any] = dict(parts or {})
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target) not in root:
            root[str(node.target)] = attribute(gm, node)
    return fx.GraphModule(root, graph, class_name=name)


def _carry_over(gm: fx.GraphModule, part: fx.GraphModule) -> None:
    """What the compilers read from dynamo's module besides its graph: its metadata, and marks put on it."""
    part.meta = dict(gm.meta)
    part.training = gm.training
    for name, value in gm.__dict__.items():
        if name not in part.__dict__ and not isinstance(value, nn.Module):
            part.__dict__[name] = value
    part.__dict__["compile_subgraph_reason"] = torch_private.split_reason(__file__)
