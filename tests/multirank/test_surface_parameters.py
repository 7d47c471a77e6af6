"""Every kind of parameter: layouts, dtypes, sparse and empty ones, shared, frozen, moved.

Gradients of several steps on three ranks are compared with one process on the whole batch; ranks are equal
bit by bit. What wraps the step (clipping, scaling, autocast, checkpointing) is in test_surface_training.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from multirank.compare import Tensors, assert_close, gradients_of
from multirank.harness import RankOutcome, report_all, run_outcomes, run_ranks, torch_fails
from multirank.models import (
    CASES,
    MLP,
    Batch,
    Case,
    ConvNet,
    image_batch,
    regression_batch,
    squared_error,
    token_batch,
)
from multirank.steps import (
    DTYPE,
    WORLD,
    assert_steps,
    descend,
    local_batch,
    rank_steps,
    reference_steps,
    seeded,
    wrapped,
)

# A mantissa of 8 or 11 bits, times the few roundings of a tiny model.
HALF_TOLERANCE = 0.05


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 4, sparse=True)
        self.bag = nn.EmbeddingBag(37, 4, sparse=True, mode="sum")
        self.head = nn.Linear(8, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.table(tokens).mean(1), self.bag(tokens)], dim=1)
        return self.head(joined)


def last_token_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(module(batch["tokens"]), batch["targets"][:, -1])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(8, 6, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.real = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.real((x.to(torch.complex128) @ self.mixing + self.phase).abs())


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.single = nn.Linear(8, 8, dtype=torch.float32)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.last = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.single(x.float())).double()
        x = x + self.brain(x.bfloat16()).double()
        return self.last(x)


class WithEmptyParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.last = nn.Linear(8, 3)
        self.empty_bias = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h) + (h @ self.empty.T).sum() + self.empty_bias.sum()


class SharedModules(nn.Module):
    """One layer under two names, one weight in two layers, one layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.transposed = nn.Linear(8, 8)
        self.transposed.weight = self.first.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(x)) + self.transposed(x)
        return self.last(torch.tanh(self.first(x)))


class PartlyFrozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight.requires_grad_(False)
        self.layers[0].bias.requires_grad_(False)


