"""Whole steps as programs: tracing them, compiling them, and what of optimizers and scalers belongs in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let optimizers take the way they take for a compiler: numbers that change from step to step stay tensors.

    The flag is set by torch itself while it exports; there is no public way to set it.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def argument_of(operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator is called with by this name, or its default; None if it takes none.  Schemas are private."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else argument.default_value
            return kwargs.get(name, given)
    return None


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator is given and writes to; nothing for what is no operator."""
    arguments = getattr(getattr(operator, "_schema", None), "arguments", ())
    named = {argument.name: args[place] for place, argument in enumerate(arguments[: len(args)])} | dict(kwargs)
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [named[name] for name in written if name in named]


def memory_of_trace(value: Any) -> int:
    """Stands for the memory of a tensor without values: the same number for views of it.  It has no address."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return -id(value)
    return value.untyped_storage()._cdata


def trace_program(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], before_each: Callable[..., Any] | None = None
) -> Any:
    """The operators that ``function`` runs for inputs like these, below autograd, as one graph.

    Tensors have no values meanwhile, so that a branch on one is an error and not a constant.  ``make_fx`` lives in an
    experimental module; by itself it notes only lines of functions that are called ``forward``.
    ``before_each(operator, args, kwargs)`` is called as the trace comes to an operator, and returns what to give it.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):
        """Notes of each operator which line of the user's has called it."""

        supports_higher_order_operators = True  # torch.cond and its like pass through

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            mode = get_proxy_mode()
            if before_each is not None:
                args, kwargs = before_each(func, args, kwargs or {})
            before = None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)
            result = func(*args, **(kwargs or {}))
            line = None if mode is None else _users_line(noted.__code__)
            for node in reversed(mode.tracer.graph.nodes) if mode is not None and line is not None else ():
                if node is before:
                    break
                node.meta["stack_trace"] = line
            return result

    def noted(*flat: torch.Tensor) -> Any:
        with Noting():
            return function(*flat)

    traced = make_fx(noted, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True)
    return traced(*inputs)


def _users_line(outermost: Any) -> str | None:
    """The innermost line that runs now and is neither torch's nor this package's, inside of a function."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS) and file not in _PASSED_THROUGH:
            return f'File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        frame = frame.f_back
    return None


# Files of which functions stand around others: decorators, contexts.
_PASSED_THROUGH = frozenset(
    getattr(sys.modules.get(name), "__file__", None) for name in ("typing_extensions", "contextlib", "functools")
)
_NOT_THE_USERS = ("<", str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


class TraceError(Enum):
    """What a step that is traced has asked of a tensor without a value."""

    VALUE = "its value"
    SHAPE = "a result whose shape depends on its values"
    RULE = "an operator of which the shape of the result is not known"
    OTHER = "something else"


# Errors of torch that are plain RuntimeErrors: a few words tell them from those of a program.
_WORDS_OF_A_VALUE = (
    "get value out of a tracing tensor",
    "data-dependent",
    "data pointer of Tensor",
    ".tolist() is not supported for tensor subclasses",
    ".numpy() is not supported for tensor subclasses",
)


def kind_of_trace_error(error: BaseException) -> tuple[TraceError, str]:
    """What an error in a trace is about, and the operator that raised it; torch's types for them are private."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    operator = str(getattr(error, "func", "") or "")
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return TraceError.SHAPE, operator
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return TraceError.VALUE, operator
    if isinstance(error, (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)):
        return TraceError.RULE, operator
    if isinstance(error, GuardOnDataDependentSymNode) or any(words in str(error) for words in _WORDS_OF_A_VALUE):
        return TraceError.VALUE, ""
    return TraceError.OTHER, ""


def compile_program(
    graph: Any, inputs: Sequence[torch.Tensor], around: Callable[[Any, Callable[[], Any]], Any] | None = None
) -> Callable[..., Any]:
    """A graph below autograd, compiled by Inductor without guards; random numbers are those of the uncompiled step.

    ``around(graph, compile)`` stands around the lowering; it returns what ``compile`` does.  Inductor and AOTAutograd
    keep what they make only where they find an environment for symbolic sizes, even if there are none: outside of
    dynamo it has to be brought along.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from lockstep.torch_private.inductor import compile_with_inductor

    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with torch.no_grad(), tracing(context):
        compiled: Any = compile_with_inductor(
            None, graph, list(inputs), {"fallback_random": True}, around, ignore_shape_env=True
        )
    return compiled


def optimizer_has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks at the steps of this optimizer: by hooks, which can be added in public, but not seen.

    Or by a function of his own in the place of ``step``; the one that a scheduler puts there only counts.
    """
    from torch.optim import optimizer as module

    has_own = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    on_all = [*module._global_optimizer_pre_hooks.values(), *module._global_optimizer_post_hooks.values()]
    has_global = any(not str(getattr(hook, "__module__", "")).startswith("lockstep.") for hook in on_all)
    replaced = vars(optimizer).get("step")
    return has_own or has_global or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))


def scaler_tensors(scaler: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a GradScaler, and how many steps it has held; once it has scaled something."""
    return scaler._scale, scaler._growth_tracker


@contextmanager
def tracing_compiled_modules() -> Iterator[None]:
    """Let modules that were compiled run as they were written while a program that calls them is traced.

    Dynamo refuses to be traced, unless a setting of its own is off; it then calls the function that it was given.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield
