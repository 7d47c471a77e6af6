"""Tells people when ranks compile different graphs.

Each rank describes what it is about to compile, and compares that with the first description on the board.  What only
its own process has must not be in it: device ordinals, memory addresses, places in tables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.agree.board import Board
from lockstep.errors import rank_table

logger = logging.getLogger("lockstep")

OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):\d+|, index=\d+|(kernel|constant_args)_idx: \d+")
_ALL = "constants or the order of operations"  # differs where anything does, and is told where nothing else does
_REASON = "compiled again because"
_BAKED = "numbers of the host at "  # and the place in the program that put them into the graph
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_MAX_SECTIONS = 8
_MOST_HELD = 256  # elements of a tensor in a graph; a larger one is data
# The place of what no line of the user's has called, and of what no number tells.
IN_BACKWARD = "a line of which the backward needs it"
SOMEWHERE = "a line that is not known (the same numbers, another order of operations)"

# What differs, as people call it, and its value: {"input x": "[4, 6] float32", "operation relu": "2 times", ...}
Facts = dict[str, str]


def describe_graph(gm: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str], **settings: str) -> Facts:
    """The facts of a graph that dynamo traced; ``names`` tells which inputs (by index) are which parameters."""
    facts, parameters, exact = {}, {}, [str(settings)]
    for index, (node, given) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)):
        value = node.meta.get("example_value", given)
        exact.append(f"{names.get(index, '')} {exact_input(value)}")
        if index in names:
            parameters[f"parameter {names[index]}"] = "used"
        elif isinstance(value, Tensor):
            facts[f"input {torch_private.graph_input_name(node)}"] = _readable(value)
    calls = [node.target for node in gm.graph.nodes if node.op.startswith("call_")]
    counts = Counter(c if isinstance(c, str) else getattr(c, "__name__", str(c)) for c in calls)
    facts |= baked_numbers(gm)
    facts |= parameters | {f"operation {name}": f"{times} times" for name, times in counts.items()}
    exact += [str(module.graph) for module in gm.modules() if isinstance(module, fx.GraphModule)]
    text = OF_THIS_PROCESS.sub("", "\n".join(exact))
    facts |= {key: OF_THIS_PROCESS.sub("", value) for key, value in settings.items()}
    facts[_ALL] = f"graph {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    facts[_REASON] = torch_private.recompile_reason()
    return facts


def baked_numbers(gm: fx.GraphModule, otherwise: str = "") -> Facts:
    """The plain numbers in the calls of a graph, by the place in the user's program that made each call.

    What a rank asks of its process group while a graph is made (its rank, a coordinate) is such a number then.
    ``otherwise`` is the place of calls that no line of the user's has made.
    """
    found: dict[str, list[str]] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            place = place_of(node) or otherwise
            if place and node.op.startswith("call_"):
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                given = (*node.args, *node.kwargs.values())
                shown = [str(a) for a in given if not isinstance(a, fx.Node)]
                shown += [held for a in given if (held := held_by(module, a))]
                numbers = [OF_THIS_PROCESS.sub("", text) for text in shown]
                found.setdefault(place, []).append(f"{name}({', '.join(numbers)})")
    return {_BAKED + place: " ".join(calls) for place, calls in found.items()}


def describe_program(gm: fx.GraphModule, inputs: str) -> Facts:
    """The facts of a whole step that was traced; ``inputs`` is what its batches are like."""
    return {"input batch": inputs, **baked_numbers(gm, IN_BACKWARD), _ALL: f"graph {digest_of(gm)}", _REASON: ""}


def graph_digest(facts: Facts) -> str:
    """What stands for all of a graph in its facts."""
    return facts[_ALL].removeprefix("graph ")


def digest_of(gm: fx.GraphModule) -> str:
    """Stands for all of a graph, without what only its own process has."""
    held = [held_by(gm, node) for node in gm.graph.find_nodes(op="get_attr")]
    text = "\n".join([str(gm.graph), *filter(None, held)])
    return hashlib.sha256(OF_THIS_PROCESS.sub("", text).encode()).hexdigest()


def held_by(gm: torch.nn.Module, node: Any) -> str:
    """The values of a small tensor that a graph holds, ``torch.tensor(rank)`` say; empty for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return ""
    value = getattr(gm, str(node.target), None)
    if type(value) is not Tensor or value.is_meta or value.layout is not torch.strided or value.numel() > _MOST_HELD:
        return ""
    return f"{value.dtype} {value.tolist()}"


