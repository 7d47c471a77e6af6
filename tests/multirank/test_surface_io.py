"""What goes into the wrapper and what comes out: inputs, outputs, state dicts, copies, modes, nesting."""

from __future__ import annotations

import collections
import copy
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.compare import Tensors, assert_identical, gradients_of
from multirank.harness import expect_errors, lockstep_only, run_ranks, subject_class, torch_fails
from multirank.models import CASES, MLP, Batch, Case, regression_batch
from multirank.steps import (
    DTYPE,
    NUM_STEPS,
    WORLD,
    assert_steps,
    descend,
    local_batch,
    rank_steps,
    reference_steps,
    seeded,
    wrapped,
)

MLP_CASE = CASES["mlp"]


# Outputs in any container


@dataclass
class Record:
    left: torch.Tensor
    extra: Any


class Pair(NamedTuple):
    left: torch.Tensor
    extra: Any


CONTAINERS = {
    "tuple": lambda left, extra: (left, extra),
    "list": lambda left, extra: [left, extra],
    "dict": lambda left, extra: {"left": left, "extra": extra},
    "ordered_dict": lambda left, extra: collections.OrderedDict(left=left, extra=extra),
    "dataclass": Record,
    "namedtuple": Pair,
    "nested": lambda left, extra: {"a": [Record(left, Pair(left, (extra, None, "text", 3)))], "b": ()},
    "dataclass_of_dict": lambda left, extra: Record(left, {"deep": [extra]}),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Record):
        value = (value.left, value.extra)
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def shape_of(value: Any) -> Any:
    """The containers of an output, with tensors replaced by their sizes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, Record):
        return ("Record", shape_of(value.left), shape_of(value.extra))
    if isinstance(value, dict):
        return (type(value).__name__, {k: shape_of(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return (type(value).__name__, [shape_of(v) for v in value])
    return value


class Contained(nn.Module):
    """The right head is behind a container, and only some ranks have it in their output."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, use_right: bool) -> Any:
        h = torch.tanh(self.stem(x))
        return CONTAINERS[self.container](self.left(h), self.right(h) if use_right else None)


def contained_loss(module: Any, x: torch.Tensor, use_right: bool) -> tuple[torch.Tensor, Any]:
    output = module(x, use_right)
    return torch.stack([t.square().mean() for t in tensors_in(output)]).sum(), shape_of(output)


def uses_right(step: int, rank: int, always: bool) -> bool:
    return always or rank == step % 2


def train_contained(container: str, options: dict[str, Any]) -> tuple[list[Tensors], list[Any]]:
    ddp = wrapped(seeded(lambda: Contained(container)), **options)
    steps: list[Tensors] = []
    shapes = []
    for step in range(NUM_STEPS):
        ddp.zero_grad()
        use_right = uses_right(step, dist.get_rank(), "find_unused_parameters" not in options)
        loss, shape = contained_loss(ddp, local_batch(MLP_CASE, step)["x"], use_right)
        loss.backward()
        steps.append(gradients_of(ddp))
        shapes.append(shape)
        descend(ddp)
    return steps, shapes


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "find_unused", "static_graph"],
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_any_container(container: str, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if "static_graph" in options and container in ("dataclass", "nested", "dataclass_of_dict"):
        request.applymarker(torch_fails("does not see tensors in a dataclass and leaves the first step unsynced"))
    values = run_ranks(WORLD, train_contained, container, options)
    module, expected = seeded(lambda: Contained(container)), []
    always = "find_unused_parameters" not in options
    for step in range(NUM_STEPS):
        module.zero_grad()
        losses = []
        for rank, x in enumerate(MLP_CASE.batch(step, DTYPE)["x"].chunk(WORLD)):
            loss, shape = contained_loss(module, x, uses_right(step, rank, always))
            assert values[rank][1][step] == shape, "the output came back in another container"
            losses.append(loss)
        torch.stack(losses).mean().backward()
        expected.append(gradients_of(module))
        descend(module)
    assert_steps([steps for steps, _ in values], expected, container)


# Inputs


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, batch: dict[str, list[torch.Tensor]], *more: Any, scale: float = 1.0, **named: Any) -> Any:
        h = torch.tanh(self.first(batch["x"][0])) * scale
        for factor in more:
            h = h * factor
        return self.last(h) + named["record"].left


def many_inputs_loss(module: Any, batch: Batch) -> torch.Tensor:
    record = Record(batch["y"].mean(dim=1, keepdim=True), None)
    output = module({"x": [batch["x"]]}, 0.5, batch["y"][:, :1], scale=2.0, record=record)
    return (output - batch["y"]).square().mean()


MANY_INPUTS = Case("many_inputs", ManyInputs, regression_batch, many_inputs_loss)


def train_many_inputs(options: dict[str, Any]) -> list[Tensors]:
    return rank_steps(wrapped(MANY_INPUTS.module(DTYPE), **options), MANY_INPUTS)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static_graph"])
def test_positional_and_named_inputs_in_containers(options: dict[str, Any]) -> None:
    values = run_ranks(WORLD, train_many_inputs, options)
    assert_steps(values, reference_steps(MANY_INPUTS.module(DTYPE), MANY_INPUTS, WORLD), "inputs")


