"""Whole steps: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lockstep import torch_private as private


def test_as_if_compiling() -> None:
    with private.as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_written_arguments() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    assert private.written_arguments(torch.ops.aten.add_.Tensor, (one, other), {})[0] is one
    assert private.written_arguments(torch.ops.aten.add.Tensor, (one, other), {}) == []
    assert private.written_arguments(torch.ops.aten._foreach_add_.List, ([one], [other]), {}) == [[one]]
    assert private.written_arguments(torch.ops.aten.add.out, (one, one), {"out": other})[0] is other
    assert private.written_arguments(len, ([],), {}) == []


def test_memory_of_trace() -> None:
    with FakeTensorMode():
        whole, other = torch.zeros(4), torch.zeros(4)
    assert private.memory_of_trace(whole[1:]) == private.memory_of_trace(whole)
    assert private.memory_of_trace(whole) != private.memory_of_trace(other)
    assert private.memory_of_trace([whole]) != private.memory_of_trace(whole)


def test_argument_of() -> None:
    dropout = torch.ops.aten.native_dropout.default
    assert private.argument_of(dropout, "p", (None, 0.25), {}) == 0.25
    assert private.argument_of(dropout, "p", (None,), {"p": 0.5}) == 0.5
    attention = torch.ops.aten.scaled_dot_product_attention.default
    assert private.argument_of(attention, "dropout_p", (None, None, None), {}) == 0.0
    assert private.argument_of(attention, "p", (None, None, None), {}) is None


def test_trace_program() -> None:
    def update(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        leaf = weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * x).sum(), [leaf])
        weight.sub_(gradient)
        return gradient

    graph = private.trace_program(update, [torch.ones(2), torch.zeros(2)])
    weight = torch.zeros(2)
    assert graph(torch.full((2,), 3.0), weight).tolist() == [3.0, 3.0]
    assert weight.tolist() == [-3.0, -3.0]
    with pytest.raises(Exception, match=r"(?i)data.?dependent"):
        private.trace_program(lambda x: x if x.sum() > 0 else -x, [torch.ones(2)])


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_trace_program_names_the_line_behind_a_decorator() -> None:
    within = _nothing()(torch.sin)  # a frame of contextlib stands between
    graph = private.trace_program(lambda x: within(x), [torch.ones(2)])
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert __file__ in node.meta["stack_trace"]


def test_trace_program_tells_before_each_operator() -> None:
    told: list[str] = []

    def doubling(operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        told.append(operator.name())
        return ([args[0], 2.0], kwargs) if operator.name() == "aten::mul.Tensor" else (args, kwargs)

    graph = private.trace_program(lambda x: torch.rand_like(x) + x * 3.0, [torch.ones(2)], doubling)
    assert told == ["aten::rand_like", "aten::mul.Tensor", "aten::add.Tensor"]
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert node.args[1] == 2.0  # what it was given


def test_TraceError() -> None:
    assert {kind.name for kind in private.TraceError} == {"VALUE", "SHAPE", "RULE", "OTHER"}


@pytest.mark.parametrize(
    ("function", "kind", "operator"),
    [
        (lambda x: x if x.sum() > 0 else -x, "VALUE", ""),
        (lambda x: x * 2 if torch.equal(x, x) else x, "VALUE", "aten.equal.default"),
        (lambda x: x * float(x.numpy().mean()), "VALUE", ""),
        (lambda x: {}[0], "OTHER", ""),
    ],
)
def test_kind_of_trace_error(function: Any, kind: str, operator: str) -> None:
    with pytest.raises(Exception) as caught:
        private.trace_program(function, [torch.ones(2)])
    found = private.kind_of_trace_error(caught.value)
    assert found[0] is private.TraceError[kind], caught.value
    assert not operator or found[1] == operator


def test_compile_program() -> None:
    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        x.mul_(2)
        return (x + torch.rand(2),)

    graph = private.trace_program(double, [torch.ones(2)])
    program = private.compile_program(graph, [torch.ones(2)])
    given = torch.ones(2)
    torch.manual_seed(7)
    (result,) = program(given)
    torch.manual_seed(7)
    assert given.tolist() == [2.0, 2.0]
    torch.testing.assert_close(result, 2 + torch.rand(2))


def test_optimizer_has_hooks() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert not private.optimizer_has_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert private.optimizer_has_hooks(optimizer)


def test_scaler_tensors() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scale, growth = private.scaler_tensors(scaler)
    assert (scale.item(), growth.item()) == (8.0, 0)


def test_tracing_compiled_modules() -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2))
    with private.tracing_compiled_modules():
        graph = private.trace_program(compiled, [torch.ones(1, 2)])
    torch.testing.assert_close(graph(torch.ones(1, 2)), compiled._orig_mod(torch.ones(1, 2)))
