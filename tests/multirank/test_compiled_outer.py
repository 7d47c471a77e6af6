"""Compiled functions that call a wrapper: one graph, with the launches in it, and all that a forward does around it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch._functorch.aot_autograd")
ONE_EACH = 1e-5  # so that every parameter has a bucket of its own


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.spare(x) if self.uses_spare else x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 0.5) * 2


def function_of(inner: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(x) * 2


def twice(inner: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(x) - 0.5 * inner(x + 1)


def beside_a_teacher(inner: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = inner(-x)
        return inner(x) - target

    return forward


def with_a_penalty(inner: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        module = getattr(inner, "module", inner)
        return inner(x) + module.last.weight.square().sum()

    return forward


CALLERS = {
    "function": function_of,
    "module": Outer,
    "twice": twice,
    "teacher": beside_a_teacher,
    "penalty": with_a_penalty,
}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def train(caller: str, backend: str, options: dict[str, Any]) -> None:
    """Next to one plain copy per rank, whose gradients are averaged and whose buffers are rank 0's."""
    import lockstep

    torch.manual_seed(3)
    module = Net().double()
    module.uses_spare = not options.get("find_unused_parameters", False)
    plain = [copy.deepcopy(module) for _ in range(dist.get_world_size())]
    ddp = lockstep.DDP(module, bucket_cap_mb=ONE_EACH, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lockstep|.*compiled graph|.*no graph")
        model = torch.compile(CALLERS[caller](ddp), backend=backend, fullgraph=True)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, *plain)]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with ddp.no_sync() if step == 2 else torch.enable_grad():
                model(batch(step, ddp.step.reducer.rank)).square().mean().backward()
            buffers = {name: buffer.clone() for name, buffer in plain[0].named_buffers()}
            for rank, copied in enumerate(plain):
                if step != 3:  # not after a forward whose backward did not synchronise, as in torch
                    copied.load_state_dict({**copied.state_dict(), **buffers})
                CALLERS[caller](copied)(batch(step, rank)).square().mean().backward()
            if step == 2:
                continue
            for name, parameter in module.named_parameters():
                theirs = [p.get_parameter(name).grad for p in plain]
                if theirs[0] is None:
                    assert parameter.grad is None, name
                    continue
                mean = torch.stack(theirs).mean(0)
                torch.testing.assert_close(
                    parameter.grad, mean, msg=lambda text, n=name, s=step: f"{n}, step {s}: {text}"
                )
                for copied in plain:
                    copied.get_parameter(name).grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(
            buffer, plain[dist.get_rank()].get_buffer(name), msg=lambda text, n=name: f"{n}: {text}"
        )
    used = [b for b in ddp.reducer.buckets if module.uses_spare or "spare" not in b.spec.names[0]]
    assert all(bucket.left_in_graph for bucket in used)
    assert ddp.step.num_windows == 4


@pytest.mark.parametrize("caller", CALLERS)
def test_one_graph(caller: str) -> None:
    run_ranks(2, train, caller, "aot_eager", {}, preload=PRELOAD)


def test_one_graph_by_inductor() -> None:
    run_ranks(2, train, "module", "inductor", {}, preload=PRELOAD)


@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=lambda options: next(iter(options)),
)
def test_one_graph_with_an_option(options: dict[str, Any]) -> None:
    run_ranks(2, train, "function", "aot_eager", options, preload=PRELOAD)


def train_unevenly() -> None:
    """Inside ``join()`` a rank without data mirrors the others: the forward is left to Python then."""
    import lockstep

    module = nn.Linear(4, 2)
    ddp = lockstep.DDP(module)
    model = torch.compile(function_of(ddp), backend="aot_eager")
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            module.zero_grad()
            model(batch(step, ddp.step.reducer.rank).float()).sum().backward()
    ours = [torch.zeros_like(module.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(ours, module.weight.detach())
    torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)


def test_uneven_inputs() -> None:
    run_ranks(2, train_unevenly, preload=PRELOAD)


def train_inside_a_compiled_step() -> None:
    """The backward is called by the compiled function, too."""
    import lockstep

    torch.manual_seed(3)
    module = Net().double()
    plain = copy.deepcopy(module)
    ddp = lockstep.DDP(module, bucket_cap_mb=ONE_EACH)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        loss = ddp(x).square().mean()
        loss.backward()
        return loss

    x = batch(0, 0)  # the same on all ranks, so that the mean is each rank's own
    for _ in range(3):
        module.zero_grad()
        plain.zero_grad()
        step(x)
        plain(x).square().mean().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_a_compiled_step_with_the_backward_in_it() -> None:
    run_ranks(2, train_inside_a_compiled_step, preload=PRELOAD)
