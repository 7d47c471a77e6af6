"""Walks a graph from its output to its inputs, adds up the parameters, and cuts where the cap is reached.

``parts`` makes a graph of each piece, and ``compile`` compiles them one by one.

[Note: where a parameter counts]  A parameter that several nodes use has its gradient when the *first* of them (in the
order of the forward) has run backward; there it is counted, once.  Counted with its last use, as it is met first in
this walk, the shared weight of an embedding and a head would hold back the first bucket until the end of the backward.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from lockstep.graph.split.compile import compile_parts
from lockstep.graph.split.parts import Crossing, attribute, cut
from lockstep.graph.split.table import split_table
from lockstep.plan.caps import BucketCaps

log = logging.getLogger("lockstep.split")


@dataclass
class Bucket:
    """The parameters that one part of the graph delivers, and the nodes of that part (last one first)."""

    uses: list[ParameterUse] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    num_extra_nodes: int = 0  # that came after the cap was reached, until the graph could be cut
    num_bytes_at_cap: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(use.num_bytes for use in self.uses)

    @property
    def names(self) -> list[str]:
        return [use.name for use in self.uses]

    @property
    def parameters(self) -> list[Tensor]:
        return [use.parameter for use in self.uses]


@dataclass(frozen=True)
class ParameterUse:
    """A parameter and the name that people know it by."""

    name: str
    parameter: Tensor  # or what dynamo traced with in its place, where the real one cannot be found

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


class SplitOptimizer:
    """Cuts what dynamo traced into one graph per bucket and compiles each; takes the place of torch's DDPOptimizer.

    ``ignores`` says which parameters are not reduced, besides those marked ``_ddp_ignored``.  ``buckets`` are those of
    the last graph, in forward order.
    """

    def __init__(
        self,
        caps: BucketCaps,
        backend_compile_fn: Callable[..., Any],
        *,
        ignores: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        self.caps = caps
        self.backend_compile_fn = backend_compile_fn
        self.buckets: list[Bucket] = []
        self._ignores = ignores

    def compile_fn(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **compiler_configs: Any) -> Any:
        """What dynamo calls with a graph; returns what runs in its place."""
        crossing = Crossing(gm)
        self._fill_buckets(crossing, example_inputs)
        log.debug("%s", self)
        if len(self.buckets) <= 1:
            return self.backend_compile_fn(gm, example_inputs, **compiler_configs)
        pieces = [list(reversed(bucket.nodes)) for bucket in self.buckets]
        return compile_parts(cut(crossing, pieces), example_inputs, self.backend_compile_fn, compiler_configs)

    def find_buckets(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[list[Tensor]]:
        """The parameters of each bucket that ``compile_fn`` will cut this graph by, in the order they become ready."""
        self._fill_buckets(Crossing(gm), example_inputs)
        return [bucket.parameters for bucket in reversed(self.buckets) if bucket.uses]

    def table(self) -> str:
        """The buckets of the last graph in the order they are launched, and the parts that had to grow."""
        return split_table(self.buckets, self.caps)

    __str__ = table

    def _is_ignored(self, parameter: Tensor) -> bool:
        if getattr(parameter, "_ddp_ignored", False):
            return True
        return self._ignores is not None and isinstance(parameter, nn.Parameter) and self._ignores(parameter)

    def _fill_buckets(self, crossing: Crossing, example_inputs: Sequence[Any]) -> None:
        uses = _ParameterUses(crossing.gm, example_inputs, self._is_ignored)
        buckets = [Bucket()]
        filled = 0
        for node in reversed(crossing.order):
            bucket = buckets[0]
            if filled >= max(self.caps.cap_for(len(buckets) - 1), 1):
                if crossing.may_cut_after(node) and crossing.has_output(bucket.nodes):
                    bucket = Bucket()
                    buckets.insert(0, bucket)
                    filled = 0
                else:
                    if not bucket.num_extra_nodes:
                        bucket.num_bytes_at_cap = filled
                    bucket.num_extra_nodes += 1
            bucket.uses += uses.counted_at(node)
            filled += sum(use.num_bytes for use in uses.counted_at(node))
            bucket.nodes.append(node)
        if len(buckets) > 1 and (not buckets[0].num_bytes or not crossing.has_output(buckets[0].nodes)):
            # A preamble without parameters would cost a graph and free no gradient any earlier.
            preamble = buckets.pop(0)
            buckets[0].nodes += preamble.nodes
            buckets[0].uses += preamble.uses
        self.buckets = buckets if crossing.order else []


class _ParameterUses:
    """Which parameters each node uses, and at which node each of them is counted."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], is_ignored: Callable[[Tensor], bool]) -> None:
        self._gm = gm
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = dict(zip(placeholders, example_inputs, strict=False))
        self._counted: dict[fx.Node, list[ParameterUse]] = {}
        seen: set[int] = set()
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            for use in self._used_by(node):
                # [Note: where a parameter counts]
                if id(use.parameter) not in seen and not is_ignored(use.parameter):
                    seen.add(id(use.parameter))
                    self._counted.setdefault(node, []).append(use)

    def counted_at(self, node: fx.Node) -> list[ParameterUse]:
        return self._counted.get(node, [])

    def _used_by(self, node: fx.Node) -> Iterator[ParameterUse]:
        # The inputs of a node include those inside lists, dicts, slices and keyword arguments.
        for argument in node.all_input_nodes:
            if argument.op == "placeholder":
                yield from self._placeholder(argument)
            elif argument.op == "get_attr":
                yield from _parameters_in(attribute(self._gm, argument), str(argument.target))
        if node.op == "call_module":
            yield from _parameters_in(attribute(self._gm, node), str(node.target))

    def _placeholder(self, node: fx.Node) -> Iterator[ParameterUse]:
        traced = node.meta.get("example_value", self._inputs.get(node))
        if not (isinstance(traced, nn.Parameter) and traced.requires_grad):
            return
        found = (getattr(node.meta.get("grapharg"), "example", None), self._inputs.get(node))
        real = next((p for p in found if isinstance(p, nn.Parameter) and not hasattr(p, "fake_mode")), None)
        yield ParameterUse(_readable_name(node), traced if real is None else real)


def _parameters_in(value: Any, name: str) -> Iterator[ParameterUse]:
    """A parameter, or those of a module: a leaf the graph calls, or the body of a higher-order operator."""
    if isinstance(value, nn.Parameter) and value.requires_grad:
        yield ParameterUse(name, value)
    elif isinstance(value, nn.Module):
        for inner, parameter in value.named_parameters():
            if parameter.requires_grad:
                yield ParameterUse(f"{name}.{inner}", parameter)


_STEP = re.compile(r"\['([^']+)'\]|\.(_modules|_parameters)\b")


def _readable_name(node: fx.Node) -> str:
    """``layers.0.weight`` where dynamo says that it came by the module's dicts; else the name in the graph."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    text = name() if callable(name) else str(name)  # a method before torch 2.12
    if not text.startswith("L[") or _STEP.sub("", text[1:]):
        return str(node.target)
    steps = [match[1] for match in _STEP.finditer(text) if match[1]]
    return ".".join(steps[1:]) or str(node.target)
