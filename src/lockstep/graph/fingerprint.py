"""What ranks compare about a graph that is being compiled: a digest of its structure, and facts that people can read.

The digest says whether two ranks compile the same program.  So it must not depend on anything that differs between
ranks doing the same thing: device ordinals, memory addresses, node names and numbers of symbols, which count on from
whatever was compiled before.  Nodes are therefore numbered by their place, and symbols by their first appearance.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.errors import rank_table

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ORDINAL = re.compile(r"^([a-z]+):\d+$")
_SYMBOL = re.compile(r"\b[a-z]{1,2}\d+\b")
# Places in tables that only this process has; what they stand for does not reach the graph.
_PROCESS_COUNTERS = ("kernel_idx", "constant_args_idx", "tma_descriptor_metadata_idx")
_MAX_SECTIONS = 8


@dataclass(frozen=True)
class InputFact:
    """An input of the graph that is not a parameter: sizes as text, a symbol with its value (``s0=4``)."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    dynamic_dims: tuple[int, ...] = ()

    def __str__(self) -> str:
        dynamic = f", dynamic dims {list(self.dynamic_dims)}" if self.dynamic_dims else ""
        return f"[{', '.join(self.shape)}] {self.dtype}{dynamic}"


@dataclass(frozen=True)
class GraphFacts:
    """One compilation on one rank."""

    region: str
    digest: str
    number: int = 0  # how many times this rank has compiled the region before
    backend: str = ""
    reason: str = ""  # the guard that failed, where this is a recompilation
    inputs: tuple[InputFact, ...] = ()
    parameters: tuple[str, ...] = ()
    operations: tuple[tuple[str, int], ...] = ()  # how often each occurs
    settings: str = ""
    # Not part of the digest: the devices with their ordinals, and where the compiler keeps its results, if it does.
    devices: tuple[str, ...] = ()
    cache: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GraphFacts:
        data = json.loads(text)
        data["inputs"] = tuple(
            InputFact(i["name"], tuple(i["shape"]), i["dtype"], tuple(i["dynamic_dims"])) for i in data["inputs"]
        )
        data["operations"] = tuple((name, count) for name, count in data["operations"])
        for key in ("parameters", "devices"):
            data[key] = tuple(data[key])
        return cls(**data)


def describe_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    region: str,
    number: int = 0,
    parameter_names: Mapping[int, str] | None = None,
    backend: str = "",
    settings: str = "",
    cache: str = "",
) -> GraphFacts:
    """The facts of a traced graph; ``parameter_names`` tells which inputs (by index) are parameters of the wrapper.

    ``settings`` is whatever else decides what is compiled: the backend's options, the plan.
    """
    names = parameter_names or {}
    settings = _ADDRESS.sub("", settings)
    lines = _Lines()
    text = "\n".join([backend, settings, *(f"{i} {name}" for i, name in names.items()), *lines.of(gm, inputs)])
    placeholders = gm.graph.find_nodes(op="placeholder")
    tensors = [
        (index, node, value)
        for index, (node, value) in enumerate(zip(placeholders, inputs, strict=False))
        if isinstance(value, Tensor)
    ]
    return GraphFacts(
        region=region,
        digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        number=number,
        backend=backend,
        reason=torch_private.recompile_reason(),
        inputs=tuple(_input_fact(node, value) for index, node, value in tensors if index not in names),
        parameters=tuple(names[index] for index, _, _ in tensors if index in names),
        operations=tuple(sorted(lines.operations.items())),
        settings=settings,
        devices=tuple(sorted({str(value.device) for _, _, value in tensors})),
        cache=cache,
    )


def _input_fact(node: fx.Node, value: Tensor) -> InputFact:
    traced = node.meta.get("example_value")
    shape = traced.shape if isinstance(traced, Tensor) else value.shape
    dynamic = tuple(dim for dim, size in enumerate(shape) if not isinstance(size, int))
    symbols = _Symbols()
    sizes = tuple(
        f"{symbols.rename(str(size))}={torch_private.size_hint(size)}" if dim in dynamic else str(int(size))
        for dim, size in enumerate(shape)
    )
    return InputFact(torch_private.graph_input_name(node), sizes, str(value.dtype).removeprefix("torch."), dynamic)


# ---------------------------------------------------------------- the text behind the digest