class ScalarsAndViews(nn.Module):
    """A zero-dimensional parameter, a transposed (non-contiguous) one, and one with an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.randn(8, 3).t())
        self.odd = nn.Parameter(torch.randn(7))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias) * self.scale + self.odd.prod()


def channels_last_conv_net() -> nn.Module:
    return ConvNet().eval().to(memory_format=torch.channels_last)


def channels_last_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(module(batch["x"].to(memory_format=torch.channels_last)), batch["y"])


KINDS = {
    case.name: case
    for case in (
        Case("sparse", SparseTable, token_batch, last_token_loss),
        Case("complex", Complex, regression_batch, squared_error),
        Case("channels_last", channels_last_conv_net, image_batch, channels_last_loss),
        Case("mixed_dtypes", MixedDtypes, regression_batch, squared_error),
        Case("empty", WithEmptyParameters, regression_batch, squared_error),
        Case("shared", SharedModules, regression_batch, squared_error),
        Case("partly_frozen", PartlyFrozen, regression_batch, squared_error),
        Case("scalars_and_views", ScalarsAndViews, regression_batch, squared_error),
    )
}
OWN_DTYPES = {"complex", "mixed_dtypes"}
OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "one_bucket": {"bucket_cap_mb": 25},
}


def build(name: str) -> nn.Module:
    return seeded(KINDS[name].build_module, None if name in OWN_DTYPES else DTYPE)


def train_kind(name: str, options: dict[str, Any]) -> tuple[list[Tensors], dict[str, Any]]:
    ddp = wrapped(build(name), **options)
    steps = rank_steps(ddp, KINDS[name])
    strides = {
        n: (p.stride(), p.grad.stride())
        for n, p in ddp.module.named_parameters()
        if p.grad is not None and not p.grad.is_sparse
    }
    return steps, strides


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_kind_of_parameter(name: str, options: str) -> None:
    values = run_ranks(WORLD, train_kind, name, OPTIONS[options])
    # bfloat16 layers are part of the mixed model, and everything before them gets their rounding.
    tolerance = HALF_TOLERANCE if name == "mixed_dtypes" else None
    expected = reference_steps(build(name), KINDS[name], WORLD)
    assert_steps([steps for steps, _ in values], expected, name, tolerance)
    wrong = {n: pair for n, pair in values[0][1].items() if pair[0] != pair[1]}
    if name == "channels_last":
        assert not wrong, f"gradients do not have their parameter's strides: {wrong}"


def train_half(dtype: torch.dtype, options: dict[str, Any]) -> list[Tensors]:
    case = CASES["mlp"]
    return rank_steps(wrapped(case.module(dtype), **options), case, dtype)


@pytest.mark.parametrize("options", ["copies", "views"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_parameters(dtype: torch.dtype, options: str) -> None:
    values = run_ranks(WORLD, train_half, dtype, OPTIONS[options])
    case = CASES["mlp"]
    expected = reference_steps(case.module(dtype), case, WORLD, dtype)
    assert_steps(values, expected, str(dtype), HALF_TOLERANCE)


class OneRankUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.rare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, use_rare: bool) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(h + self.rare(h) if use_rare else h)


def uses_rare(step: int, rank: int) -> bool:
    """Another rank each step, and in the last step none."""
    return rank == step % WORLD and step < WORLD


def train_with_a_rare_layer(options: dict[str, Any]) -> list[Tensors]:
    ddp = wrapped(seeded(OneRankUses), find_unused_parameters=True, **options)
    steps: list[Tensors] = []
    for step in range(WORLD + 1):
        ddp.zero_grad()
        x = local_batch(CASES["mlp"], step)["x"]
        ddp(x, uses_rare(step, dist.get_rank())).square().mean().backward()
        steps.append(gradients_of(ddp))
        descend(ddp)
    return steps


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_a_layer_that_one_rank_uses(view: bool) -> None:
    values = run_ranks(WORLD, train_with_a_rare_layer, {"gradient_as_bucket_view": view})
    module, expected = seeded(OneRankUses), []
    for step in range(WORLD + 1):
        module.zero_grad()
        shards = CASES["mlp"].batch(step, DTYPE)["x"].chunk(WORLD)
        losses = [module(x, uses_rare(step, rank)).square().mean() for rank, x in enumerate(shards)]
        torch.stack(losses).mean().backward()
        expected.append(gradients_of(module))
        descend(module)
    assert expected[-1]["rare.weight"] is None
    assert_steps(values, expected, "a layer used by one rank at a time")


# Parameters that change after wrapping: right gradients, or a refusal by name on every rank; never silence


def freeze_and_unfreeze(options: dict[str, Any]) -> list[Tensors]:
    return freezing_steps(wrapped(CASES["mlp"].module(DTYPE), **options), rank_loss)


def rank_loss(module: Any, step: int) -> torch.Tensor:
    return CASES["mlp"].loss(module, local_batch(CASES["mlp"], step))


def whole_loss(module: Any, step: int) -> torch.Tensor:
    return CASES["mlp"].loss(module, CASES["mlp"].batch(step, DTYPE))


def freezing_steps(module: Any, loss: Any) -> list[Tensors]:
    """Steps 1 and 2 with a frozen layer, step 3 with another one, step 4 with all."""
    plain = module.module if hasattr(module, "no_sync") else module
    steps: list[Tensors] = []
    for step, frozen in enumerate([None, 0, 0, 2, None]):
        for index in (0, 2, 4):
            plain.layers[index].requires_grad_(index != frozen)
        module.zero_grad()
        loss(module, step).backward()
        steps.append(gradients_of(module))
        descend(module)
    return steps


@pytest.mark.parametrize("options", ["copies", "views", "find_unused"])
def test_frozen_and_unfrozen_between_steps(options: str, request: pytest.FixtureRequest) -> None:
    if options != "find_unused":
        request.applymarker(torch_fails("waits for the frozen parameters and stops"))
    values = run_ranks(WORLD, freeze_and_unfreeze, OPTIONS[options])
    assert_steps(values, freezing_steps(CASES["mlp"].module(DTYPE), whole_loss), "freezing between steps")


def assert_not_silent(outcomes: list[RankOutcome], expected: list[Tensors], names: list[str]) -> None:
    errors = [outcome.error for outcome in outcomes]
    if all(error is None for error in errors):
        assert_steps([outcome.value for outcome in outcomes], expected, "after the change")
        return
    reports = report_all(outcomes)
    assert all(error is not None for error in errors), f"only some ranks were told\n{reports}"
    for error in errors:
        assert any(name in error.text for name in names), f"the message names no parameter\n{reports}"


def unfreeze_what_was_frozen_at_wrap() -> list[Tensors]:
    module = CASES["mlp"].module(DTYPE)
    module.layers[2].requires_grad_(False)
    ddp = wrapped(module)
    steps = rank_steps(ddp, CASES["mlp"], num_steps=1)
    module.layers[2].requires_grad_(True)
    return steps + rank_steps(ddp, CASES["mlp"], num_steps=2)


@torch_fails("never reduces a parameter that was frozen when the module was wrapped")
def test_unfreezing_what_was_frozen_at_wrap_is_not_silent() -> None:
    outcomes = run_outcomes(WORLD, unfreeze_what_was_frozen_at_wrap)
    module = CASES["mlp"].module(DTYPE)
    module.layers[2].requires_grad_(False)
    expected = reference_steps(module, CASES["mlp"], WORLD, num_steps=1)
    module.layers[2].requires_grad_(True)
    expected += reference_steps(module, CASES["mlp"], WORLD, num_steps=2)
    assert_not_silent(outcomes, expected, ["layers.2.weight", "layers.2.bias"])


MOVES = ("cpu", "to_other_dtype", "new_parameters", "replaced_layer")


def move(ddp: Any, how: str) -> None:
    if how == "cpu":
        ddp.cpu()
    elif how == "to_other_dtype":
        ddp.to(torch.float64)
    elif how == "new_parameters":
        # What a trip to a device and back does where the device's tensors are of another kind.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        ddp.to(torch.float64)
    elif how == "replaced_layer":
        ddp.to(torch.float64)
        with torch.no_grad():
            ddp.module.layers[2].weight = nn.Parameter(ddp.module.layers[2].weight.clone())


def train_then_move(how: str) -> list[Tensors]:
    """The first step in float32 for the moves that change the dtype, all later ones in float64."""
    case = CASES["mlp"]
    first_dtype = DTYPE if how == "cpu" else torch.float32
    ddp = wrapped(case.module(first_dtype))
    case.loss(ddp, local_batch(case, 0, first_dtype)).backward()
    ddp.zero_grad()
    move(ddp, how)
    return rank_steps(ddp, case)


@pytest.mark.parametrize("how", MOVES)
def test_moving_the_module_after_wrapping_is_not_silent(how: str, request: pytest.FixtureRequest) -> None:
    if how != "cpu":
        request.applymarker(torch_fails("stops syncing in silence, or stops without naming a parameter"))
    outcomes = run_outcomes(WORLD, train_then_move, how)
    case = CASES["mlp"]
    module = case.module(DTYPE if how == "cpu" else torch.float32).to(DTYPE)
    expected = reference_steps(module, case, WORLD)
    assert_not_silent(outcomes, expected, list(expected[0]))


def test_gradients_of_the_rare_layer_are_divided_by_the_whole_world() -> None:
    """Guards the reference above: one rank's use counts one part in WORLD, not one."""
    values = run_ranks(WORLD, train_with_a_rare_layer, {})
    module = seeded(OneRankUses)
    x = CASES["mlp"].batch(0, DTYPE)["x"].chunk(WORLD)[0]
    module(x, True).square().mean().backward()
    own = gradients_of(module)["rare.weight"]
    assert own is not None
    assert_close({"rare": values[0][0]["rare.weight"]}, {"rare": own / WORLD}, "share of one rank")
