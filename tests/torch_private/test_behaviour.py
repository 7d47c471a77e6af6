"""What torch does without a name for it, and we build on: one test each, so that the one that changed fails."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep import torch_private as private


class Give(torch.autograd.Function):
    """The identity, whose gradient is whatever ``make`` returns."""

    @staticmethod
    def forward(ctx, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.make(), None


class Add(torch.autograd.Function):
    """A node with two leaves behind it."""

    @staticmethod
    def forward(ctx, one: Tensor, two: Tensor) -> Tensor:
        return one + two

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.clone(), grad.clone()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


def fives(made: list[int], keep: Callable[[Tensor], object] | None = None, kept: list[object] | None = None) -> Tensor:
    """A new gradient, whose address goes to ``made``, and something of which may be kept."""
    grad = torch.full((4,), 5.0)
    made.append(grad.data_ptr())
    if keep is not None and kept is not None:
        kept.append(keep(grad))
    return grad


# ---------------------------------------------------------------- whose memory a gradient lies in


def test_a_gradient_that_nobody_holds_becomes_grad_itself() -> None:
    leaf, made = parameter(), []
    Give.apply(leaf, lambda: fives(made)).sum().backward()
    assert leaf.grad.data_ptr() == made[0]


def test_a_gradient_that_someone_holds_is_copied_into_grad() -> None:
    leaf, made, kept = parameter(), [], []
    Give.apply(leaf, lambda: fives(made, lambda grad: grad, kept)).sum().backward()
    assert leaf.grad.data_ptr() != made[0]
    assert leaf.grad.tolist() == kept[0].tolist()


@pytest.mark.parametrize("part_of", [lambda flat: private.alias(flat, (4,), (1,), 2), lambda flat: flat[2:6]])
def test_a_gradient_in_memory_of_others_becomes_grad_too(part_of: Callable[[Tensor], Tensor]) -> None:
    """It is the tensor that must not be held; who else has tensors in its memory does not matter."""
    leaf, flat = parameter(), torch.zeros(8)
    Give.apply(leaf, lambda: part_of(flat)).sum().backward()
    assert leaf.grad.data_ptr() == flat[2:].data_ptr()


HOLDERS = {
    "the tensor": lambda grad: grad,
    "another tensor on its memory": lambda grad: private.alias(grad, (4,), (1,), 0),
    "a view": lambda grad: grad[:1],
    "the storage": lambda grad: grad.untyped_storage(),
}


def sum_of_two(keep: Callable[[Tensor], object] | None) -> tuple[Tensor, list[int], list[object]]:
    """Two gradients of one leaf in one pass: autograd adds them before they come to .grad."""
    leaf, made, kept = parameter(), [], []
    one, two = (Give.apply(leaf, lambda: fives(made, keep, kept)) for _ in range(2))
    (one.sum() + two.sum()).backward()
    return leaf.grad, made, kept


def test_a_sum_is_made_in_memory_that_nobody_holds() -> None:
    grad, made, _ = sum_of_two(None)
    assert grad.tolist() == [10.0] * 4
    assert grad.data_ptr() in made


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_sum_is_not_made_in_memory_that_someone_holds(holder: str) -> None:
    grad, made, kept = sum_of_two(HOLDERS[holder])
    assert grad.tolist() == [10.0] * 4
    assert grad.data_ptr() not in made
    assert all(set(thing.tolist()) == {5.0} for thing in kept if isinstance(thing, Tensor))


def test_but_what_is_added_to_grad_is_added_in_place_whoever_holds_it() -> None:
    leaf = parameter()
    leaf.sum().backward()
    grad = leaf.grad
    other = private.alias(grad, (4,), (1,), 0)
    leaf.sum().backward()
    assert leaf.grad is grad
    assert other.tolist() == [2.0] * 4


# ---------------------------------------------------------------- who is counted as an owner of memory


def test_every_tensor_on_the_memory_is_an_owner() -> None:
    flat = torch.zeros(4)
    assert private.memory_owners(flat) == 1
    others = [flat[:2], flat.detach(), private.alias(flat, (1,), (1,), 3)]
    assert private.memory_owners(flat) == private.memory_owners(others[0]) == 4
    others.clear()
    assert private.memory_owners(flat) == 1


def test_another_reference_to_the_same_tensor_is_no_owner() -> None:
    flat = torch.zeros(4)
    same = [flat, flat]
    assert private.memory_owners(same[0]) == 1


def test_a_storage_held_in_python_is_not_seen() -> None:
    """There is one Python object for it, the one that is made to ask, and which is taken off again."""
    flat = torch.zeros(4)
    held = flat.untyped_storage()
    assert private.memory_owners(flat) == 1
    assert held.data_ptr() == flat.data_ptr()


def test_a_tensor_that_a_graph_has_saved_is_an_owner() -> None:
    result = torch.zeros(4, requires_grad=True).exp()  # its backward needs the result
    assert private.memory_owners(result) == 2


def test_in_the_hook_after_accumulation_grad_is_the_only_owner_of_its_memory() -> None:
    leaf, owners = parameter(), []
    leaf.register_post_accumulate_grad_hook(lambda p: owners.append(private.memory_owners(p.grad)))
    Give.apply(leaf, lambda: fives([])).sum().backward()
    assert owners == [1]


# ---------------------------------------------------------------- gradients that a hook on a node withholds


def test_a_node_may_withhold_gradients() -> None:
    """Nothing is added to .grad then; but the hook after accumulation runs all the same, and finds what was there."""
    one, two, calls = parameter(), parameter(), []
    for name, leaf in (("one", one), ("two", two)):
        leaf.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad is None)))
    result = Add.apply(one, two)
    result.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (None, grad_inputs[1]))
    result.sum().backward()
    assert one.grad is None
    assert two.grad.tolist() == [1.0] * 4
    assert sorted(calls) == [("one", True), ("two", False)]


def test_a_withheld_gradient_leaves_grad_as_it_is() -> None:
    one, two = parameter(), parameter()
    one.grad = before = torch.full((4,), 3.0)
    result = Add.apply(one, two)
    result.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (None, grad_inputs[1]))
    result.sum().backward()
    assert one.grad is before
    assert one.grad.tolist() == [3.0] * 4


def test_a_hook_before_accumulation_is_given_none_for_a_withheld_gradient() -> None:
    one, two, seen = parameter(), parameter(), []
    one.register_hook(seen.append)
    result = Add.apply(one, two)
    result.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (None, grad_inputs[1]))
    result.sum().backward()
    assert seen == [None]


def test_what_else_flows_to_a_leaf_arrives_where_one_node_withholds() -> None:
    one, two, calls = parameter(), parameter(), []
    one.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.tolist()))
    result = Add.apply(one, two)
    result.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (None, grad_inputs[1]))
    (result + 7 * one).sum().backward()
    assert calls == [[7.0] * 4]


# ---------------------------------------------------------------- which nodes a pass comes to


class Ask:
    """Asks about nodes from inside a pass; made before the graph, so that the graph can hold the question."""

    def __init__(self) -> None:
        self.nodes: dict[str, object] = {}
        self.answers: dict[str, bool] = {}

    def __call__(self) -> Tensor:
        self.answers = {name: private.engine_will_run(node) for name, node in self.nodes.items()}
        return torch.ones(4)


@pytest.fixture
def asked() -> tuple[Ask, dict[str, torch.nn.Parameter], Tensor]:
    ask = Ask()
    leaves = {name: parameter() for name in ("one", "two", "elsewhere")}
    before, beside, elsewhere = leaves["one"] * 3, leaves["two"] * 3, leaves["elsewhere"] * 3
    after = Give.apply(before, ask) + beside
    root = after.sum()
    ask.nodes = {
        **{f"accumulator of {name}": private.gradient_accumulator(leaf) for name, leaf in leaves.items()},
        "one to come": before.grad_fn,
        "one beside": beside.grad_fn,
        "one that has run": after.grad_fn,
        "the root": root.grad_fn,
        "of another graph": elsewhere.grad_fn,
    }
    return ask, leaves, root


def test_the_engine_knows_the_nodes_of_a_backward(asked) -> None:
    ask, _, root = asked
    root.backward()
    assert ask.answers == {
        "accumulator of one": True,
        "accumulator of two": True,
        "accumulator of elsewhere": False,
        "one to come": True,
        "one beside": True,
        "one that has run": True,  # whether it belongs to the pass, not whether it is still to come
        "the root": False,  # where there is one, the pass begins with it and keeps no account of it
        "of another graph": False,
    }


def test_the_engine_knows_the_nodes_of_a_backward_for_some_inputs(asked) -> None:
    ask, leaves, root = asked
    root.backward(inputs=[leaves["one"]])
    assert {name for name, answer in ask.answers.items() if answer} == {
        "accumulator of one",
        "one to come",
        "one that has run",
    }


def test_the_engine_runs_no_accumulator_for_gradients_that_are_returned(asked) -> None:
    ask, leaves, root = asked
    torch.autograd.grad(root, list(leaves.values()), allow_unused=True)
    assert {name for name, answer in ask.answers.items() if answer} == {"one to come", "one beside", "one that has run"}


def test_the_engine_knows_all_roots_where_there_are_several(asked) -> None:
    ask, leaves, root = asked
    other_root = leaves["two"].sum()
    ask.nodes["the other root"] = other_root.grad_fn
    torch.autograd.backward([root, other_root])
    assert ask.answers["the root"]
    assert ask.answers["the other root"]


# ---------------------------------------------------------------- the order of hooks


def hooked(names: str) -> tuple[torch.nn.Parameter, OrderedDict, list[str]]:
    leaf, calls = parameter(), []
    for name in names:
        leaf.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    return leaf, leaf._post_accumulate_grad_hooks, calls


def test_hooks_after_accumulation_run_in_the_order_of_registration() -> None:
    leaf, hooks, calls = hooked("abc")
    leaf.sum().backward()
    assert calls == ["a", "b", "c"]
    assert type(hooks) is OrderedDict


def test_a_hook_that_is_taken_out_and_put_back_runs_last() -> None:
    leaf, hooks, calls = hooked("abc")
    first = next(iter(hooks))
    hooks[first] = hooks.pop(first)
    leaf.sum().backward()
    assert calls == ["b", "c", "a"]


def test_a_hook_that_is_moved_to_the_end_runs_where_it_did() -> None:
    """autograd walks the plain dict beneath the ordered one, and that one does not know of ``move_to_end``."""
    leaf, hooks, calls = hooked("abc")
    hooks.move_to_end(next(iter(hooks)))
    leaf.sum().backward()
    assert calls == ["a", "b", "c"]


def test_a_hook_that_was_moved_can_be_removed_by_its_handle() -> None:
    leaf, calls = parameter(), []
    handles = [leaf.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name)) for name in "ab"]
    hooks = leaf._post_accumulate_grad_hooks
    hooks[handles[0].id] = hooks.pop(handles[0].id)
    handles[0].remove()
    leaf.sum().backward()
    assert calls == ["b"]


def test_hooks_before_accumulation_run_before_those_after_it() -> None:
    leaf, _, calls = hooked("a")
    leaf.register_hook(lambda grad: calls.append("gradient"))
    leaf.sum().backward()
    assert calls == ["gradient", "a"]


def test_an_accumulator_that_nobody_keeps_is_made_anew_without_its_hooks() -> None:
    leaf, _, calls = hooked("a")
    private.gradient_accumulator(leaf).register_hook(lambda *_: calls.append("node"))
    leaf.sum().backward()
    assert calls == ["a"]


def test_a_hook_on_the_accumulator_runs_after_the_hooks_on_the_leaf() -> None:
    leaf, _, calls = hooked("a")
    node = private.gradient_accumulator(leaf)
    node.register_hook(lambda *_: calls.append("node"))
    leaf.sum().backward()
    assert calls == ["a", "node"]
