"""The seam to the compiler: what stands where dynamo has its DDPOptimizer while one of our wrappers runs.

Dynamo hands every graph of a running wrapper, with the user's backend, to ``OverlapCompiler``; that is true for a
compiled wrapper, a wrapped compiled module, and for blocks compiled one by one.  It finds the buckets that the graph
covers and lets the user's backend compile it, by one of three strategies:

    graph   launches inside one backward graph (backends on AOTAutograd: inductor, aot_eager, aot_autograd(...))
    split   one part per bucket, each compiled by the backend, whatever it is
    none    the graph as it is; hooks reduce after it

Whichever it is, the reducer's hooks reduce what no graph delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lockstep import torch_private
from lockstep.agree.board import Board
from lockstep.engine.bucket import Slot, is_dense
from lockstep.engine.feeders.graph import Region
from lockstep.engine.registry import slot_of
from lockstep.engine.step import SyncStep
from lockstep.graph import joint, tuning
from lockstep.graph.compare import compare, describe_graph, differing_places, graph_digest
from lockstep.graph.joint import GraphRecord, Group, Member
from lockstep.graph.numbers import RankNumbers
from lockstep.graph.split import SplitOptimizer
from lockstep.graph.turns import take_turn
from lockstep.plan import BucketCaps

logger = logging.getLogger("lockstep.graph")

STRATEGIES = ("graph", "split", "none")


class OverlapCompiler:
    """Compiles the graphs of one wrapper, and keeps a record of each."""

    def __init__(
        self,
        step: SyncStep,
        graphs: list[GraphRecord],
        backend: Callable[..., Any],
        strategy: str | None,
        caps: BucketCaps,
        *,
        settle_plan: Callable[[fx.GraphModule, dict[int, Slot], list[list[str]] | None], None] | None = None,
        board: Board | None = None,
        numbers: RankNumbers | None = None,
    ) -> None:
        self._step = step
        self._numbers = numbers
        self._graphs = graphs
        self._backend = backend
        self._strategy = strategy
        self._caps = caps
        self._settle_plan = settle_plan
        self._board = board
        self._around = None if board is None else take_turn  # a rank alone has nobody to take turns with

    def compile_fn(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        slots = self._slots_of(inputs)
        compile_graph = graph_compiler(self._backend)
        strategy = self._strategy or ("split" if compile_graph is None else "graph")
        record = GraphRecord(region_name(gm), strategy, frozenset(slot.name for slot in slots.values()))
        self._graphs.append(record)
        if strategy == "split":
            self._compare(gm, inputs, slots, record)
            return self._split(gm, inputs, slots, **options)
        # Without parameters it is a function that the model calls, say (flex_attention); any backend will do.
        if strategy == "none" or not slots:
            self._compare(gm, inputs, slots, record)
            return self._compile_as_it_is(gm, inputs, **options)
        if compile_graph is None:
            backend, _ = torch_private.unwrap_backend(self._backend)
            raise ValueError(
                "overlap='graph' needs a backend that traces the backward (inductor, aot_eager, or one made by "
                f"aot_autograd), and {getattr(backend, '__qualname__', backend)} is not known to. Leave overlap out, "
                "or set it to 'split'."
            )
        if self._settle_plan is not None:
            self._settle_plan(gm, slots, None)
        record.groups, record.left_out = find_groups(self._step, slots)
        taken = self._numbers.take_out(gm) if self._numbers is not None else None
        self._compare(gm, inputs, slots, record)
        compiled = None
        if taken is not None:
            try:
                compiled = taken.around(compile_graph(gm, [*inputs, *taken.tensors], record, self._around, **options))
            except Exception:
                logger.debug("A graph is compiled with the numbers of its rank after all", exc_info=True)
                record.groups, record.left_out = find_groups(self._step, slots)
            finally:
                taken.put_back()  # dynamo goes on with the graph, and knows nothing of these inputs
        if compiled is None:
            compiled = compile_graph(gm, inputs, record, self._around, **options)
        return Region(compiled, record.input_groups())

    def _compare(self, gm: fx.GraphModule, inputs: Sequence[Any], slots: dict[int, Slot], record: GraphRecord) -> None:
        """Say so if another rank compiles another graph in the place of this one."""
        if self._board is None or not self._board.is_ours:
            return
        names = {index: slot.name for index, slot in slots.items()}
        backend, options = inductor_behind(self._backend) or (self._backend, {})
        facts = describe_graph(
            gm,
            inputs,
            names,
            backend=str(getattr(backend, "__name__", type(backend).__name__)),
            settings=f"overlap {record.strategy} {record.key()}, options {sorted(options.items())}",
        )
        record.digest = graph_digest(facts)
        key = compare(self._board, record.region, facts)
        board = self._board
        record.differing_places = lambda: differing_places(board, key, facts)

    def _compile_as_it_is(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """By the user's backend, nothing put into the graph (a whole one, or a part of a split one); but in turn."""
        inductor = inductor_behind(self._backend)
        if inductor is None or self._around is None:
            return self._backend(gm, inputs, **options)
        backend, config = inductor
        tuning.start()
        patches = {**config, **options.pop("config_patches", {})}
        return torch_private.compile_with_inductor(backend, gm, inputs, patches, self._around)

    def _slots_of(self, inputs: Sequence[Any]) -> dict[int, Slot]:
        """The parameters of this wrapper among the inputs of a graph, by the index of the input."""
        slots = {}
        for index, value in enumerate(inputs):
            found = slot_of(value) if isinstance(value, Tensor) else None
            if found is not None and found[0] is self._step:
                slots[index] = found[1]
        return slots

    def _split(
        self, gm: fx.GraphModule, inputs: Sequence[Any], slots: dict[int, Slot], **options: Any
    ) -> Callable[..., Any]:
        splitter = SplitOptimizer(self._caps, self._compile_as_it_is, ignores=self._is_ignored)
        if self._settle_plan is not None and slots:
            names = {id(slot.parameter): slot.name for slot in self._step.reducer.slots}
            buckets = splitter.find_buckets(gm, inputs)
            groups = [[names[id(member)] for member in bucket if id(member) in names] for bucket in buckets]
            self._settle_plan(gm, slots, [group for group in groups if group])
        return splitter.compile_fn(gm, inputs, **options)  # type: ignore[no-any-return]

    def _is_ignored(self, parameter: Tensor) -> bool:
        return slot_of(parameter) is None


