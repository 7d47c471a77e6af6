"""The one door to private torch API.

Every private name the project uses is imported here, with the reason and what stands in its way.  torch moves these
every two months; ``tests/test_torch_private.py`` fails by the name that moved.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    _get_default_group,
    _get_default_store,
    _rank_not_in_group,
)
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

__all__ = [
    "BufferCommHookLocation",
    "BuiltinCommHookType",
    "GradBucket",
    "MixedPrecision",
    "RecordFunction",
    "TorchDDP",
    "alias",
    "all_reduce",
    "aot_backend",
    "aot_backend_parts",
    "as_overlapped_optimizer",
    "backend_name",
    "cast_forward_inputs",
    "compile_with_inductor",
    "compiler_is_off",
    "compiler_is_watching",
    "copy_node_origin",
    "current_dist_autograd_context",
    "default_group",
    "default_store",
    "dtensor_like",
    "engine_will_run",
    "enters_autocast",
    "exit_autocast",
    "exits_autocast",
    "fake_copy",
    "fake_mode_for",
    "fake_tensor",
    "flatten_dense",
    "foreach_add",
    "foreach_copy",
    "foreach_mul",
    "gradient_accumulator",
    "gradient_positions",
    "graph_input_name",
    "graph_pass",
    "has_compiled_code",
    "in_backward",
    "in_backward_optimizer_handles",
    "in_nested_backward",
    "inductor_backend",
    "inductor_cache_directory",
    "inductor_can_cache",
    "inductor_config_of",
    "inductor_input",
    "inductor_meets_ranks",
    "inductor_setting",
    "inputs_to_device",
    "is_compiled",
    "leave_frame_to_python",
    "memory_owners",
    "node_flops",
    "only_hooks_are_ours",
    "own_code",
    "plain_inputs",
    "preserve_version_counter",
    "queue_backward_callback",
    "rank_not_in_group",
    "recompile_reason",
    "register_backend",
    "run_on_fakes",
    "saved_tensor_hooks_wait",
    "sets_grad_mode",
    "size_hint",
    "split_reason",
    "stand_in_for_ddp_optimizer",
    "tracing_context_of_a_part",
    "unflatten_dense",
    "unwrap_backend",
]

# The location enum and the precision dataclass are what users pass in; they must be torch's own objects.
BufferCommHookLocation = _BufferCommHookLocation
MixedPrecision = _MixedPrecision

# Public in use, but not exported as far as type checkers see: the bucket class hooks are annotated with, and the
# built-in hooks' names.
GradBucket: Any = dist.GradBucket  # type: ignore[attr-defined]
BuiltinCommHookType: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]

# The default group and its store: torch has no public way to ask for either.
default_group: Callable[[], Any] = _get_default_group
default_store: Callable[[], Any] = _get_default_store
rank_not_in_group: Callable[[Any], bool] = _rank_not_in_group

# Moves nested inputs to the device on a side stream, with RRefs and dataclasses, exactly as DDP users know it.
inputs_to_device: Callable[..., Any] = _to_kwargs
cast_forward_inputs: Callable[..., Any] = _cast_forward_inputs


# One kernel for many copies, and for many products; torch has no public names for them.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
foreach_mul: Callable[[list[torch.Tensor], float], Any] = torch._foreach_mul_
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_add_

# Another tensor on the memory of one (with sizes, strides, and an offset to its own), which autograd does not know as a
# view of it; so methods such as detach_() work on it. As cheap as it gets, since it is made for every gradient in every
# step; so cheap that nothing is checked, not even that the memory is large enough.
alias: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]

# All tensors as one flat copy, and a flat tensor as views in given shapes: one call each instead of one per tensor.
flatten_dense: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
unflatten_dense: Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]] = torch._C._nn.unflatten_dense_tensors

# A profiler range that costs a fraction of a microsecond while no profiler runs; the public one costs several.
RecordFunction: Any = torch._C._profiler._RecordFunctionFast


_options: dict[Any, Any] = {}


def all_reduce(process_group: Any, tensor: torch.Tensor, op: Any) -> Any:
    """Start an all-reduce in place; returns its work.

    The public function checks and logs in Python before each call, which a bucket in the backward would pay for.
    """
    options = _options.get(op)
    if options is None:
        options = AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        _options[op] = options
    return process_group.allreduce([tensor], options)


def backend_name(process_group: Any, device: torch.device) -> str:
    """Which backend serves ``device`` in this group; the public question answers for the group as a whole."""
    try:
        return str(process_group._get_backend(device).name()).lower()
    except (RuntimeError, AttributeError):
        return str(process_group.name()).lower()


def dtensor_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around ``local`` with the placement of ``parameter``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has finished.

    The engine offers no public hook for the end of a pass; torch's own FSDP uses this one.
    """
    Variable._execution_engine.queue_callback(callback)


