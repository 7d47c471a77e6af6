"""The two graph passes: where ``launch`` is put.

``put_launches`` works on the joint graph of forward and backward, before it is cut in two: that way the parameters
which ``launch`` takes become inputs of the backward like anything else it needs.  ``hoist_launches`` works on the
backward graph when the compiler has finished with it.

[Note: found in a cache]  A process that finds a graph in the compiler's cache runs neither pass, and its runs must know
all the same what the graph delivers.  So the groups are part of the key, and a graph is kept only if it delivers just
these: where ``put_launches`` has to leave a parameter out, it raises ``Narrowed`` before it has changed anything, and
the graph is compiled with the groups that are left, under their key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.graph import ops

_NARROW = (torch.bfloat16, torch.float16)
# What the passes make of a graph; caches outlive an upgrade, so it grows whenever that changes (a test watches it).
VERSION = 4
_GROUP_KEY = "lockstep_group"  # in the meta of a launch: which of the record's groups it is


class Narrowed(Exception):
    """The graph does not deliver all of its groups; the record has what is left of them."""


@dataclass(frozen=True)
class Member:
    """A parameter of a group, and which input of the graph it is."""

    name: str
    input_index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True)
class Group:
    """Parameters of one bucket and one dtype, all of them inputs of one graph."""

    bucket: int
    members: tuple[Member, ...]


@dataclass
class Placement:
    """What became of a group in the backward graph."""

    group: Group
    num_bytes: int
    position: int = -1  # of the launch, in nodes of the backward graph
    fraction: float = 0.0  # how much of the backward's compute comes before it


@dataclass
class GraphRecord:
    """What the passes did to one compiled graph; kept for ``lockstep.explain``."""

    region: str
    strategy: str
    parameters: frozenset[str] = frozenset()  # the wrapper's, among the graph's inputs
    groups: list[Group] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # parameter name -> why hooks reduce it
    placements: list[Placement] = field(default_factory=list)
    num_backward_nodes: int = 0
    digest: str = ""  # of what dynamo traced: equal on ranks that compile the same
    differing_places: Callable[[], list[str]] = list  # where other ranks have other numbers in this graph

    def key(self) -> str:
        """Names the outcome for compile caches: another plan, or another way of putting launches, must not find it."""
        return hashlib.blake2b(f"{VERSION} {self.groups!r}".encode(), digest_size=16).hexdigest()

    def input_groups(self) -> list[list[int]]:
        """Each group as the indices of its parameters among the graph's inputs; empty for one that is not launched."""
        return [[member.input_index for member in group.members] for group in self.groups]


def put_launches(graph: fx.Graph, record: GraphRecord) -> None:
    """Let every group's gradients leave the joint graph as views of one launched buffer.

    Raises ``Narrowed`` if some of them do not; see [Note: found in a cache].
    """
    output = graph.output_node()
    gradient_positions = torch_private.gradient_positions(output)
    inputs = torch_private.plain_inputs(graph)
    if not gradient_positions:
        return  # a graph without a backward, or the body of a higher-order operator
    results = list(output.args[0])  # type: ignore[arg-type]
    order = {node: position for position, node in enumerate(graph.nodes)}
    changed = torch_private.inputs_changed(output)
    groups = [_with_gradients(g, gradient_positions, inputs, changed, results, record.left_out) for g in record.groups]
    if groups != record.groups:
        record.groups = groups
        raise Narrowed
    for number, group in enumerate(groups):
        if not group.members:
            continue
        computed = [results[gradient_positions[m.input_index]] for m in group.members]
        gradients = [_before_cast(node) for node in computed]
        parameters = [inputs[m.input_index] for m in group.members]
        last = max([*gradients, *parameters], key=order.__getitem__)
        with graph.inserting_after(last):
            flat = graph.call_function(ops.launch, (gradients, parameters, number))
        flat.meta["val"] = _fake_flat(parameters)
        before, offset = flat, 0
        for member, gradient in zip(group.members, computed, strict=True):
            with graph.inserting_after(before):
                view = graph.call_function(
                    torch.ops.aten.as_strided.default, (flat, member.shape, member.stride, offset)
                )
            view.meta["val"] = flat.meta["val"].as_strided(member.shape, member.stride, offset)
            torch_private.copy_node_origin(gradient, view)
            results[gradient_positions[member.input_index]] = before = view
            offset += member.num_elements
        torch_private.copy_node_origin(last, flat)
        order[flat] = order[last]
        flat.meta[_GROUP_KEY] = number
    output.args = (tuple(results),)
    graph.lint()


