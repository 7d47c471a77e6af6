"""Numbers of a traced step that may differ by rank: found, compared, and given to the program as inputs.

A step that reads its rank, a coordinate or the like leaves plain numbers in its trace, whoever has kept them
meanwhile; nothing tells them from others but that ranks have other values in their place.  So ranks that trace a step
in the same call show each other the numbers of theirs.  Where the traces are the same otherwise, those that differ
become inputs, and all ranks have one program.

    arithmetic and comparison   x * 3, x > 3
    tensors filled with one     torch.full((2,), 3.0)
    places in a tensor          x[3], x[3:5], x.chunk(4)[3], torch.arange(3, 5); and what a backward makes of them

A place is read by an index that is a tensor then.  Where a number shapes the program (a branch, a size), traces differ,
each rank keeps its own, and ``explain`` names the line.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.graph.compare import OF_THIS_PROCESS
from lockstep.graph.numbers import dtype_beside
from lockstep.program.held import add_input

_aten = torch.ops.aten
_SAME = ("add", "sub", "mul", "div")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
# What stands for an operation with a number where the number is a tensor.
_OPERANDS = {
    **{getattr(_aten, name).Tensor: getattr(_aten, name).Tensor for name in (*_SAME, *(f"{n}_" for n in _SAME))},
    **{getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in (*_SAME, *_COMPARED)},
    _aten.rsub.Scalar: _aten.sub.Tensor,
}
_FILLED = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2, _aten.scalar_tensor.default: 0}
_PLACED = (_aten.select.int, _aten.slice.Tensor, _aten.select_backward.default, _aten.slice_backward.default)
_RANGES = (_aten.arange.start, _aten.arange.start_step)


@dataclass(frozen=True)
class Constant:
    """A number in the trace, and how the operation is done with an input in its place."""

    node: fx.Node
    value: int | float
    others: str  # all that the operation is given besides, for comparison
    put: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]  # (graph, node, input): what computes the same
    dtype: torch.dtype = torch.int64  # of the input, for a whole number

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device=_value(self.node).device)


class Constants:
    """The numbers of one trace that may become inputs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        _write_parts_alike(graph)
        memory = _Memory(graph)
        found = [_constant_in(node, memory) for node in graph.graph.nodes if node.op == "call_function"]
        self._found = {constant.node: constant for constant in found if constant is not None}

    def told(self) -> str:
        """What to tell other ranks of the trace."""
        return json.dumps([self._digest(), [constant.value for constant in self._found.values()]])

    def take_out(self, everyones: Sequence[str]) -> list[Tensor]:
        """Make inputs, the last ones, of the numbers in which the traces of ranks differ; returns this rank's."""
        told = [json.loads(text) for text in everyones]
        if len({digest for digest, _ in told}) != 1:
            return []
        columns = zip(*(values for _, values in told), strict=True)
        differing = [c for c, values in zip(self._found.values(), columns, strict=True) if len(set(values)) > 1]
        graph = self._graph.graph
        for index, constant in enumerate(differing):
            given = add_input(graph, f"number_of_rank_{index}")
            with graph.inserting_before(constant.node):
                made = constant.put(graph, constant.node, given)
            made.meta.update(constant.node.meta)
            constant.node.replace_all_uses_with(made)
            graph.erase_node(constant.node)
        self._graph.recompile()
        return [constant.tensor for constant in differing]

    def _digest(self) -> str:
        """Stands for all of a trace but the values of these numbers."""
        lines = []
        for node in self._graph.graph.nodes:
            constant = self._found.get(node)
            if constant is not None:
                lines.append(f"{node.name} {node.target} {constant.others} {type(constant.value).__name__}")
            elif node.op == "placeholder":
                value = node.meta.get("val")
                lines.append(f"{node.name} {(value.shape, value.dtype) if isinstance(value, Tensor) else value}")
            else:
                lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}")
        inner = [m for m in self._graph.modules() if isinstance(m, fx.GraphModule) and m is not self._graph]
        lines += [str(module.graph) for module in inner]
        return hashlib.sha256(OF_THIS_PROCESS.sub("", "\n".join(lines)).encode()).hexdigest()


