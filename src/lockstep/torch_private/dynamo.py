"""Which frames and modules dynamo compiles, whether it is looking, and why it did what it did."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def leave_frame_to_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler skip this function's own frame, but compile the functions it calls.

    ``torch.compiler.disable(recursive=False)`` does that too, and marks the function besides; a module whose forward
    is so marked is traced as a whole from outside, which is what must not happen.
    """
    _skip_frame(function.__code__)
    return function


def leave_to_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let the compiler skip this function and everything it calls, at no price per call.

    For what autograd calls back: where compiled code calls a backward, the compiler looks at every frame that begins in
    it.  ``torch.compiler.disable`` does the same at three microseconds a call.
    """
    _skip_frame(function.__code__, recursive=True)
    return function


def _skip_frame(code: types.CodeType, *, recursive: bool = False) -> None:
    """What ``torch._dynamo.eval_frame.skip_code`` does, at a price that a program without a compiler can pay."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    inner = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, inner))


def is_exporting() -> bool:
    """Whether torch.export is at work; ``torch.compiler.is_exporting`` is true in torch 2.11 wherever dynamo traces."""
    return bool(torch.compiler._is_exporting_flag)


def without_compiler(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable(function)``, which is not called before there is a compiler in this process.

    The decorator imports torch._dynamo where it stands, and so with the module it stands in; that takes more than a
    second.  As long as nobody else imports it, nothing can compile, and a call costs a lookup.
    """
    disabled: Callable[_P, _R] | None = None

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    _skip_frame(run.__code__)  # type: ignore[attr-defined]
    # The marks by which dynamo knows a function that it calls, and never inlines where the caller is traced.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    run._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    run._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    run._torchdynamo_wrapper_id = id(run)  # type: ignore[attr-defined]
    return run


def frame_without_compiler(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable(function, recursive=False)``, without the import of torch._dynamo.

    The frame is skipped when it is called, and called rather than inlined where its caller is traced.
    """
    _skip_frame(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, which is what compilers keep their graphs by."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def hands_over_graphs() -> bool:
    """Whether dynamo asks for a DDPOptimizer, as its setting says; traced by the compiler, which guards on it."""
    return torch._dynamo.config.optimize_ddp is True or torch._dynamo.config.optimize_ddp == "ddp_optimizer"


class _NoWrapper:
    """What dynamo is told is running where no wrapper is."""

    bucket_bytes_cap = 25 * 1024 * 1024


def stand_in_for_ddp_optimizer(make: Callable[..., Any | None], is_wanted: Callable[[], bool]) -> None:
    """Ask ``make`` first, whenever dynamo wants an optimizer for the wrapper that is running; and while none is, too.

    Dynamo hands the user's backend to its DDPOptimizer while a wrapper runs; there is no registry for others.  Where
    ``make`` returns None (the wrapper is not ours), and for those who build one themselves, torch's own is made.
    ``is_wanted`` says whether dynamo should ask although none runs.
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
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    no_wrapper = _NoWrapper()

    def _get_active_ddp_module(cls: Any) -> Any:
        return cls._active_ddp_module or (no_wrapper if is_wanted() else None)

    wrapper._get_active_ddp_module = classmethod(_get_active_ddp_module)


def guard_on_groups() -> None:
    """Let a graph that read the size or the rank of a process group be made again for another group.

    What dynamo reads of a group stands in the graph as a number, and it guards on nothing of it: a module that is given
    another group goes on with the numbers of the first.  Older versions guard on the group itself.
    """
    try:
        from torch._library.opaque_object import get_opaque_obj_info
    except ImportError:
        return
    known = get_opaque_obj_info(torch.distributed.ProcessGroup)
    if known is not None and known.guard_fn is None:
        known.guard_fn = lambda group: [group.group_name, group.size(), group.rank()]


def at_end_of_compiled_backward(function: Callable[[], None]) -> None:
    """Call ``function`` where compiled autograd runs a backward's callbacks, traced into the graph or by Python.

    A traced hook may queue a callback (``queue_callback``) only where breaks in the graph are forbidden, and cannot
    ask whether they are.  So the end itself tells: of its two functions one is put into the graph, and the other is
    what dynamo traces in the place of the first.  ``function`` may change what it reaches by name in its module.
    """
    from torch._dynamo import compiled_autograd, external_utils

    engine: Any = external_utils.FakeCompiledAutogradEngine
    run_callbacks = engine.exec_final_callbacks
    if getattr(run_callbacks, "_tells_lockstep", False):
        return

    def exec_final_callbacks(final_callbacks: list[Callable[[], None]]) -> None:
        run_callbacks(final_callbacks)
        function()

    def _exec_final_callbacks_stub() -> None:
        function()

    exec_final_callbacks._tells_lockstep = True  # type: ignore[attr-defined]
    engine.exec_final_callbacks = staticmethod(exec_final_callbacks)
    engine._exec_final_callbacks_stub = staticmethod(_exec_final_callbacks_stub)
    compiled_autograd._impure_targets.add(_exec_final_callbacks_stub)  # or it is dropped from the graph


def in_compiled_backward() -> bool:
    """Whether what runs now is a graph that compiled autograd made of a backward; the engine has no pass then."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def has_compiled_code(function: Any) -> bool:
    """Whether dynamo holds compiled code for this function; there is no public way to ask."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    code = getattr(function, "__code__", None)
    return bool(code is not None and _debug_get_cache_entry_list(code))


def compiler_is_watching() -> bool:
    """Whether torch.compile looks at the frames that are called from here."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


def compiler_is_off() -> bool:
    """Whether compiled modules run uncompiled, by ``set_stance("force_eager")``; a stance can be set, but not asked."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "force_eager")


def is_compiled(module: Any) -> bool:
    """Whether calling this module runs compiled code; both ways of compiling one leave private marks only."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def split_reason(filename: str) -> Any:
    """What ``torch._dynamo.explain`` says of a part of a split graph; tools look for the name of torch's optimizer."""
    import traceback

    from torch._dynamo.output_graph import GraphCompileReason

    text = "Lockstep split the graph at a bucket of gradients, in the place of torch's DDPOptimizer."
    return GraphCompileReason(text, [traceback.FrameSummary(filename, 0, "SplitOptimizer")])


def on_graph_so_far(change: Callable[[Any], None]) -> None:
    """In a function that is being traced: call ``change`` with the graph as it is up to here; nothing otherwise.

    Nodes can be marked in it, for which a traced program has no words of its own.
    """
    from torch._dynamo.comptime import comptime

    comptime(change)


def when_compiling_fails(tell: Callable[[BaseException], None]) -> None:
    """While dynamo compiles a frame: call ``tell`` with the error if that ends in one, which a note can be added to.

    What a program calls is compiled before it runs, so it has no frame around the error; dynamo's own end has.
    """
    handler = torch._dynamo.callback.callback_handler

    def ended(_: Any) -> None:
        # Another list: dynamo goes through this one just now.
        handler.end_callbacks = [callback for callback in handler.end_callbacks if callback is not ended]
        _watched.clear()
        error = sys.exc_info()[1]
        if error is not None:
            tell(error)

    if not _watched or _watched[0] not in handler.end_callbacks:
        _watched[:] = [ended]
        handler.register_end_callback(ended)


_watched: list[Callable[[Any], None]] = []  # what stands among dynamo's callbacks for the compilation that is running


def with_effects_in_trace(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``; where it is being traced, let it change objects from outside even within a checkpoint.

    Dynamo refuses that there, since it cannot know that a change is undone before the checkpoint ends.
    """
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as call

    return call(function, *args)


def recompile_reason() -> str:
    """While dynamo calls a backend: the guard that failed, if this frame was compiled before; else nothing."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return str(context._metrics.get("recompile_reason") or "") if context.in_progress() else ""