def _with_gradients(
    group: Group,
    gradient_positions: dict[int, int],
    inputs: dict[int, fx.Node],
    changed: Collection[int],
    results: Sequence[Any],
    left_out: dict[str, str],
) -> Group:
    """Those members of the group whose gradients the graph computes as plain tensors."""
    members = []
    for member in group.members:
        why = _why_not(member, gradient_positions, inputs, results)
        if why is None and member.input_index in changed:
            # Autograd would keep it for the backward, as an input of the launch, and find that it has changed since.
            why = "the forward changes it"
        if why is None:
            members.append(member)
        else:
            left_out[member.name] = why
    return Group(group.bucket, tuple(members))


def _why_not(
    member: Member, gradient_positions: dict[int, int], inputs: dict[int, fx.Node], results: Sequence[Any]
) -> str | None:
    node = inputs.get(member.input_index)
    position = gradient_positions.get(member.input_index)
    if node is None or position is None or not isinstance(results[position], fx.Node):
        return "the graph computes no gradient for it"
    gradient = results[position].meta.get("val")
    if not isinstance(gradient, Tensor) or gradient.shape != member.shape or gradient.layout != torch.strided:
        return "its gradient is not a dense tensor of its shape"
    if gradient.dtype != node.meta["val"].dtype:
        return "its gradient has another dtype than the parameter"
    return None


def _fake_flat(parameters: Sequence[fx.Node]) -> Tensor:
    values = [node.meta["val"] for node in parameters]
    with torch_private.fake_mode_for(values):
        return torch.empty(sum(v.numel() for v in values), dtype=values[0].dtype, device=values[0].device)


def _before_cast(gradient: fx.Node) -> fx.Node:
    """The gradient before it is cast up to the parameter's dtype, if that is the last thing that happens to it.

    Packing moves every element once anyway; casting on the way saves writing and reading it once more (autocast).
    """
    is_cast = gradient.target is torch.ops.prims.convert_element_type.default or (
        gradient.target is torch.ops.aten._to_copy.default and set(gradient.kwargs) <= {"dtype", "layout", "device"}
    )
    if is_cast and len(gradient.users) == 1:
        source = gradient.args[0]
        if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), Tensor):
            before, after = source.meta["val"], gradient.meta["val"]
            is_same_place = before.device == after.device and before.layout == after.layout
            if before.dtype in _NARROW and after.dtype == torch.float32 and is_same_place:
                return source
    return gradient


def hoist_launches(graph: fx.Graph, record: GraphRecord) -> None:
    """Launch as early as the gradients allow."""
    launches = [node for node in graph.nodes if node.target is ops.launch]
    if launches:
        _hoist(graph, launches)
        _record_positions(graph, launches, record)


def _hoist(graph: fx.Graph, launches: Sequence[fx.Node]) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for launch in launches:
        last = max(launch.all_input_nodes, key=order.__getitem__)
        last.append(launch)
        order[launch] = order[last]


def _record_positions(graph: fx.Graph, launches: Sequence[fx.Node], record: GraphRecord) -> None:
    """Where each launch sits, as a fraction of the backward's compute (by floating point operations)."""
    costs, total = {}, 0.0
    for node in graph.nodes:
        costs[node] = total
        total += torch_private.node_flops(node)
    record.num_backward_nodes = len(graph.nodes)
    record.placements = []
    positions = {node: position for position, node in enumerate(graph.nodes)}
    for launch in launches:
        group = record.groups[launch.meta[_GROUP_KEY]]
        value = launch.meta["val"]
        record.placements.append(
            Placement(
                group,
                num_bytes=int(value.numel()) * value.element_size(),
                position=positions[launch],
                fraction=costs[launch] / total if total else positions[launch] / len(graph.nodes),
            )
        )