def place_of(node: fx.Node) -> str:
    """Where in a program a call was made, as ``model.py:31``; the innermost line that is not torch's."""
    lines = _PLACE.findall(node.meta.get("stack_trace") or "")
    users = [(file, line) for file, line in lines if "/torch/" not in file and "/lockstep/" not in file]
    return f"{users[-1][0].rsplit('/', 1)[-1]}:{users[-1][1]}" if users else ""


def differing_places(board: Board, key: str, mine: Facts, unknown: str = "") -> list[str]:
    """Where other ranks' graphs have other numbers in the place of this one's; of ranks that have told theirs.

    ``unknown`` is told where graphs differ and no number does.
    """
    found: list[str] = []
    differ = False
    for rank in range(board.world):
        text = board.read(f"{key}/of rank {rank}") if rank != board.rank else None
        theirs: Facts = json.loads(text) if text else mine
        if _inputs(theirs) != _inputs(mine):
            continue  # other shapes make other numbers
        differ = differ or theirs.get(_ALL) != mine.get(_ALL)
        for fact in dict.fromkeys([*mine, *theirs]):
            place = fact.removeprefix(_BAKED)
            if place != fact and mine.get(fact) != theirs.get(fact) and place not in found:
                found.append(place)
    return found or ([unknown] if differ and unknown else [])


def _inputs(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if name.startswith("input ")}


def _readable(value: Tensor) -> str:
    sizes = [str(s) if isinstance(s, int) else f"{torch_private.size_hint(s)} (dynamic)" for s in value.shape]
    return f"[{', '.join(sizes)}] {str(value.dtype).removeprefix('torch.')}"


def exact_input(value: Any) -> str:
    """All that a graph knows of an input, without what only this process has."""
    if not isinstance(value, Tensor):
        return str(value) if isinstance(value, torch.SymInt | torch.SymFloat) else type(value).__name__
    layout = value.stride() if value.layout == torch.strided else value.layout
    return f"{value.shape} {layout} {value.dtype} {value.device.type} {value.requires_grad}"


def difference(facts: Mapping[int, Facts]) -> str:
    """A table by rank for everything in which these ranks' graphs differ; empty when they are the same."""
    if len({mine[_ALL] for mine in facts.values()}) < 2:
        return ""
    sections = {}
    for key in dict.fromkeys(key for mine in facts.values() for key in mine):
        values = {rank: mine.get(key, "not there") for rank, mine in facts.items()}
        if len(set(values.values())) > 1 and key != _REASON:
            sections[key] = values
    if len(sections) > 1:
        del sections[_ALL]
    shown = [f"{key}:\n{rank_table(values)}" for key, values in list(sections.items())[:_MAX_SECTIONS]]
    if len(sections) > _MAX_SECTIONS:
        shown.append(f"... and {len(sections) - _MAX_SECTIONS} more differences")
    reasons = {rank: mine[_REASON] for rank, mine in facts.items() if mine[_REASON]}
    return "\n".join([*shown, f"{_REASON}:\n{rank_table(reasons)}"] if reasons else shown)


def compare(board: Board, region: str, mine: Facts) -> str:
    """Warn, once for a region, if another rank came to its n-th compilation of the region with another graph.

    Returns the key under which ranks find what the others compiled in its place.
    """
    number = board.count(f"compile/{region}/times on rank {board.rank}")
    key = f"compile/{region}/{number}"
    board.post(f"{key}/of rank {board.rank}", json.dumps(mine))
    told = board.post_first(key, json.dumps([board.rank, mine]))
    rank, theirs = json.loads(told)
    table = difference(board.by_global({rank: theirs, board.rank: mine}))
    if table and board.count(f"compile/{region}/warnings on rank {board.rank}") == 1:
        logger.warning(
            "Ranks compile different graphs for %s, so each compiles its own: a longer start, and steps that wait for "
            "each other.\n%s",
            region,
            table,
        )
    return key
