"""torch.compile and the wrapper in either order: one graph, no breaks, gradients of the uncompiled module.

The reduction runs after the compiled backward here; it is correct in every mode, and not yet overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import inductor_cache, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

ROWS = 4


def build() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


class Counter:
    """A backend that counts graphs and passes on to another one."""

    def __init__(self, backend: str) -> None:
        self.num_graphs = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        return self._backend(graph, inputs)


def wrap_then_compile(module: nn.Module, **options: Any) -> nn.Module:
    import lockstep

    return torch.compile(lockstep.DDP(module), **options)


def compile_then_wrap(module: nn.Module, **options: Any) -> nn.Module:
    import lockstep

    return lockstep.DDP(torch.compile(module, **options))


def compile_in_place(module: nn.Module, **options: Any) -> nn.Module:
    import lockstep

    ddp = lockstep.DDP(module)
    ddp.compile(**options)
    return ddp


ORDERS = {f.__name__: f for f in (wrap_then_compile, compile_then_wrap, compile_in_place)}


def batch(step: int) -> Tensor:
    return torch.randn(ROWS * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(step))


def mine(x: Tensor) -> Tensor:
    return x[dist.get_rank() * ROWS : (dist.get_rank() + 1) * ROWS]


def train(order: str, backend: str, fullgraph: bool) -> int:
    counter = Counter(backend)
    module, reference = build(), build()
    model = ORDERS[order](module, backend=counter, fullgraph=fullgraph)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(mine(batch(step))).pow(2).mean().backward()
        reference(batch(step)).pow(2).mean().backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
    return counter.num_graphs


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_every_order_gives_one_graph_and_the_right_gradients(order: str, fullgraph: bool) -> None:
    assert run_ranks(2, train, order, "aot_eager", fullgraph) == [1, 1]


@pytest.mark.slow
def test_inductor() -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": inductor_cache()}
    assert run_ranks(2, train, "wrap_then_compile", "inductor", True, env=env, limit_s=500) == [1, 1]


def accumulate() -> int:
    counter = Counter("aot_eager")
    module, reference = build(), build()
    import lockstep

    ddp = lockstep.DDP(module)
    model = torch.compile(ddp, backend=counter)
    for window in range(2):
        module.zero_grad()
        reference.zero_grad()
        for micro_step in range(4):
            ddp.require_backward_grad_sync = micro_step == 3
            x = batch(10 * window + micro_step)
            model(mine(x)).pow(2).mean().backward()
            reference(x).pow(2).mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    return counter.num_graphs


def test_toggling_the_synchronisation_compiles_nothing_anew() -> None:
    assert run_ranks(2, accumulate) == [1, 1]


def unwrap_everything() -> list[bool]:
    import lockstep

    plain = build()
    wrapped = [
        lockstep.DDP(plain),
        torch.compile(lockstep.DDP(plain)),
        lockstep.DDP(torch.compile(plain)),
        torch.compile(lockstep.DDP(torch.compile(plain))),
    ]
    return [lockstep.unwrap(model) is plain for model in wrapped]


def test_unwrap_sees_through_any_order() -> None:
    assert run_ranks(2, unwrap_everything) == [[True] * 4] * 2


def train_in_observed_order(order: str) -> list[list[Tensor]]:
    """The plan changes after the first step, and with it the buckets of the same parameters."""
    import lockstep

    torch.manual_seed(11)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    if order == "compile_then_wrap":
        ddp = model = lockstep.DDP(
            torch.compile(module, backend="aot_eager"), bucket_order="observed", bucket_cap_mb=0.0005
        )
    else:
        ddp = lockstep.DDP(module, bucket_order="observed", bucket_cap_mb=0.0005)
        model = torch.compile(ddp, backend="aot_eager")
    seen = []
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(ROWS, 6)).square().mean().backward()
        seen.append([p.grad.clone() for p in module.parameters()])
    assert ddp.plan.order == "observed"
    assert len(ddp.plan) > 2
    return seen


@pytest.mark.parametrize("order", ["wrap_then_compile", "compile_then_wrap"])
def test_a_plan_in_observed_order(order: str) -> None:
    torch.manual_seed(11)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    for seen in run_ranks(2, train_in_observed_order, order):
        for step, gradients in enumerate(seen):
            module.zero_grad()
            for rank in range(2):
                torch.manual_seed(100 * step + rank)
                (module(torch.randn(ROWS, 6)).square().mean() / 2).backward()
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                torch.testing.assert_close(gradient, parameter.grad)


class ClampsItself(nn.Module):
    """Changes a parameter in the forward, as an embedding with ``max_norm=`` does; its backward does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.detach().clamp_(-0.1, 0.1)
        return self.last(torch.tanh(self.first(x)))


def train_what_changes_itself(order: str) -> dict[str, str]:
    import lockstep

    torch.manual_seed(5)
    module, reference = ClampsItself(), ClampsItself()
    reference.load_state_dict(module.state_dict())
    model = ORDERS[order](module, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (module, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(mine(batch(step))).pow(2).mean().backward()
        reference(batch(step)).pow(2).mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert module.first.weight.abs().max() > 0.1  # changed in each forward, and by each step
    return lockstep.explain(model).left_to_hooks


@pytest.mark.parametrize("order", ["wrap_then_compile", "compile_then_wrap"])
def test_a_forward_that_changes_its_own_parameter(order: str) -> None:
    for left_to_hooks in run_ranks(2, train_what_changes_itself, order):
        (name,) = [name for name, why in left_to_hooks.items() if why == "the forward changes it"]
        assert name.endswith("first.weight")
