"""Numbers that differ by rank, taken out of a graph and given to it as inputs, so that one graph serves all ranks.

A compiler that asks for a rank, a group's rank, membership or a mesh coordinate gets a plain number, and what a model
computes of it stands in the graph.  Nothing tells such a number from others but that ranks have other values in its
place.  So ranks that compile a graph at the same time show each other their numbers; where the graphs are the same
otherwise, those that differ become inputs: tensors without dimensions, of which each rank has its own.

Only operands of plain arithmetic with a tensor of floating point numbers are taken out, where a tensor computes what
the number does.  A number in a branch, a size or an index shapes the graph itself; it stays, and is named.

[Note: a wait that costs nothing wrong]  A rank that does not hear of another in time leaves its graph as it is.  It
computes the same; only nobody shares it.  So this is no agreement, and needs none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
from collections.abc import Callable, Sequence
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
        mine = [_digest_without(gm, places), [_value(place) for place in places]]
        board.post(f"{key}/{board.rank}", json.dumps(mine))
        keys = [f"{key}/{rank}" for rank in range(board.world)]
        late = board.wait_for(keys, monotonic() + PATIENCE_SECONDS)
        told = [json.loads(text) for text in board.read_all(keys) if text]
        if late or len(told) < board.world or len({digest for digest, _ in told}) > 1:
            self._is_over = True  # ranks go different ways from here on
            return None
        values = [numbers for _, numbers in told]
        differing = [place for place, *others in zip(places, *values, strict=True) if len(set(others)) > 1]
        if not differing:
            return None
        logger.debug("%d numbers that differ by rank become inputs of a graph", len(differing))
        return Taken(gm, differing)


class Taken:
    """The numbers that were taken out of a graph; they come after its other inputs."""

    def __init__(self, gm: fx.GraphModule, places: Sequence[tuple[fx.Node, int]]) -> None:
        self._gm = gm
        self._inputs: dict[fx.Node, Any] = {}
        self.tensors: list[Tensor] = []
        for index, (node, position) in enumerate(places):
            number, beside = _value((node, position)), _beside(node, position)
            dtype = torch.float64 if isinstance(number, float) else torch.int64
            tensor = torch.tensor(number, dtype=dtype, device=beside.device)
            placeholder = torch_private.new_graph_input(gm, f"number_of_rank_{index}", tensor, like=beside)
            node.update_arg(position, placeholder)
            self._inputs[placeholder] = number
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
        for placeholder, number in self._inputs.items():
            for user in list(placeholder.users):
                user.args = tuple(number if argument is placeholder else argument for argument in user.args)
            self._gm.graph.erase_node(placeholder)
        self._inputs.clear()
        self._gm.recompile()


def _places_in(gm: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """The operands that may become inputs: the node and the position among its arguments."""
    return [
        (node, position)
        for node in gm.graph.nodes
        if (node.op == "call_function" and node.target in _OPERATORS and not node.kwargs and len(node.args) == 2)
        or (node.op == "call_method" and node.target in _METHODS and not node.kwargs and len(node.args) == 2)
        for position in (0, 1)
        if _may_be_input(node, position)
    ]


def _may_be_input(node: fx.Node, position: int) -> bool:
    number, beside = _value((node, position)), _beside(node, position)
    if type(number) not in (int, float) or not isinstance(beside, Tensor) or type(beside).__name__ != "FakeTensor":
        return False
    if type(number) is int:
        return beside.is_floating_point() and abs(number) < 2**31
    # Beside a tensor without dimensions another one of 64 bits would have a say in the result's type.
    return beside.is_floating_point() and beside.dim() > 0


def _value(place: tuple[fx.Node, int]) -> Any:
    node, position = place
    return node.args[position]


def _beside(node: fx.Node, position: int) -> Any:
    other = node.args[1 - position]
    return other.meta.get("example_value") if isinstance(other, fx.Node) else None


def _digest_without(gm: fx.GraphModule, places: Sequence[tuple[fx.Node, int]]) -> str:
    """Stands for all of a graph but the numbers at these places, of which only the kinds count."""
    masked = {(node, position) for node, position in places}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} {exact_input(node.meta.get('example_value'))}")
            continue
        shown = [
            f"a number ({type(argument).__name__})" if (node, position) in masked else str(argument)
            for position, argument in enumerate(node.args)
        ]
        lines.append(f"{node.name} {node.op} {node.target} {shown} {node.kwargs}")
    lines += [str(inner.graph) for inner in gm.modules() if isinstance(inner, fx.GraphModule) and inner is not gm]
    return hashlib.sha256(OF_THIS_PROCESS.sub("", "\n".join(lines)).encode()).hexdigest()
