"""Agreement at wrap time: generated mutations, each of which must be an error on every rank, within moments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

NUM_MUTATIONS = 240
WORLD = 3


def base_model(rng: random.Random) -> nn.Module:
    """A small random module with parameters, buffers, an embedding, a frozen layer."""
    width = rng.choice([3, 4, 5])
    layers: dict[str, nn.Module] = {"embed": nn.Embedding(7, width)}
    for i in range(rng.randint(2, 4)):
        layers[f"fc{i}"] = nn.Linear(width, width, bias=rng.random() < 0.8)
    layers["conv"] = nn.Conv2d(2, 4, 3)
    layers["norm"] = nn.BatchNorm1d(width)
    layers["frozen"] = nn.Linear(2, 2)
    layers["frozen"].requires_grad_(False)
    module = nn.ModuleDict(layers)
    module.register_buffer("mask", torch.ones(width))
    return module


def a_linear(module: nn.Module, rng: random.Random) -> nn.Linear:
    return rng.choice([m for n, m in module.named_children() if n.startswith("fc")])


def rename(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["other"] = module.pop("fc0")
    return "fc0"


def swap_order(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    first = module.pop("fc0")
    module["fc0"] = first  # same names, same shapes, another order: what torch lets through
    return "fc"


def reshape(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    layer = a_linear(module, rng)
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape[0] + 1, layer.weight.shape[1]))
    return "weight"


def retype(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    layer = a_linear(module, rng)
    layer.weight = nn.Parameter(layer.weight.detach().to(rng.choice([torch.bfloat16, torch.float64])))
    return "weight"


def restride(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["conv"].to(memory_format=torch.channels_last)
    return "conv.weight"


def freeze(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    a_linear(module, rng).weight.requires_grad_(False)
    return "weight"


def unfreeze(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["frozen"].bias.requires_grad_(True)
    return "frozen.bias"


def add_parameter(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["extra"] = nn.Linear(2, 2)
    return "extra.weight"


def remove_parameter(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module.pop("conv")
    return "conv.weight"


def tie(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["fc1"].weight = module["fc0"].weight
    return "fc1.weight"


def make_sparse(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module["embed"].sparse = True
    return "embed.weight"


def buffer_shape(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module.register_buffer("mask", torch.ones(9))
    return "mask"


def buffer_dtype(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module.register_buffer("mask", module.mask.double())
    return "mask"


def buffer_missing(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    del module._buffers["mask"]
    return "mask"


def buffer_added(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    module.register_buffer("extra_buffer", torch.zeros(1))
    return "extra_buffer"


def option(name: str, values: list[Any]) -> Callable[..., str]:
    def mutate(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
        kwargs[name] = rng.choice(values)
        return name

    mutate.__name__ = f"option_{name}"
    return mutate


def ignore(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    import lockstep

    name = rng.choice(["fc0.weight", "conv.bias", "mask"])
    lockstep.DDP._set_params_and_buffers_to_ignore_for_model(module, [name])
    return name


def other_plan(module: nn.Module, rng: random.Random, kwargs: dict[str, Any]) -> str:
    from lockstep.ddp import setup
    from lockstep.plan import build_plan

    specs = setup.specs_of(setup.trainable_slots(module, set()), set())
    names = [spec.name for spec in specs]
    rng.shuffle(names)
    kwargs["plan"] = build_plan(specs, ready_order=names)
    return "plan"


MUTATIONS = [
    rename,
    swap_order,
    reshape,
    retype,
    restride,
    freeze,
    unfreeze,
    add_parameter,
    remove_parameter,
    tie,
    make_sparse,
    buffer_shape,
    buffer_dtype,
    buffer_missing,
    buffer_added,
    ignore,
    other_plan,
    option("bucket_cap_mb", [0.001, 1, 7.5]),
    option("bucket_cap_mb_list", [[1, 2], [0.5]]),
    option("find_unused_parameters", [True]),
    option("static_graph", [True]),
    option("forward_sync_buffers", [False]),
    option("gradient_as_bucket_view", [True, False]),
    option("skip_all_reduce_unused_params", [True]),
    option("bucket_order", ["observed"]),
]


def wrap_mutants(rank: int, seeds: list[int]) -> list[tuple[str, str, str]]:
    """For each seed, all ranks wrap the same model but one, which mutated it; returns what each wrap raised."""
    import lockstep

    outcomes = []
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        module = base_model(rng)
        culprit = rng.randrange(WORLD)
        mutation = MUTATIONS[seed % len(MUTATIONS)]
        kwargs: dict[str, Any] = {}
        expected = mutation(base_model(random.Random(seed)), random.Random(seed), {})
        if rank == culprit:
            mutation(module, random.Random(seed), kwargs)
        try:
            lockstep.DDP(module, **kwargs)
            outcomes.append((mutation.__name__, expected, ""))
        except lockstep.errors.Disagreement as error:
            outcomes.append((mutation.__name__, expected, str(error)))
    return outcomes


def rank_wrap_mutants(seeds: list[int]) -> list[tuple[str, str, str]]:
    return wrap_mutants(dist.get_rank(), seeds)


def test_no_mutation_is_silent_and_all_ranks_hear_the_same() -> None:
    by_rank = run_ranks(WORLD, rank_wrap_mutants, list(range(NUM_MUTATIONS)), limit_s=500)
    for outcomes in zip(*by_rank, strict=True):
        name, expected, _ = outcomes[0]
        texts = {text for _, _, text in outcomes}
        assert len(texts) == 1, f"ranks heard different things about {name}: {texts}"
        (text,) = texts
        assert text, f"{name} went through silently"
        assert expected in text, f"the message about {name} does not name {expected!r}:\n{text}"
        assert "rank 0" in text
        assert "Fix:" in text


def wrap_equal_models(num: int) -> list[str]:
    import lockstep

    digests = []
    for seed in range(num):
        torch.manual_seed(seed)
        ddp = lockstep.DDP(base_model(random.Random(seed)))
        digests.append(ddp.plan.digest)
    return digests


def test_equal_models_agree() -> None:
    first, *others = run_ranks(WORLD, wrap_equal_models, 20)
    assert all(other == first for other in others)


def wrap_on_some_ranks() -> None:
    import lockstep

    dist.barrier()  # the ranks that do wrap come within the limit of each other
    if dist.get_rank() == 1:
        return
    lockstep.DDP(nn.Linear(2, 2))


def test_a_rank_that_never_wraps_is_named() -> None:
    errors = expect_errors(3, [0, 2], wrap_on_some_ranks, env={"LOCKSTEP_AGREEMENT_TIMEOUT": "8"})
    for error in errors.values():
        assert error.type_name == "PeerLate"
        assert "rank(s) [1]" in error.text
        assert "LOCKSTEP_AGREEMENT_TIMEOUT" in error.text


def without_init_sync() -> list[float]:
    """init_sync=False exchanges nothing at wrap time, so models may differ; the layout is compared later."""
    import lockstep

    torch.manual_seed(dist.get_rank())
    ddp = lockstep.DDP(nn.Linear(2, 2, bias=False), init_sync=False)
    return ddp.module.weight.flatten().tolist()


def test_init_sync_false_leaves_models_alone() -> None:
    first, second = run_ranks(2, without_init_sync)
    assert first != second


def different_layout_without_init_sync(is_compiled: bool) -> None:
    import lockstep

    class Pair(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            names = ("b", "a") if swapped else ("a", "b")
            for name in names:
                setattr(self, name, nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    ddp = lockstep.DDP(Pair(dist.get_rank() == 1), init_sync=False)
    model = torch.compile(ddp, backend="aot_eager") if is_compiled else ddp
    model(torch.ones(1, 3)).sum().backward()
    raise AssertionError("something was reduced")


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_without_agreement_a_different_layout_is_found_before_anything_is_reduced(is_compiled: bool) -> None:
    for error in expect_errors(2, [0, 1], different_layout_without_init_sync, is_compiled).values():
        assert error.type_name == "Disagreement"
        assert "init_sync=False" in error.text


def call_two_models_in_another_order() -> list[Any]:
    import lockstep

    torch.manual_seed(0)
    models = [lockstep.DDP(nn.Linear(2, 2), init_sync=False) for _ in range(2)]
    order = models if dist.get_rank() == 0 else models[::-1]
    outputs = {id(model): model(torch.ones(1, 2)) for model in order}
    sum(outputs[id(model)].sum() for model in models).backward()
    return [p.grad.tolist() for model in models for p in model.parameters()]


def test_plans_are_compared_in_whatever_order_models_run() -> None:
    first, second = run_ranks(2, call_two_models_in_another_order)
    assert first == second


def synchronise_on_some_ranks(rank_with: int) -> None:
    import lockstep

    ddp = lockstep.DDP(nn.Linear(2, 2), init_sync=dist.get_rank() == rank_with)
    ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("rank_with", [0, 1])
def test_init_sync_on_some_ranks_only(rank_with: int) -> None:
    errors = expect_errors(2, [0, 1], synchronise_on_some_ranks, rank_with)
    assert "init_sync=False on this rank, and True on others" in errors[rank_with].text
    assert errors[1 - rank_with].type_name in ("PeerFailed", "PeerLost")


def count_broadcasts() -> list[int]:
    import lockstep

    models = [lockstep.DDP(nn.Linear(2, 2)) for _ in range(2)]
    counts = []
    for step in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            # In another order on each rank: there is no collective in a forward.
            order = models if (dist.get_rank() + step) % 2 else models[::-1]
            sum(model(torch.ones(1, 2)).sum() for model in order).backward()
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "gloo:broadcast"))
    return counts


def test_with_the_first_reduction_plans_travel_the_way_of_gradients() -> None:
    assert run_ranks(2, count_broadcasts) == [[2, 0, 0], [2, 0, 0]]