# ---------------------------------------------------------------- which numbers


def _constant_in(node: fx.Node, memory: _Memory) -> Constant | None:
    if node.target in _OPERANDS:
        return _operand(node)
    if node.target in _FILLED:
        return _filling(node, _FILLED[node.target])
    if node.target in _PLACED:
        return _place(node, memory)
    return _range(node) if node.target in _RANGES else None


def _operand(node: fx.Node) -> Constant | None:
    args: Any = node.args
    if len(args) != 2 or node.kwargs or not isinstance(args[0], fx.Node):
        return None
    number, beside = args[1], _value(args[0])
    if type(number) not in (int, float) or not beside.is_floating_point():
        return None
    dtype = dtype_beside(number, beside)
    if dtype is None:
        return None

    def put(graph: fx.Graph, node: fx.Node, given: fx.Node) -> fx.Node:
        pair = (given, node.args[0]) if node.target is _aten.rsub.Scalar else (node.args[0], given)
        return graph.call_function(_OPERANDS[node.target], pair)

    return Constant(node, number, str(args[0]), put, dtype)


def _filling(node: fx.Node, position: int) -> Constant | None:
    args: Any = node.args
    number: Any = args[position] if len(args) > position else None
    made = _value(node)
    if type(number) not in (int, float) or made.dtype is torch.bool or made.is_complex():
        return None

    def put(graph: fx.Graph, node: fx.Node, given: fx.Node) -> fx.Node:
        cast = graph.call_function(_aten._to_copy.default, (given,), {"dtype": made.dtype})
        wide = graph.call_function(_aten.expand.default, (cast, list(made.shape)))
        return graph.call_function(_aten.clone.default, (wide,), {"memory_format": torch.contiguous_format})

    others = [argument for index, argument in enumerate(node.args) if index != position]
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return Constant(node, number, f"{others} {node.kwargs} {made.dtype}", put, dtype)


def _range(node: fx.Node) -> Constant | None:
    args: Any = node.args
    start, made = args[0], _value(node)
    step = args[2] if len(args) > 2 else 1
    if type(start) is not int or type(step) is not int or made.is_floating_point():
        return None

    def put(graph: fx.Graph, node: fx.Node, given: fx.Node) -> fx.Node:
        from_zero = graph.call_function(_aten.arange.start_step, (0, made.numel() * step, step), dict(node.kwargs))
        return graph.call_function(_aten.add.Tensor, (from_zero, given))

    return Constant(node, start, f"{list(made.shape)} {step} {node.kwargs}", put)


def _place(node: fx.Node, memory: _Memory) -> Constant | None:
    """A row, or a part, of a tensor; or a tensor of zeros with such a part."""
    is_backward = node.target in _PLACED[2:]
    args: Any = node.args
    if node.kwargs or not isinstance(args[0], fx.Node):
        return None
    source, result = _value(args[0]), _value(node)
    if not is_backward and not memory.may_be_copied(node):
        return None
    whole = result if is_backward else source
    dim = (args[2 if is_backward else 1] if len(args) > 1 else 0) % whole.dim()
    size = whole.shape[dim]
    at = 3 if is_backward else 2
    start = args[at] if len(args) > at and args[at] is not None else 0
    step = args[at + 2] if len(args) > at + 2 else 1
    if type(start) is not int or type(size) is not int or type(step) is not int:
        return None
    is_row = node.target in (_aten.select.int, _aten.select_backward.default)
    start = min(max(start + size if start < 0 else start, 0), size)
    length = 1 if is_row else (source if is_backward else result).shape[dim]

    def put(graph: fx.Graph, node: fx.Node, given: fx.Node) -> fx.Node:
        call = graph.call_function
        arguments = {"dtype": torch.int64, "device": source.device, "pin_memory": False}
        counted = call(_aten.arange.start_step, (0, length * step, step), arguments)
        index = call(_aten.add.Tensor, (counted, given))
        if not is_backward:
            part = call(_aten.index_select.default, (node.args[0], dim, index))
            return call(_aten.squeeze.dim, (part, dim)) if is_row else part
        unsqueezed = call(_aten.unsqueeze.default, (node.args[0], dim)) if is_row else node.args[0]
        zeros = call(_aten.new_zeros.default, (node.args[0], list(whole.shape)))
        return call(_aten.index_copy.default, (zeros, dim, index, unsqueezed))

    others = f"{args[0]} {list(whole.shape)} {dim} {length} {step}"
    return Constant(node, start, others, put)


