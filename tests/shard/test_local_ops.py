"""Fused optimizers over shards: on local parts where that is right, and the ordinary way where it may not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lockstep import torch_private
from lockstep.shard import local_ops

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPES = [(4, 3), (5,), (2, 2, 2), (4, 3)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[Any, Any]]:
    found = torch_private.dtensor_handlers()
    before = dict(found)
    local_ops.install()
    yield found
    found.clear()
    found.update(before)


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that went the ordinary way."""
    seen: list[Any] = []
    usual = local_ops._run_ordinarily

    def run(operator: Any, args: Any, kwargs: Any) -> None:
        seen.append(operator)
        usual(operator, args, kwargs)

    monkeypatch.setattr(local_ops, "_run_ordinarily", run)
    return seen


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded(tensors: list[Tensor], *placements: Any) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (1,) * len(placements))
    return [DTensor.from_local(t.clone(), mesh, placements, run_check=False) for t in tensors]


def trained(
    parameters: list[Tensor], gradients: list[Tensor], kind: type[torch.optim.Optimizer], **options: Any
) -> Any:
    leaves = [p.requires_grad_() for p in parameters]
    optimizer = kind(leaves, fused=True, **options)  # type: ignore[call-arg]
    for _ in range(3):
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shards_are_updated_as_plain_tensors_are(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], placement: Any, ordinary: list[Any]
) -> None:
    plain = trained(values(0), values(1), kind, lr=0.1, **options)
    mine = trained(sharded(values(0), placement), sharded(values(1), placement), kind, lr=0.1, **options)
    assert ordinary == []
    for ours, theirs in zip(mine, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a_learning_rate_that_is_a_tensor_and_a_loss_scale(ordinary: list[Any]) -> None:
    lr = torch.tensor(0.1)
    plain = trained(values(0), values(1), torch.optim.AdamW, lr=lr)
    mine = trained(sharded(values(0), Shard(0)), sharded(values(1), Shard(0)), torch.optim.AdamW, lr=lr)
    assert ordinary == []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, plain, strict=True))


def test_sums_that_are_still_to_be_made_go_the_ordinary_way(ordinary: list[Any], handlers: dict[Any, Any]) -> None:
    parameters, gradients = sharded(values(0), Replicate()), sharded(values(1), Partial())
    mine = trained(parameters, gradients, torch.optim.AdamW, lr=0.1)
    plain = trained(values(0), values(1), torch.optim.AdamW, lr=0.1)
    assert ordinary
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, plain, strict=True))
    assert all(operator in handlers for operator in local_ops.operators())  # and the next one may be short again


def test_lists_that_are_cut_differently_go_the_ordinary_way(ordinary: list[Any]) -> None:
    trained(sharded(values(0)[:1], Shard(0)), sharded(values(1)[:1], Shard(1)), torch.optim.AdamW, lr=0.1)
    assert ordinary


def test_several_meshes_go_the_ordinary_way(ordinary: list[Any]) -> None:
    parameters = sharded(values(0)[:1], Shard(0)) + sharded(values(0)[1:2], Replicate(), Shard(0))
    gradients = sharded(values(1)[:1], Shard(0)) + sharded(values(1)[1:2], Replicate(), Shard(0))
    with suppress(RuntimeError):  # what torch says of it is torch's affair
        trained(parameters, gradients, torch.optim.AdamW, lr=0.1)
    assert ordinary


def test_what_torch_has_a_handler_for_is_left_to_it(handlers: dict[Any, Any]) -> None:
    operator = torch.ops.aten._fused_sgd_.default
    handlers[operator] = theirs = object()
    local_ops.install()
    assert handlers[operator] is theirs


def test_a_compiled_step_is_traced_the_ordinary_way(ordinary: list[Any]) -> None:
    parameters = [p.requires_grad_() for p in sharded(values(0), Shard(0))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    for _ in range(3):
        for leaf, gradient in zip(parameters, sharded(values(1), Shard(0)), strict=True):
            leaf.grad = gradient
        torch.compile(optimizer.step, backend="aot_eager")()
    plain = trained(values(0), values(1), torch.optim.AdamW, lr=0.1)
    for ours, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours.to_local(), theirs)  # type: ignore[attr-defined]
