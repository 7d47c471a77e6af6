"""Numbers that differ by rank, taken out of a graph and given to it as inputs, so that one graph serves all ranks.

A compiler that asks for a rank, a group's rank, membership or a mesh coordinate gets a plain number, and what a model
computes of it stands in the graph.  Nothing tells such a number from others but that ranks have other values in its
place.  So ranks that compile a graph at the same time show each other their numbers; where the graphs are the same
otherwise, those that differ become inputs: tensors without dimensions, of which each rank has its own.

Taken out are numbers in whose place a tensor computes the same: operands of plain arithmetic with a tensor of floating
point numbers, what ``torch.tensor`` and ``torch.full`` are made of, and where a tensor is read (``x[rank]``,
``x[rank : rank + 2]``), by an index that is a tensor then.  A number in a branch or a size shapes the graph itself; it
stays, and is named.

[Note: a wait that costs nothing wrong]  A rank that does not hear of another in time leaves its graph as it is.  It
computes the same; only nobody shares it.  So this is no agreement, and needs none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.agree.board import Board
from lockstep.graph.compare import OF_THIS_PROCESS, exact_input

logger = logging.getLogger("lockstep.graph")

PATIENCE_SECONDS = 20.0
_OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(torch.add, torch.sub, torch.mul, torch.div),
)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_METHODS = ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")


class RankNumbers:
    """Finds the numbers in which the graphs of ranks differ, as long as they compile the same graphs together."""

    def __init__(self, board: Board | None, are_together: Callable[[], bool]) -> None:
        self._board = board
        self._are_together = are_together
        self._num_asked = 0
        self._is_over = board is None or board.world == 1

    def take_out(self, gm: fx.GraphModule) -> Taken | None:
        """Make inputs of the numbers that other ranks have other values of; None where there are none."""
        if self._is_over or not self._are_together():
            return None
        assert self._board is not None
        board, places = self._board, _places_in(gm)
        key = f"numbers of graph {self._num_asked}"
        self._num_asked += 1
        mine = [_digest_without(gm, places), [place.value for place in places.values()]]
        board.post(f"{key}/{board.rank}", json.dumps(mine))
        keys = [f"{key}/{rank}" for rank in range(board.world)]
        late = board.wait_for(keys, monotonic() + PATIENCE_SECONDS)
        told = [json.loads(text) for text in board.read_all(keys) if text]
        if late or len(told) < board.world or len({digest for digest, _ in told}) > 1:
            self._is_over = True  # ranks go different ways from here on
            return None
        values = [numbers for _, numbers in told]
        columns = zip(*values, strict=True)
        differing = [
            place for place, found in zip(places.values(), columns, strict=True) if any(v != found[0] for v in found)
        ]
        if not differing:
            return None
        logger.debug("%d numbers that differ by rank become inputs of a graph", len(differing))
        return Taken(gm, differing)


class Taken:
    """The numbers that were taken out of a graph; they come after its other inputs."""

    def __init__(self, gm: fx.GraphModule, places: Sequence[Place]) -> None:
        self._gm = gm
        # What was taken out, with its arguments; the input, and what was put in.
        self._changed: list[tuple[fx.Node, tuple[Any, ...], fx.Node, list[fx.Node]]] = []
        self.tensors: list[Tensor] = []
        for index, place in enumerate(places):
            node, tensor, args = place.node, place.tensor(), place.node.args
            given = torch_private.new_graph_input(gm, f"number_of_rank_{index}", tensor, like=place.like)
            known = set(gm.graph.nodes)
            with gm.graph.inserting_before(node):
                made = place.put(gm.graph, given)
            made.meta.update({"stack_trace": node.meta.get("stack_trace", "")})
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            self._changed.append((node, args, given, [new for new in gm.graph.nodes if new not in known]))
            self.tensors.append(tensor)
        gm.recompile()

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, as whoever knows nothing of the numbers calls it."""
        numbers = tuple(self.tensors)

        def run(*args: Any) -> Any:
            return compiled(*args, *numbers)

        return run

    def put_back(self) -> None:
        """Leave the graph as it was: whoever traced it goes on with it."""
        graph = self._gm.graph
        for old, args, given, made in reversed(self._changed):
            with graph.inserting_after(made[-1]):
                again = graph.create_node(old.op, old.target, args, dict(old.kwargs), old.name)
            again.meta.update(old.meta)
            made[-1].replace_all_uses_with(again)
            for node in (*reversed(made), given):
                graph.erase_node(node)
        self._changed.clear()
        self._gm.recompile()


# ---------------------------------------------------------------- which numbers


@dataclass(frozen=True)
class Place:
    """A node with a number that may become an input."""

    node: fx.Node
    value: Any  # a number, or several
    others: str  # what the node is besides, for comparison
    like: Any  # a tensor of the trace
    tensor: Callable[[], Tensor]
    put: Callable[[fx.Graph, fx.Node], fx.Node]  # (graph, input): what computes the same


def _places_in(gm: fx.GraphModule) -> dict[fx.Node, Place]:
    """The nodes of which a number may become an input."""
    shared, like = _written_or_returned(gm), _any_tensor(gm)
    found: dict[fx.Node, Place] = {}
    for node in gm.graph.nodes:
        place = None
        if node.op == "call_function" and node.target is operator.getitem:
            place = _index(node, shared)
        elif node.op == "call_function" and node.target in (torch.tensor, torch.full):
            place = _filled(node, like)
        elif len(node.args) == 2 and not node.kwargs:
            is_known = node.op == "call_function" and node.target in _OPERATORS
            if is_known or (node.op == "call_method" and node.target in _METHODS):
                place = _operand(node, 0) or _operand(node, 1)
        if place is not None:
            found[node] = place
    return found


