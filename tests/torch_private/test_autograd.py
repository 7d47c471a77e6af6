"""The autograd engine: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_engine_will_run() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    node = private.gradient_accumulator(parameter)
    answers = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            answers.append(private.engine_will_run(node))
            return g * 2

    Ask.apply(parameter).sum().backward()
    torch.autograd.grad(Ask.apply(parameter).sum(), parameter)
    assert answers == [True, False]


def test_only_hooks_are_ours() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not private.only_hooks_are_ours([parameter])
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert private.only_hooks_are_ours([parameter])
    parameter.register_hook(lambda g: None)
    assert not private.only_hooks_are_ours([parameter])


def test_current_dist_autograd_context() -> None:
    assert private.current_dist_autograd_context() is None


def test_accumulator_kind() -> None:
    """An accumulator that is held stays the one of its parameter until the parameter is of another kind."""
    parameter, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    changes = {
        "frozen and not": lambda: parameter.requires_grad_(False).requires_grad_(True),
        "other data": lambda: setattr(parameter, "data", torch.zeros(3)),
        "a gradient": lambda: parameter.sum().backward(),
        "cast": lambda: setattr(parameter, "data", parameter.data.double()),
        "swapped": lambda: torch.utils.swap_tensors(parameter, other),
    }
    for name, change in changes.items():
        before, kind = private.gradient_accumulator(parameter), private.accumulator_kind(parameter)
        if name == "swapped":
            del before  # it would not be swapped otherwise
            change()
            assert private.accumulator_kind(parameter) != kind
            continue
        change()
        is_same = private.gradient_accumulator(parameter) is before
        assert is_same == (private.accumulator_kind(parameter) == kind) == (name != "cast"), name


def test_gradient_accumulator() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert private.gradient_accumulator(parameter).variable is parameter
    with torch._C._AutoDispatchBelowAutograd():
        assert private.gradient_accumulator(parameter).variable is parameter


def test_in_backward() -> None:
    seen = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.register_hook(lambda g: seen.append(private.in_backward()))
    parameter.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


def test_in_nested_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def ask(_: torch.Tensor) -> None:
        private.queue_backward_callback(lambda: seen.append(private.in_nested_backward()))

    layer = torch.nn.Linear(1, 1)
    outside = torch.nn.Parameter(torch.ones(1))
    layer.weight.register_post_accumulate_grad_hook(ask)
    outside.register_post_accumulate_grad_hook(ask)
    checkpoint(layer, outside * torch.ones(1), use_reentrant=True).sum().backward()
    assert seen == [True, False]


def test_preserve_version_counter() -> None:
    buffer = torch.zeros(1)
    before = buffer._version
    with private.preserve_version_counter([buffer]):
        buffer.add_(1)
    assert buffer._version == before


def test_memory_owners() -> None:
    flat = torch.zeros(4)
    assert private.memory_owners(flat) == 1
    alias = torch.ones(2)
    alias.data = flat[:2]
    assert private.memory_owners(flat) == 2
    del alias
    assert private.memory_owners(flat) == 1


def test_queue_backward_callback() -> None:
    order = []
    parameter = torch.nn.Parameter(torch.zeros(1))

    def on_gradient(_: torch.Tensor) -> None:
        private.queue_backward_callback(lambda: order.append("end"))
        order.append("gradient")

    parameter.register_post_accumulate_grad_hook(on_gradient)
    parameter.sum().backward()
    assert order == ["gradient", "end"]


def test_accumulation_positions() -> None:
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    assert private.accumulation_positions((one * two).grad_fn) == {id(one): 0, id(two): 1}
    assert private.accumulation_positions((one * torch.ones(2)).grad_fn) == {id(one): 0}


def test_current_node() -> None:
    seen = []
    middle = torch.nn.Parameter(torch.ones(2)) * 2
    middle.register_hook(lambda grad: seen.append(private.current_node()))
    middle.sum().backward()
    assert seen == [middle.grad_fn]
    assert private.current_node() is None


def test_graph_task_id() -> None:
    seen = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda grad: seen.append(private.graph_task_id()))
    for _ in range(2):
        parameter.sum().backward()
    assert private.graph_task_id() == -1
    assert -1 not in seen
    assert len(set(seen)) == 2


def test_install_hooks_again() -> None:
    seen = []
    parameter, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    before = private.inner_tensor(parameter)
    torch.utils.swap_tensors(parameter, other)
    assert private.inner_tensor(parameter) != before
    parameter.sum().backward()
    assert seen == []  # the hook went with what was behind the parameter
    private.install_hooks_again(parameter)
    parameter.sum().backward()
    assert seen == [[2.0, 2.0]]


def test_inner_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    before = private.inner_tensor(parameter)
    parameter.data = torch.zeros(2)
    assert private.inner_tensor(parameter) == before


def test_hooks_after() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    handles = [parameter.register_post_accumulate_grad_hook(lambda p: None) for _ in range(2)]
    assert list(private.hooks_after(parameter)) == [handle.id for handle in handles]


def test_is_compiled_node() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
    assert private.is_compiled_node(compiled(parameter).grad_fn)
    assert not private.is_compiled_node((parameter * 2).grad_fn)


def test_move_hook_to_end() -> None:
    calls, was_last = [], []
    parameter = torch.nn.Parameter(torch.ones(2))

    def move(p: torch.Tensor) -> None:
        calls.append("ours")
        was_last.append(private.move_hook_to_end(p, handle.id))

    handle = parameter.register_post_accumulate_grad_hook(move)
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("theirs"))
    for _ in range(2):
        parameter.sum().backward()
    assert calls == ["ours", "theirs", "theirs", "ours"]  # the pass in which it is moved is not disturbed
    assert was_last == [False, True]


def test_will_run_all() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    nodes = [private.gradient_accumulator(parameter) for parameter in (used, unused)]
    answers = []
    middle = used * 2
    middle.register_hook(lambda grad: answers.append([private.will_run_all(nodes[:1]), private.will_run_all(nodes)]))
    middle.sum().backward()
    assert answers == [[True, False]]
    assert not private.will_run_all(nodes[:1])


def test_node_metadata() -> None:
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    private.node_metadata(node)["key"] = 1
    assert private.node_metadata(node)["key"] == 1


def test_has_hooks() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    assert not private.has_hooks(parameter, num_ours=0)
    after = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert private.has_hooks(parameter, num_ours=0)
    assert not private.has_hooks(parameter, num_ours=1)
    after.remove()
    parameter.register_hook(lambda gradient: None)
    assert private.has_hooks(parameter, num_ours=1)
