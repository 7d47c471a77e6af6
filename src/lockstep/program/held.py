"""Tensors that a step reads and that nobody gives it: of a closure, of a criterion, made of numbers while it is traced.

A parameter or buffer may be read in other ways than through the model: a penalty over a list of parameters, say.  Then
the program's own tensor stands in its place, or its gradient would be lost.  Any other tensor would be a constant of
the program; it is given to it in each run instead, so that what is written to it is seen, and no program holds what
belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from lockstep.engine.bucket import local_part
from lockstep.program.untraceable import Untraceable

_PLAIN = (Tensor, torch.nn.Parameter)


class InPlaceOf(TorchFunctionMode):
    """Puts a program's tensors in the place of the model's own, by whatever way a step has come to these."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._pairs = list(pairs)  # the first of each stays alive, and so its number its own
        self._tensor_for = {id(own): tensor for own, tensor in self._pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._put(args), **self._put(kwargs or {}))

    def _put(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor_for.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)([self._put(entry) for entry in value])
        if type(value) is dict:
            return {name: self._put(entry) for name, entry in value.items()}
        return value


# Attributes that are not the program's: what this package and the compiler note on a tensor.
_NOTED = ("_lockstep", "_dynamo", "__dynamo")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What a program keeps on a tensor in Python: marks, factors, configurations."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith(_NOTED)}


class Likenesses:
    """Gives tensors that stand in the place of others what a program can see of these in Python."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._given: list[tuple[Tensor, dict[str, Any], set[str]]] = []
        for own, tensor in pairs:
            known = vars(tensor)
            attributes = {name: v for name, v in attributes_of(own).items() if known.get(name, self) is not v}
            for name in attributes:
                if hasattr(tensor, name):
                    raise Untraceable(f"a tensor has an attribute {name}, which tensors have of their own in a trace")
            self._given.append((tensor, attributes, set(vars(tensor))))
            vars(tensor).update(attributes)
            if isinstance(own, torch.nn.Parameter):
                tensor._is_param = True  # what torch asks for: isinstance(tensor, nn.Parameter)

    def require_unchanged(self) -> None:
        """Raise if a step has set, removed or replaced an attribute: of the stand-in, which nobody sees again."""
        for tensor, before, of_the_trace in self._given:
            now = {name: v for name, v in attributes_of(tensor).items() if name not in of_the_trace}
            now.pop("_is_param", None)
            changed = [name for name in {**before, **now} if before.get(name, self) is not now.get(name, self)]
            if changed:
                raise Untraceable(f"the step sets an attribute of a tensor, {changed[0]}")


def give_what_is_held(graph: fx.GraphModule, known: Mapping[str, Tensor]) -> list[Tensor]:
    """Make inputs, the last ones, of the tensors that a traced step holds; returns them.

    ``known`` are the tensors that it is given anyhow, by name: one that lies in the memory of another would be read in
    any order with what the program writes there.
    """
    names = {memory(tensor): name for name, tensor in known.items()}
    found: dict[str, fx.Node] = {}
    tensors: list[Tensor] = []
    for node in graph.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        value: Any = getattr(graph, target, None)
        if type(value) not in _PLAIN:
            continue
        if target not in found:
            if memory(value) in names:
                name = names[memory(value)]
                raise Untraceable(f"a tensor in the memory of {name} is read in another way than through the model")
            found[target] = add_input(graph.graph, f"held_{len(tensors)}")
            found[target].meta.update({key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta})
            tensors.append(value)
        node.replace_all_uses_with(found[target])
        graph.graph.erase_node(node)
    graph.recompile()
    return tensors


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Give a graph one more input, the last."""
    known = graph.find_nodes(op="placeholder")
    with graph.inserting_after(known[-1]) if known else graph.inserting_before(next(iter(graph.nodes))):
        return graph.placeholder(name)


def memory(tensor: Tensor) -> int:
    """Where a tensor lies, of a sharded one what this rank has; a number of its own for one that lies nowhere."""
    part = local_part(tensor)
    is_plain = type(part) in _PLAIN and part.layout == torch.strided and not part.is_meta
    return (part.untyped_storage().data_ptr() if is_plain else 0) or -id(tensor)