def region_name(gm: fx.GraphModule) -> str:
    """A name for people: the first module whose code is in the graph."""
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path, kind = next(iter(stack.values()))
            return f"{getattr(kind, '__name__', kind)} ({path})"
    return "a function"


def find_groups(step: SyncStep, slots: dict[int, Slot]) -> tuple[list[Group], dict[str, str]]:
    """What a graph with these parameters delivers together: by bucket and dtype; and why others are left to hooks."""
    members: dict[tuple[int, torch.dtype], list[Member]] = {}
    left_out: dict[str, str] = {}
    order = {id(slot): position for bucket in step.reducer.buckets for position, slot in enumerate(bucket.slots)}
    for index, slot in sorted(slots.items(), key=lambda item: (item[1].bucket.index, order[id(item[1])])):
        why = _why_not(step, slot)
        if why is not None:
            left_out[slot.name] = why
            continue
        parameter = slot.parameter
        member = Member(slot.name, index, tuple(parameter.shape), tuple(parameter.stride()), slot.num_elements)
        members.setdefault((slot.bucket.index, parameter.dtype), []).append(member)
    return [Group(bucket, tuple(group)) for (bucket, _), group in members.items()], left_out


def _why_not(step: SyncStep, slot: Slot) -> str | None:
    if slot.bucket.is_sparse:
        return "its gradient is sparse"
    if step.reducer.memory.reduce_dtype is not None:
        return "native mixed precision reduces in another dtype"
    if slot.is_dtensor:
        return "it is a DTensor"
    if not slot.parameter.requires_grad:
        return "it is frozen"
    if not is_dense(slot.parameter):
        return "it does not fill its memory without gaps"
    return None