# State dicts


def own_state_dict() -> tuple[list[str], list[str]]:
    module = MLP_CASE.module(DTYPE)
    return list(wrapped(module).state_dict()), list(module.state_dict())


def test_state_dict_has_torchs_keys() -> None:
    for wrapped_keys, plain_keys in run_ranks(2, own_state_dict):
        assert wrapped_keys == [f"module.{key}" for key in plain_keys]


PREFIXES = {
    "module": "module.",
    "plain": "",
    "compiled": "_orig_mod.",
    "compiled_wrapper": "_orig_mod.module.",
    "wrapped_compiled": "module._orig_mod.",
}


def load_with_prefix(prefix: str) -> tuple[Any, Tensors]:
    ddp = wrapped(seeded(MLP))
    state = MLP_CASE.module(DTYPE).state_dict()
    keys = ddp.load_state_dict({prefix + key: tensor for key, tensor in state.items()})
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0)).backward()
    return (list(keys.missing_keys), list(keys.unexpected_keys)), gradients_of(ddp)


@pytest.mark.parametrize("name", PREFIXES)
def test_load_state_dict_accepts_known_prefixes(name: str, request: pytest.FixtureRequest) -> None:
    if name != "module":
        request.applymarker(torch_fails("takes only keys that start with module."))
    values = run_ranks(WORLD, load_with_prefix, PREFIXES[name])
    assert [keys for keys, _ in values] == [([], [])] * WORLD
    expected = reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD, num_steps=1)
    assert_steps([[gradients] for _, gradients in values], expected, name)


def load_mixed_prefixes() -> bool:
    ddp = wrapped(seeded(MLP))
    state = MLP_CASE.module(DTYPE).state_dict()
    prefixes = list(PREFIXES.values())
    ddp.load_state_dict({prefixes[i % len(prefixes)] + k: t for i, (k, t) in enumerate(state.items())})
    return all(torch.equal(ddp.module.state_dict()[key], tensor) for key, tensor in state.items())


@torch_fails("takes only keys that start with module.")
def test_load_state_dict_accepts_a_mixture_of_prefixes() -> None:
    assert run_ranks(2, load_mixed_prefixes) == [True, True]


def load_wrong_keys() -> None:
    ddp = wrapped(seeded(MLP))
    state = MLP_CASE.module(DTYPE).state_dict()
    state.pop("layers.0.weight")
    state["layers.9.weight"] = torch.ones(1)
    ddp.load_state_dict({f"module.{key}": tensor for key, tensor in state.items()})


def test_load_state_dict_is_still_strict() -> None:
    for error in expect_errors(2, [0, 1], load_wrong_keys).values():
        assert "layers.0.weight" in error.text
        assert "layers.9.weight" in error.text