def leave_frame_to_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler skip this function's own frame, but compile the functions it calls.

    ``torch.compiler.disable(recursive=False)`` does that too, and marks the function besides; a module whose forward
    is so marked is traced as a whole from outside, which is what must not happen.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function


_hooks_before = attrgetter("_backward_hooks")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")


def only_hooks_are_ours(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but one hook after accumulation looks at these parameters' gradients on their way."""
    try:
        return not any(map(_hooks_before, parameters)) and set(map(len, map(_hooks_after, parameters))) == {1}
    except TypeError:  # one of them has none at all
        return False


def engine_will_run(node: Any) -> bool:
    """Whether the backward pass that is running now comes to ``node``.

    Asked for the node that accumulates into .grad, it tells a backward from torch.autograd.grad, for which the
    question is an error.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, which is what compilers keep their graphs by."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def memory_owners(tensor: torch.Tensor) -> int:
    """How many tensors, of whoever, live in this tensor's memory; torch counts, but has no public question."""
    count = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return count - 1  # without the storage object just made to ask


def in_nested_backward() -> bool:
    """In a callback at the end of a pass: whether that pass ran inside another one (a reentrant checkpoint).

    The thread then still has a node of the outer pass under evaluation; no public question gives that away.
    """
    return torch._C._current_autograd_node() is not None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass right now."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_accumulator(parameter: torch.Tensor) -> Any | None:
    """The graph node that adds into ``parameter.grad``; distributed autograd calls only hooks that sit on it.

    None where autograd is out of reach: inside an operator that a dispatch mode (a flop counter, say) has called.
    """
    with torch.enable_grad():
        expanded = parameter.expand_as(parameter)
    return None if expanded.grad_fn is None else expanded.grad_fn.next_functions[0][0]


def preserve_version_counter(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Buffers are overwritten between forward and backward; autograd must not take that for a user's edit."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def current_dist_autograd_context() -> int | None:
    """Id of the distributed autograd context this thread is in, if any (torch offers no public question for it).

    Without an RPC agent there can be none, which is the cheap and usual answer.
    """
    if not (dist.is_available() and dist.rpc.is_available() and torch._C._distributed_rpc._is_current_rpc_agent_set()):
        return None
    from torch.distributed.autograd import _current_context  # type: ignore[attr-defined]

    try:
        return int(_current_context()._context_id())
    except RuntimeError:
        return None


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """The fused-optimizer wrapper behind ``_register_fused_optim``."""
    from torch.distributed.algorithms._optimizer_overlap import (  # type: ignore[attr-defined]
        _as_overlapped_optim,
    )

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)


def in_backward_optimizer_handles(parameter: torch.Tensor) -> list[Any]:
    """Hook handles that ``_apply_optimizer_in_backward`` left on a parameter; DDP has to take them over."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return list(param_to_optim_hook_handle_map.get(parameter, []))


# ---------------------------------------------------------------- the compiler

# torch's own class, whatever stands in its place: dynamo asks it which wrapper is running.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel


def stand_in_for_ddp_optimizer(make: Callable[..., Any | None]) -> None:
    """Ask ``make`` first, whenever dynamo wants an optimizer for the wrapper that is running.

    Dynamo hands the user's backend to its DDPOptimizer while a wrapper runs; there is no registry for others.  Where
    ``make`` returns None (the wrapper is not ours), and for those who build one themselves, torch's own is made.
    """
    from torch._dynamo.backends import distributed

    original = distributed.DDPOptimizer
    if getattr(original, "_asks_lockstep", False):
        return

    class DDPOptimizer(original):  # type: ignore[misc,valid-type]
        _asks_lockstep = True

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            return object.__new__(cls) if made is None else made

    distributed.DDPOptimizer = DDPOptimizer  # type: ignore[misc]


def graph_pass(apply: Callable[[Any], None], key: str, before: Any = None) -> Any:
    """A pass for Inductor that runs after the user's own, if there is one; ``key`` names its outcome for caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class LockstepPass(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: Any) -> None:
            if before is not None:
                before(graph)
            apply(graph)

        def uuid(self) -> Any:
            if before is None:
                return f"lockstep {key}"
            theirs = before.uuid() if hasattr(before, "uuid") else None
            return None if theirs is None else f"lockstep {key} after {theirs}"

    return LockstepPass()


def inductor_setting(name: str, patches: dict[str, Any]) -> Any:
    """The value of an Inductor option as it will be under ``patches``."""
    from torch._inductor import config

    return patches[name] if name in patches else getattr(config, name)


def inductor_config_of(backend: Any) -> dict[str, Any] | None:
    """The options that ``backend`` gives to Inductor; None if it is not Inductor."""
    from torch._dynamo.backends.inductor import inductor

    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return dict(backend.config)
    return {} if backend is inductor else None


def compile_with_inductor(
    backend: Any,
    gm: Any,
    inputs: Any,
    patches: dict[str, Any],
    around: Callable[[Any, Callable[[], Any]], Any] | None = None,
) -> Any:
    """What the Inductor backend does when it is called, with further options.

    ``around(graph, compile)`` stands around the lowering of the forward, and of the backward; it returns what
    ``compile`` does.  There is no public hook for the backward, which Inductor lowers when it first runs.
    """
    from functools import partial

    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    extra: dict[str, Any] = {}
    if getattr(backend, "name", None):
        extra["compile_region_name"] = backend.name
    if around is not None:

        def inner_compile(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
            return around(graph, partial(compile_fx_inner, graph, example_inputs, **kwargs))

        extra["inner_compile"] = inner_compile
    return compile_fx(gm, inputs, config_patches=patches, **extra)


def unwrap_backend(backend: Any) -> tuple[Any, dict[str, Any]]:
    """The compiler behind the wrappers that torch.compile and dynamo put around it, and what they call it with."""
    for _ in range(10):
        inner = getattr(backend, "_torchdynamo_orig_backend", None)
        if inner is None:
            break
        backend = inner
    if type(backend) is torch._TorchCompileWrapper:
        return backend.compiler_fn, dict(backend.kwargs)
    return backend, {}


def inductor_backend(mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """What torch.compile makes of backend="inductor" with these."""
    return torch._TorchCompileInductorWrapper(mode, options, None)


def register_backend(function: Callable[..., Any], name: str) -> None:
    """Make a backend known by name; entry points do the same for installed packages only."""
    import torch._dynamo

    torch._dynamo.register_backend(compiler_fn=function, name=name)


def has_compiled_code(function: Any) -> bool:
    """Whether dynamo holds compiled code for this function; there is no public way to ask."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    code = getattr(function, "__code__", None)
    return bool(code is not None and _debug_get_cache_entry_list(code))


def aot_backend_parts(backend: Any) -> dict[str, Any] | None:
    """The parts of a backend made of AOTAutograd (``aot_eager`` and what ``aot_autograd()`` makes); None for others."""
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    if isinstance(backend, AotAutograd):
        return {"partition_fn": default_partition, **backend.kwargs}
    if backend is aot_eager:
        return {
            "fw_compiler": boxed_nop,
            "bw_compiler": boxed_nop,
            "partition_fn": min_cut_rematerialization_partition,
            "keep_inference_input_mutations": True,
        }
    return None


def aot_backend(parts: dict[str, Any]) -> Callable[..., Any]:
    """A backend made of AOTAutograd with these parts; the maker lives in a private module."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**parts)


def gradient_positions(output: Any) -> dict[int, int]:
    """For each plain input of a joint graph that gets a gradient: which output that is.  Empty for other graphs."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described = output.meta.get("desc") or ()
    return {
        what.grad_of.idx: position
        for position, what in enumerate(described)
        if isinstance(what, GradAOTOutput) and isinstance(what.grad_of, PlainAOTInput)
    }


def plain_inputs(graph: Any) -> dict[int, Any]:
    """The placeholders of a joint graph by the index of the argument they stand for."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return {
        node.meta["desc"].idx: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("desc"), PlainAOTInput)
    }


def copy_node_origin(source: Any, target: Any) -> None:
    """Let ``target`` count as coming from where ``source`` comes from: partitioners and traces read these keys."""
    for key in ("stack_trace", "seq_nr", "partitioner_tag", "nn_module_stack", "autograd_backward"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def compiler_is_watching() -> bool:
    """Whether torch.compile looks at the frames that are called from here."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


def compiler_is_off() -> bool:
    """Whether compiled modules run uncompiled, by ``set_stance("force_eager")``; a stance can be set, but not asked."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "force_eager")


def is_compiled(module: Any) -> bool:
    """Whether calling this module runs compiled code; both ways of compiling one leave private marks only."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def size_hint(size: Any) -> int:
    """A number for a size that may be symbolic: what it was when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def node_flops(node: Any) -> float:
    """Floating point operations of a graph node that torch has a formula for; 0 for others."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(node.target, "_overloadpacket", None)
    formula = flop_registry.get(packet) if packet is not None else None
    if formula is None:
        return 0.0

    def value(x: Any) -> Any:
        # A symbolic size that is made a number becomes one for good: the graph would be compiled for this size only.
        found = x.meta.get("val") if isinstance(x, torch.fx.Node) else x
        if isinstance(found, torch.Tensor) and not all(isinstance(size, int) for size in found.shape):
            return torch.empty([size_hint(size) for size in found.shape], dtype=found.dtype, device="meta")
        return size_hint(found) if isinstance(found, torch.SymInt) else found

    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
        return float(formula(*args, **kwargs, out_val=value(node)))
    except Exception:  # a formula that wants something else, or several results
        return 0.0


def enters_autocast(target: Any) -> bool:
    """Whether a node of a traced graph begins an autocast region; the public context manager leaves no such node."""
    return target is torch.amp._enter_autocast  # type: ignore[attr-defined]


def exit_autocast() -> Callable[..., Any]:
    """The function that ends an autocast region inside a graph."""
    return torch.amp._exit_autocast  # type: ignore[attr-defined, no-any-return]


def exits_autocast(target: Any) -> bool:
    """Whether a node of a traced graph ends an autocast region."""
    return target is torch.amp._exit_autocast  # type: ignore[attr-defined]


def sets_grad_mode(target: Any) -> bool:
    """Whether a node of a traced graph switches gradients on or off (``no_grad`` becomes two of them)."""
    return target is torch._C._set_grad_enabled


def split_reason(filename: str) -> Any:
    """What ``torch._dynamo.explain`` says of a part of a split graph; tools look for the name of torch's optimizer."""
    import traceback

    from torch._dynamo.output_graph import GraphCompileReason

    text = "Lockstep split the graph at a bucket of gradients, in the place of torch's DDPOptimizer."
    return GraphCompileReason(text, [traceback.FrameSummary(filename, 0, "SplitOptimizer")])


def fake_mode_for(inputs: Iterable[Any]) -> Any:
    """The mode dynamo traced with, or that of the inputs, or a new one: values without data that graphs run on."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(list(inputs)) or FakeTensorMode()


def fake_tensor(tensor: torch.Tensor, fake_mode: Any) -> torch.Tensor:
    """The tensor without data that dynamo has for this one: the same object, with the same symbols for its sizes."""
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor if isinstance(tensor, FakeTensor) else to_fake_tensor(tensor, fake_mode)  # type: ignore[no-any-return]


@contextmanager
def run_on_fakes(fake_mode: Any) -> Iterator[None]:
    """Run a part on tensors without data; its own parameters are real, which the mode has to be told to accept."""
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


@contextmanager
def saved_tensor_hooks_wait() -> Iterator[None]:
    """Keep the user's hooks on saved tensors away from tensors without data; they are for the real run."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)  # type: ignore[attr-defined]


@contextmanager
def tracing_context_of_a_part() -> Iterator[Callable[[], bool]]:
    """A copy of dynamo's tracing context, in which AOTAutograd answers the first call of what it compiles with fakes.

    Yields the question whether it will: a compiler need not use AOTAutograd, and without dynamo there is no context.
    """
    import copy

    from torch._guards import TracingContext, tracing

    whole = TracingContext.try_get()
    if whole is None:
        yield lambda: False
        return
    part = copy.copy(whole)
    part.fw_metadata = None
    part.fakify_first_call = True
    try:
        with tracing(part):
            yield lambda: part.fw_metadata is not None
    finally:
        part.fakify_first_call = False


def fake_copy(module: torch.nn.Module, fake_mode: Any) -> torch.nn.Module:
    """The module with tensors without data for its parameters and buffers, so that a trial run changes nothing."""
    from torch._dynamo.utils import deepcopy_to_fake_tensor

    return deepcopy_to_fake_tensor(module, fake_mode)  # type: ignore[no-any-return]


def inductor_cache_directory() -> str | None:
    """Where another process finds what Inductor compiles now; None where it keeps nothing."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir() if config.fx_graph_cache and not config.force_disable_caches else None


def inductor_can_cache(graph: Any) -> bool:
    """Whether Inductor's cache takes this graph; some operators it does not, and then every process compiles."""
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    try:
        FxGraphCache._check_can_cache(graph)
    except BypassFxGraphCache:
        return False
    return True


def inductor_input(graph: Any) -> str:
    """A text that two processes have in common if one can find in Inductor's cache what the other makes of ``graph``.

    Inductor's own key for its cache would do, but takes forty times as long to compute.
    """
    from torch._inductor import config

    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    inputs = [(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in values]
    return f"{graph.graph}\n{inputs}\n{sorted(config.save_config_portable().items())}"


def inductor_meets_ranks() -> bool:
    """Whether Inductor runs collectives while it compiles: ranks that took turns would wait for each other then."""
    from torch._inductor import config

    optimizations = getattr(config, "aten_distributed_optimizations", None)
    settings = [
        (config, "distributed_max_autotune_gemm"),
        (optimizations, "spmd_check"),
        (optimizations, "enable_overlap_scheduling"),
    ]
    try:
        from torch._inductor import config_comms

        settings.append((config_comms, "runtime_estimations_align_across_all_distributed_ranks"))
    except ImportError:
        pass
    return any(getattr(owner, name, False) for owner, name in settings)


def recompile_reason() -> str:
    """While dynamo calls a backend: the guard that failed, if this frame was compiled before; else nothing."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return str(context._metrics.get("recompile_reason") or "") if context.in_progress() else ""


def graph_input_name(node: Any) -> str:
    """What the program calls an input of a graph that dynamo traced; the node's own name is made up."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return str(node.target)
    return re.sub(r"^L\['(\w+)'\]", r"\1", name)


# ---------------------------------------------------------------- groups of the host


def has_host_groups() -> bool:
    """Whether this torch was built with gloo, which carries what ranks compare."""
    return bool(dist.is_available() and dist.is_gloo_available())


def group_timeout(process_group: Any) -> Any:
    """How long a collective of this group may take; torch has a setter for it, but no question."""
    from datetime import timedelta

    for device in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)


def host_group(prefix: str, rank: int, world: int, timeout: Any) -> Any:
    """A gloo group that is known to nobody else; ``new_group`` would register it, and needs all ranks of the world."""
    store = dist.PrefixStore(prefix, _get_default_store())
    return dist.ProcessGroupGloo(store, rank, world, timeout)


def host_all_reduce(group: Any, numbers: torch.Tensor, op: str) -> Any:
    """Start uniting the bits of numbers, or adding them up, in place; returns the work."""
    options = _options.get(op)
    if options is None:
        options = AllreduceOptions()
        options.reduceOp = {"or": dist.ReduceOp.BOR, "sum": dist.ReduceOp.SUM}[op]
        options.asyncOp = True
        _options[op] = options
    return group.allreduce([numbers], options)


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "barrier"),
)
_watched: dict[int, tuple[Any, Callable[[str], None]]] = {}