# ---------------------------------------------------------------- backends that take part

GraphCompiler = Callable[..., Callable[..., Any]]


def graph_compiler(backend: Callable[..., Any]) -> GraphCompiler | None:
    """How this backend compiles a graph with launches in it; None for one that is not known to trace a backward."""
    inductor = inductor_behind(backend)
    if inductor is not None:
        return partial(_compile_with_inductor, *inductor)
    inner, arguments = torch_private.unwrap_backend(backend)
    parts = torch_private.aot_backend_parts(inner)
    if parts is not None and not arguments:
        return partial(_compile_with_aot, parts)
    return None


def inductor_behind(backend: Callable[..., Any]) -> tuple[Any, dict[str, Any]] | None:
    """Inductor and the options that it is given, if that is what ``backend`` comes to."""
    inner, arguments = torch_private.unwrap_backend(backend)
    if inner is lockstep_backend:
        inner = torch_private.inductor_backend(**arguments)
    config = torch_private.inductor_config_of(inner)
    return None if config is None else (inner, config)


def lockstep_backend(
    gm: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="lockstep")``: Inductor, with the communication of wrapped models in it."""
    return torch_private.inductor_backend(mode, options)(gm, inputs)  # type: ignore[no-any-return]


def _compile_with_inductor(
    backend: Any,
    config: dict[str, Any],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    record: GraphRecord,
    around: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    given = {**config, **options.pop("config_patches", {})}
    tuning.start()

    def compile() -> Callable[..., Any]:
        patches, key = dict(given), f"{record.key()} {_settings_around(inputs)}"
        for setting, put in (
            ("joint_custom_post_pass", joint.put_launches),
            ("post_grad_custom_post_pass", joint.hoist_launches),
        ):
            theirs = torch_private.inductor_setting(setting, patches)
            patches[setting] = torch_private.graph_pass(partial(put, record=record), f"{setting} {key}", before=theirs)
        return torch_private.compile_with_inductor(backend, gm, inputs, patches, around)  # type: ignore[no-any-return]

    return _compile_what_is_delivered(compile, record)


def _settings_around(inputs: Sequence[Any]) -> str:
    """What decides what a graph is traced to, and is not in the key of AOTAutograd's cache in all versions of torch."""
    kinds = sorted({"cpu", *(value.device.type for value in inputs if isinstance(value, Tensor))})
    casts = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    return f"{torch.get_default_dtype()} {[(kind, torch.get_autocast_dtype(kind)) for kind in casts]}"


def _compile_with_aot(
    parts: dict[str, Any],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    record: GraphRecord,
    around: Callable[..., Any] | None = None,  # nothing that other ranks could find is kept, so all compile at once
    **options: Any,
) -> Callable[..., Any]:
    partition, compile_backward = parts["partition_fn"], parts.get("bw_compiler") or parts["fw_compiler"]

    def put_launches_and_partition(joint_module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint.put_launches(joint_module.graph, record)
        joint_module.recompile()
        return partition(joint_module, *args, **kwargs)

    def hoist_launches_and_compile(backward_module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint.hoist_launches(backward_module.graph, record)
        backward_module.recompile()
        return compile_backward(backward_module, *args, **kwargs)

    changed = {
        **parts,
        "partition_fn": put_launches_and_partition,
        "bw_compiler": hoist_launches_and_compile,
    }
    # What such a backend keeps goes by no key of ours.
    with torch_private.joint_graphs_are_made():
        return _compile_what_is_delivered(lambda: torch_private.aot_backend(changed)(gm, inputs, **options), record)  # type: ignore[no-any-return]


def _compile_what_is_delivered(compile: Callable[[], Callable[..., Any]], record: GraphRecord) -> Callable[..., Any]:
    """Compile once more if the groups turn out to be smaller; see joint.py, [Note: found in a cache]."""
    groups = record.groups
    try:
        return compile()
    except Exception:  # a compiler may put an exception of its own around that of a pass
        if record.groups == groups:
            raise
    return compile()