class ModuleNamedModule(nn.Module):
    """Its own keys start with the very prefix that is stripped."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def load_own_module_prefix(prefix: str) -> bool:
    ddp = wrapped(seeded(ModuleNamedModule))
    state = {name: torch.randn_like(tensor) for name, tensor in ddp.module.state_dict().items()}
    ddp.load_state_dict({prefix + key: tensor for key, tensor in state.items()})
    return all(torch.equal(ddp.module.state_dict()[key], tensor) for key, tensor in state.items())


def test_a_module_whose_own_keys_start_with_module() -> None:
    assert run_ranks(2, load_own_module_prefix, "module.") == [True, True]


# Copies of the wrapper


def train_copy(how: str) -> list[Tensors]:
    """The copy trains right, and the original, stepped in between, is not disturbed by it."""
    ddp = wrapped(MLP_CASE.module(DTYPE))
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0)).backward()
    ddp.zero_grad()
    twin = copy.deepcopy(ddp) if how == "deepcopy" else pickle.loads(pickle.dumps(ddp))
    assert type(twin) is subject_class()
    assert all(a is not b for a, b in zip(ddp.parameters(), twin.parameters(), strict=True))
    return rank_steps(twin, MLP_CASE) + rank_steps(ddp, MLP_CASE)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_wrapper_train(how: str) -> None:
    values = run_ranks(WORLD, train_copy, how)
    expected = reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD)
    assert_steps(values, expected + expected, how)


# Modes and attributes


class WithAttribute(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = 11

    def describe(self) -> str:
        return f"knows {self.vocabulary} words"


def modes_and_attributes() -> dict[str, Any]:
    module = WithAttribute()
    ddp = wrapped(module)
    seen: dict[str, Any] = {
        "same module": ddp.module is module,
        "attribute": ddp.module.vocabulary,
        "method": ddp.module.describe(),
        "eval returns self": ddp.eval() is ddp,
        "eval": [m.training for m in ddp.modules()],
        "train returns self": ddp.train() is ddp,
        "train": [m.training for m in ddp.modules()],
        "parameters": [n for n, _ in ddp.named_parameters()],
        "is module": isinstance(ddp, nn.Module),
    }
    ddp.train(False)
    seen["train(False)"] = any(m.training for m in ddp.modules())
    try:
        _ = ddp.vocabulary
    except AttributeError as error:
        seen["missing"] = str(error)
    return seen


def test_modes_and_attribute_access() -> None:
    for seen in run_ranks(2, modes_and_attributes):
        assert seen.pop("missing").endswith("has no attribute 'vocabulary'")
        assert seen.pop("eval") == [False] * 8
        assert seen.pop("train") == [True] * 8
        assert seen == {
            "same module": True,
            "attribute": 11,
            "method": "knows 11 words",
            "eval returns self": True,
            "train returns self": True,
            "parameters": [f"module.{n}" for n, _ in WithAttribute().named_parameters()],
            "is module": True,
            "train(False)": False,
        }


def evaluate() -> tuple[torch.Tensor, bool]:
    ddp = wrapped(MLP_CASE.module(DTYPE))
    with torch.no_grad():
        output = ddp.eval()(MLP_CASE.batch(0, DTYPE)["x"])
    return output, any(p.grad is not None for p in ddp.parameters())


def test_forward_without_gradients_may_differ_in_number_between_ranks() -> None:
    for output, has_gradients in run_ranks(2, evaluate):
        assert_identical(output, MLP_CASE.module(DTYPE)(MLP_CASE.batch(0, DTYPE)["x"]).detach(), "output")
        assert not has_gradients


def scatter_and_gather() -> dict[str, Any]:
    ddp = wrapped(MLP_CASE.module(DTYPE))
    x = torch.ones(2, 3)
    inputs, kwargs = ddp.to_kwargs((x, [x, "text"]), {"scale": x}, 0)
    moved = {"inputs": inputs, "kwargs": kwargs}
    scattered = ddp.scatter((1, "a"), {"b": None}, [0])
    try:
        ddp.gather([x, x], 0)
        gathered = ""
    except AssertionError as error:  # torch gathers on accelerators only
        gathered = str(error)
    return {**moved, "scattered": scattered, "gathered": gathered}


def test_scatter_gather_and_to_kwargs() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(AssertionError) as caught:
        nn.parallel.scatter_gather.gather([x, x], 0)
    for seen in run_ranks(2, scatter_and_gather):
        assert_identical(seen["inputs"], ((x, [x, "text"]),), "positional inputs")
        assert_identical(seen["kwargs"], ({"scale": x},), "named inputs")
        assert seen["scattered"] == (((1, "a"),), ({"b": None},))
        assert seen["gathered"] == str(caught.value)


# Wrappers in wrappers, and modules that cannot be wrapped


def train_nested() -> list[Tensors]:
    module = MLP_CASE.module(DTYPE)
    module.layers[2] = wrapped(module.layers[2])
    steps = rank_steps(wrapped(module), MLP_CASE)
    return [{name.replace("2.module.", "2."): g for name, g in step.items()} for step in steps]


def test_a_wrapper_inside_a_wrapper() -> None:
    values = run_ranks(WORLD, train_nested)
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD), "nested")


def train_chain() -> list[Tensors]:
    """Two wrappers side by side in one backward pass, as for an encoder and a decoder."""
    module = MLP_CASE.module(DTYPE)
    for index in (0, 2, 4):
        module.layers[index] = wrapped(module.layers[index])
    steps = rank_steps(module, MLP_CASE)
    return [{name.replace(".module.", "."): g for name, g in step.items()} for step in steps]


def test_several_wrappers_in_one_backward() -> None:
    values = run_ranks(WORLD, train_chain)
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, WORLD), "chain")


def wrap_meta() -> None:
    with torch.device("meta"):
        module = MLP()
    wrapped(module)


@torch_fails("stops deep in a collective, in words about operators")
def test_a_module_on_meta_is_refused_with_a_reason() -> None:
    for error in expect_errors(2, [0, 1], wrap_meta).values():
        assert "meta" in error.text
        assert "layers.0.weight" in error.text


def wrap_without_parameters(how: str) -> None:
    module = nn.ReLU() if how == "none" else nn.Linear(2, 2).requires_grad_(False)
    wrapped(module)


@pytest.mark.parametrize("how", ["none", "frozen"])
def test_a_module_without_trainable_parameters_gets_torchs_error(how: str) -> None:
    for error in expect_errors(2, [0, 1], wrap_without_parameters, how).values():
        assert "RuntimeError" in error.base_names
        assert "DistributedDataParallel is not needed when a module doesn't have any parameter" in error.text
        assert "parameter that requires a gradient." in error.text


def unwrap_in_both_orders() -> list[bool]:
    import lockstep

    module = MLP_CASE.module(DTYPE)
    plain_compiled = torch.compile(module, backend="eager")
    return [
        lockstep.unwrap(wrapped(module)) is module,
        lockstep.unwrap(torch.compile(wrapped(module), backend="eager")) is module,
        lockstep.unwrap(wrapped(plain_compiled)) is module,
        lockstep.unwrap(module) is module,
    ]


@lockstep_only
def test_unwrap_gives_the_plain_module() -> None:
    assert run_ranks(2, unwrap_in_both_orders) == [[True] * 4] * 2