# ---------------------------------------------------------------- the trace


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) and "val" in node.meta else torch.empty(0, dtype=torch.bool)


class _Memory:
    """Which memory a trace writes to, and when."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._place = {node: place for place, node in enumerate(graph.graph.nodes)}
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        self._returned: set[int] = set()
        for node, place in self._place.items():
            if node.op == "output":
                self._returned |= set(map(_memory_of, node.all_input_nodes))
            elif node.op == "call_function":
                written: list[fx.Node] = []
                fx.map_arg(torch_private.written_arguments(node.target, node.args, node.kwargs), written.append)
                for argument in written:
                    self._writes[_memory_of(argument)].append(place)

    def may_be_copied(self, view: fx.Node) -> bool:
        """Whether a copy does in the place of a view: nobody writes to the memory while it is used, or returns it."""
        memory = _memory_of(view)
        uses, waiting = {view}, [view]
        while waiting:
            users = [user for user in waiting.pop().users if user not in uses]
            uses.update(users)
            waiting += [user for user in users if _memory_of(user) == memory]
        first, last = self._place[view], max(map(self._place.__getitem__, uses))
        return memory not in self._returned and not any(first < place <= last for place in self._writes[memory])


def _memory_of(node: fx.Node) -> int:
    return torch_private.memory_of_trace(_value(node))


def _write_parts_alike(graph: fx.GraphModule) -> None:
    """Write one part of a tensor that was cut up, of which the others are not used, as a slice; and its gradient.

    Which of the parts it is shows in the order of operations otherwise, and not in a number.
    """
    for node in list(graph.graph.nodes):
        if node.target in (_aten.split.Tensor, _aten.split_with_sizes.default):
            _write_as_slices(graph.graph, node)
        elif node.target is _aten.cat.default:
            _write_as_slice_backward(graph.graph, node)
    graph.recompile()


def _write_as_slices(graph: fx.Graph, node: fx.Node) -> None:
    parts = [user for user in node.users if user.target is operator.getitem]
    if len(parts) != len(node.users) or all(part.users for part in parts) or node.kwargs:
        return
    args: Any = node.args
    dim = args[2] if len(args) > 2 else 0
    for part in parts:
        if part.users:
            which: Any = part.args[1]
            before = [node.meta["val"][index].shape[dim] for index in range(which)]
            size = node.meta["val"][which].shape[dim]
            with graph.inserting_before(part):
                made = graph.call_function(_aten.slice.Tensor, (args[0], dim, sum(before), sum(before) + size))
            made.meta.update(part.meta)
            part.replace_all_uses_with(made)
        graph.erase_node(part)
    graph.erase_node(node)


def _write_as_slice_backward(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    parts = list(args[0])
    rest = [part for part in parts if part.target is not _aten.zeros.default or len(part.users) > 1]
    if len(rest) != 1 or len(parts) < 2 or node.kwargs:
        return
    dim = (args[1] if len(args) > 1 else 0) % _value(node).dim()
    if any(_value(part).dtype != _value(node).dtype or _value(part).dim() == 0 for part in parts):
        return
    start = sum(_value(part).shape[dim] for part in parts[: parts.index(rest[0])])
    end = start + _value(rest[0]).shape[dim]
    with graph.inserting_before(node):
        made = graph.call_function(
            _aten.slice_backward.default, (rest[0], list(_value(node).shape), dim, start, end, 1)
        )
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    for part in parts:
        if part is not rest[0]:
            graph.erase_node(part)