class _Symbols:
    """Names for symbolic sizes by their first appearance."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def rename(self, expression: str) -> str:
        return _SYMBOL.sub(lambda m: self._names.setdefault(m[0], f"s{len(self._names)}"), expression)


class _Lines:
    """A line for each node, and the number of times each operation was met."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self._symbols = _Symbols()

    def of(self, gm: fx.GraphModule, inputs: Sequence[Any] = ()) -> Iterator[str]:
        places = {node: place for place, node in enumerate(gm.graph.nodes)}
        given = iter(inputs)
        for node in gm.graph.nodes:
            value = node.meta.get("example_value", node.meta.get("val"))
            if node.op == "placeholder":
                real = next(given, None)
                yield f"placeholder {_without_symbol(node)} {self._value(real if value is None else value)}"
                continue
            target = self._target(node)
            if node.op in ("call_function", "call_method", "call_module"):
                self.operations[target] += 1
            kwargs = {k: v for k, v in node.kwargs.items() if k not in _PROCESS_COUNTERS}
            arguments = f"{self._argument(node.args, places)} {self._argument(kwargs, places)}"
            yield f"{node.op} {target} {arguments} {self._value(value)}"
            inner = _attribute(gm, node) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                yield from self.of(inner)

    def _target(self, node: fx.Node) -> str:
        target = node.target
        if isinstance(target, str):
            return target
        if isinstance(target, torch.nn.Module) or not hasattr(target, "__qualname__"):
            return _ADDRESS.sub("", str(target))
        return f"{getattr(target, '__module__', None) or ''}.{target.__qualname__}".lstrip(".")

    def _argument(self, value: Any, places: Mapping[fx.Node, int]) -> str:
        if isinstance(value, fx.Node):
            return f"%{places[value]}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k}: {self._argument(v, places)}" for k, v in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return "(" + ", ".join(self._argument(v, places) for v in value) + ")"
        if isinstance(value, slice):
            return f"slice{self._argument((value.start, value.stop, value.step), places)}"
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return repr(_ORDINAL.sub(r"\1", value))
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        text = _ADDRESS.sub("", repr(value))
        return self._symbols.rename(text) if isinstance(value, (torch.SymInt, torch.SymFloat)) else text

    def _value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            layout = str(list(value.stride())) if value.layout == torch.strided else str(value.layout)
            sizes = self._symbols.rename(f"{list(value.shape)} {layout}")
            grad = " requires_grad" if value.requires_grad else ""
            return f"{sizes} {value.dtype} {value.device.type}{grad}"
        if isinstance(value, (list, tuple)):
            return "(" + ", ".join(self._value(v) for v in value) + ")"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._symbols.rename(str(value))
        return "" if value is None else type(value).__name__


def _without_symbol(node: fx.Node) -> str:
    """The name of an input; that of a size is its symbol, which is numbered elsewhere."""
    name = torch_private.graph_input_name(node)
    return "" if _SYMBOL.fullmatch(name) else name


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = gm
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


# ---------------------------------------------------------------- what differs


def difference(facts: Mapping[int, GraphFacts]) -> str:
    """A table by rank for everything in which these ranks' graphs differ; empty when they are the same."""
    if len({f.digest for f in facts.values()}) < 2:
        return ""
    sections = [
        *_sections("input", {r: {i.name: str(i) for i in f.inputs} for r, f in facts.items()}),
        *_sections("parameter", {r: dict.fromkeys(f.parameters, "used") for r, f in facts.items()}, "not used"),
        *_sections("operation", {r: {n: f"{c} times" for n, c in f.operations} for r, f in facts.items()}, "not there"),
    ]
    for title in ("region", "backend", "settings"):
        sections += _sections(title, {r: {"": getattr(f, title)} for r, f in facts.items()})
    if not sections:
        sections.append(("constants or the order of operations", {r: f"graph {f.digest}" for r, f in facts.items()}))
    reasons = {rank: f.reason for rank, f in facts.items() if f.reason}
    if reasons:
        sections.append(("compiled again because", reasons))
    shown = sections[: _MAX_SECTIONS - 1] + sections[-1:] if len(sections) > _MAX_SECTIONS else sections
    more = f"\n... and {len(sections) - len(shown)} more differences" if len(sections) > len(shown) else ""
    return "\n".join(f"{title}:\n{rank_table(values)}" for title, values in shown) + more


def _sections(
    kind: str, by_rank: Mapping[int, Mapping[str, str]], absent: str = "(absent)"
) -> list[tuple[str, dict[int, str]]]:
    names = dict.fromkeys(name for values in by_rank.values() for name in values)
    sections = []
    for name in names:
        values = {rank: have.get(name, absent) for rank, have in by_rank.items()}
        if len(set(values.values())) > 1:
            sections.append((f"{kind} {name}".rstrip(), values))
    return sections