def _operand(node: fx.Node, position: int) -> Place | None:
    number: Any = node.args[position]
    beside = _example(node.args[1 - position])
    if type(number) not in (int, float) or beside is None or not beside.is_floating_point():
        return None
    dtype = dtype_beside(number, beside)
    if dtype is None:
        return None

    def put(graph: fx.Graph, given: fx.Node) -> fx.Node:
        other = node.args[1 - position]  # as it is now: it may have had a number, too
        pair = (given, other) if position == 0 else (other, given)
        return graph.create_node(node.op, node.target, pair)

    others = f"{position} {node.args[1 - position]} {type(number).__name__}"
    return Place(node, number, others, beside, lambda: torch.tensor(number, dtype=dtype, device=beside.device), put)


def dtype_beside(number: float, beside: Tensor) -> torch.dtype | None:
    """Of a tensor without dimensions that computes with ``beside`` what the number does; None if none does."""
    if isinstance(number, int):
        return torch.int64 if abs(number) < 2**31 else None
    if beside.dim() > 0:
        return torch.float64
    # Two without dimensions: the wider one would have a say in the result's type, a narrow one round the number.
    return beside.dtype if beside.dtype in (torch.float32, torch.float64) else None


def _filled(node: fx.Node, like: Any) -> Place | None:
    """``torch.tensor(number)`` and ``torch.full(size, number)``."""
    made, position = _example(node), 0 if node.target is torch.tensor else 1
    number: Any = node.args[position] if len(node.args) > position else None
    if type(number) not in (int, float) or made is None or like is None or made.requires_grad or made.is_complex():
        return None
    shape, dtype, device = list(made.shape), made.dtype, made.device

    def put(graph: fx.Graph, given: fx.Node) -> fx.Node:
        wide = graph.call_method("expand", (given, shape))
        return graph.call_method("clone", (wide,), {"memory_format": torch.contiguous_format})

    others = f"{shape} {dtype} {device.type} {node.kwargs}"
    return Place(node, number, others, like, lambda: torch.tensor(number, dtype=dtype, device=device), put)


def _index(node: fx.Node, shared: set[int]) -> Place | None:
    """``x[3]``, ``x[3:5]``, ``x[:, 3]``: which rows, columns and parts of a tensor are read."""
    source = _example(node.args[0])
    index: Any = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    if source is None or torch_private.memory_of_trace(source) in shared or not 0 < len(parts) <= source.dim():
        return None  # who writes to a part of it, or keeps that, has to have that part and no copy
    starts, lengths = [], []
    for part, size in zip(parts, source.shape, strict=False):
        if type(size) is not int:
            return None
        if type(part) is int:
            starts.append(part % size if size else 0)
            lengths.append(0)
        elif isinstance(part, slice) and all(type(v) in (int, type(None)) for v in (part.start, part.stop, part.step)):
            start, stop, step = part.indices(size)
            starts.append(start)
            lengths.append(len(range(start, stop, step)))
            if step != 1 or not lengths[-1]:
                return None
        else:
            return None

    def put(graph: fx.Graph, given: fx.Node) -> fx.Node:
        made: Any = node.args[0]
        for dim in reversed(range(len(starts))):
            if lengths[dim] == source.shape[dim]:
                continue
            at = graph.call_method("narrow", (given, 0, dim, 1))
            if lengths[dim] > 1:
                counted = graph.call_function(torch.arange, (lengths[dim],), {"device": source.device})
                at = graph.call_function(torch.add, (counted, at))
            made = graph.call_function(torch.index_select, (made, dim, at))
            made = made if lengths[dim] else graph.call_method("squeeze", (made, dim))
        return made  # type: ignore[no-any-return]

    if all(length == size for length, size in zip(lengths, source.shape, strict=False)):
        return None  # nothing is chosen
    others = f"{node.args[0]} {lengths}"
    return Place(node, starts, others, source, lambda: torch.tensor(starts, device=source.device), put)


def _example(node: Any) -> Any:
    """The tensor without values that a node of the trace stands for; None if it is none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and type(value).__name__ == "FakeTensor" else None


def _any_tensor(gm: fx.GraphModule) -> Any:
    return next((found for node in gm.graph.nodes if (found := _example(node)) is not None), None)


def _written_or_returned(gm: fx.GraphModule) -> set[int]:
    """The memory that is written to in the graph, or that its results lie in."""
    found: list[fx.Node] = []
    for node in gm.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "output":
            found += node.all_input_nodes
        elif node.op.startswith("call_"):
            writes = (name.endswith("_") and not name.endswith("__")) or name == "setitem" or node.target in _IN_PLACE
            if writes or "out" in node.kwargs or node.op == "call_module":
                found += node.all_input_nodes
    return {torch_private.memory_of_trace(example) for node in found if (example := _example(node)) is not None}


def _digest_without(gm: fx.GraphModule, places: Mapping[fx.Node, Place]) -> str:
    """Stands for all of a graph but the numbers at these places, of which only the kinds count."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} {exact_input(node.meta.get('example_value'))}")
        else:
            given = places[node].others if node in places else f"{node.args} {node.kwargs}"
            lines.append(f"{node.name} {node.op} {node.target} {given}")
    lines += [str(inner.graph) for inner in gm.modules() if isinstance(inner, fx.GraphModule) and inner is not gm]
    return hashlib.sha256(OF_THIS_PROCESS.sub("", "\n".join(lines)).encode()).hexdigest()
