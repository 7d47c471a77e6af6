"""A ``.grad`` that was there before the backward keeps its memory where the program looks at that memory.

Autograd adds in place to a gradient that is there, so whoever holds other tensors in the same memory (one flat tensor
that all gradients are views of, arrays of numpy's) sees the new values; they must be the reduced ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks
from multirank.mixes import BLOCKS, WHOLE, Mix, Net, Side, params_of, run_mix, train

pytestmark = [pytest.mark.multirank, lockstep_only]


def bind_flat(side: Side) -> None:
    """Let every gradient be a view of one tensor of zeros."""
    parameters = list(side.parameters.values())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    pieces = flat.split([p.numel() for p in parameters])
    side.memory["seen"] = dict(zip(side.parameters, pieces, strict=True))
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def look_with_numpy(side: Side) -> None:
    """Let every gradient be a tensor of its own, with an array that looks at it."""
    for parameter in side.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    arrays = {name: p.grad.numpy() for name, p in side.parameters.items() if p.grad is not None}
    side.memory["seen"] = {name: torch.from_numpy(array) for name, array in arrays.items()}


def step_with(
    bind: Callable[[Side], None], when: str = "before", num_micro_steps: int = 1
) -> Callable[[Side, int], None]:
    """Zero in place, or anew in every step between forward and backward; look at the other tensors afterwards."""

    def step(side: Side, t: int) -> None:
        if t == 0 or side.is_reference:
            bind(side)
        for micro_step in range(num_micro_steps):
            with side.no_sync(micro_step < num_micro_steps - 1):
                loss = side.loss(t, micro_step)
                if when == "between" and micro_step == 0:
                    bind(side)
                loss.backward()
        if not side.is_reference:
            assert_seen(side)

    return step


def assert_seen(side: Side) -> None:
    seen: dict[str, Tensor] = side.memory["seen"]
    for name, parameter in side.parameters.items():
        assert parameter.grad is not None
        assert torch.equal(seen[name].view_as(parameter), parameter.grad), f"{name} was reduced somewhere else"


def wide_net() -> list[nn.Module]:
    net = Net(width=160, has_extra=True)
    net.uses_extra = True
    return [net]


def one_net() -> list[nn.Module]:
    return [Net()]


MIXES = {
    "one_flat_tensor": Mix(step_with(bind_flat), one_net, num_steps=3, set_to_none=False, modes=(*WHOLE, BLOCKS)),
    "one_flat_tensor_of_large_ones": Mix(
        step_with(bind_flat), wide_net, num_steps=3, set_to_none=False, options={"bucket_cap_mb": 0.22}
    ),
    "a_new_flat_tensor_each_time": Mix(step_with(bind_flat, "between"), one_net, num_steps=3),
    "one_flat_tensor_and_micro_steps": Mix(
        step_with(bind_flat, num_micro_steps=2), one_net, num_steps=3, set_to_none=False, worlds=(3,)
    ),
    "arrays": Mix(step_with(look_with_numpy), one_net, num_steps=3, set_to_none=False),
}


def run(name: str, mode: str, backend: str) -> list[str]:
    return train(MIXES[name], mode, backend)


@pytest.mark.parametrize(("name", "mode", "backend", "world"), params_of(MIXES))
def test_memory(name: str, mode: str, backend: str, world: int) -> None:
    run_mix(run, MIXES, name, mode, backend, world)


def freeze_what_was_added_up(as_view: bool | None) -> None:
    import lockstep

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    options = {} if as_view is None else {"gradient_as_bucket_view": as_view}
    model = lockstep.DDP(module, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    frozen = module[0].weight
    with model.no_sync():
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
    looked_at = frozen.grad.detach()  # the same memory
    alone = looked_at.clone()
    frozen.requires_grad_(False)
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    everyones = [torch.empty_like(alone) for _ in range(world)]
    dist.all_gather(everyones, alone)
    torch.testing.assert_close(frozen.grad, torch.stack(everyones).mean(0))
    if as_view is False:  # .grad keeps its memory
        assert torch.equal(looked_at, frozen.grad)


@pytest.mark.parametrize("as_view", [None, False, True])
def test_what_was_added_up_before_freezing_is_reduced(as_view: bool | None) -> None:
    run_ranks(2, freeze_what_was_added_up, as_view)