def watch_collectives(process_group: Any, note: Callable[[str], None]) -> None:
    """Call ``note(operation)`` whenever anyone starts a collective on this group; torch has no hook for it."""
    _watched[id(process_group)] = (process_group, note)
    if getattr(dist.ProcessGroup.allreduce, "tells_lockstep", False):
        return
    for name in _COLLECTIVES:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _telling(name, original))


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def started(group: Any, *args: Any, **kwargs: Any) -> Any:
        entry = _watched.get(id(group))
        if entry is not None:
            entry[1](name)
        return original(group, *args, **kwargs)

    started.tells_lockstep = True  # type: ignore[attr-defined]
    return started


def current_node() -> Any:
    """The autograd node that the engine evaluates on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def will_run_all(nodes: Iterable[Any]) -> bool:
    """Whether the backward that is running now comes to all of these nodes; see ``engine_will_run``."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def move_hook_to_end(parameter: torch.Tensor, hook_id: int) -> bool:
    """Let one hook after accumulation be the last to run; returns whether it was the last already."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if next(reversed(hooks)) == hook_id:
        return True
    hooks.move_to_end(hook_id)
    return False


# The hooks that run after a parameter's gradient was accumulated, by id and in order; there is a public way to add one,
# and none to see the others.
hooks_after: Callable[[torch.Tensor], Any] = _hooks_after


def graph_task_id() -> int:
    """A number for the backward that is running on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def is_compiled_node(node: Any) -> bool:
    """Whether this node of autograd's graph is the backward of a compiled region; its class has no public name."""
    return bool(node.name() == "CompiledFunctionBackward")


def accumulation_positions(node: Any) -> dict[int, int]:
    """For each parameter that this node hands a gradient to, by ``id``: which of its results that is."""
    positions = {}
    for position, (following, _) in enumerate(node.next_functions):
        variable = getattr(following, "variable", None)
        if variable is not None:
            positions[id(variable)] = position
    return positions
