"""Twenty-odd mistakes people make with data parallel, as small scripts that every rank runs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a forward uses as many as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.head_a = nn.Linear(4, 2)
        self.head_b = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, use_b: bool = False) -> torch.Tensor:
        x = self.trunk(x)
        return self.head_a(x) + self.head_b(x) if use_b else self.head_a(x)


def step(ddp: nn.Module, *args: Any, **kwargs: Any) -> None:
    ddp(torch.ones(3, 4), *args, **kwargs).sum().backward()


def unused_parameter() -> None:
    ddp = lockstep.DDP(TwoHeads())
    step(ddp)
    step(ddp)


def unused_parameter_before_the_optimizer() -> None:
    ddp = lockstep.DDP(TwoHeads())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [p.detach().clone() for p in ddp.parameters()]
    step(ddp)
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)), "weights changed"


def output_not_in_loss() -> None:
    class Both(TwoHeads):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x = self.trunk(x)
            return self.head_a(x), self.head_b(x)

    ddp = lockstep.DDP(Both())
    for _ in range(2):
        ddp(torch.ones(3, 4))[0].sum().backward()


def unused_on_one_rank_only() -> None:
    ddp = lockstep.DDP(TwoHeads())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        step(ddp, use_b=dist.get_rank() == 0)
        optimizer.step()


def static_graph_grows() -> None:
    ddp = lockstep.DDP(TwoHeads(), static_graph=True)
    step(ddp)
    step(ddp, use_b=True)


def static_graph_shrinks() -> None:
    ddp = lockstep.DDP(TwoHeads(), static_graph=True)
    step(ddp, use_b=True)
    step(ddp)
    step(ddp)


def static_graph_set_too_late() -> None:
    ddp = lockstep.DDP(nn.Linear(4, 2))
    step(ddp)
    ddp._set_static_graph()


def hook_raises() -> None:
    ddp = lockstep.DDP(nn.Linear(4, 2))

    def my_hook(state: Any, bucket: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in my hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, my_hook)
    step(ddp)


def hook_returns_a_tensor() -> None:
    ddp = lockstep.DDP(nn.Linear(4, 2))
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    step(ddp)


def hook_returns_too_little() -> None:
    ddp = lockstep.DDP(nn.Linear(4, 2))

    def my_hook(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer()[:1])
        return future

    ddp.register_comm_hook(None, my_hook)
    step(ddp)


def hook_sets_a_short_buffer() -> None:
    ddp = lockstep.DDP(nn.Linear(4, 2))

    def my_hook(state: Any, bucket: Any) -> Any:
        bucket.set_buffer(bucket.buffer()[:1])
        return bucket.gradients()

    ddp.register_comm_hook(None, my_hook)
    step(ddp)


def hook_registered_twice() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = lockstep.DDP(nn.Linear(4, 2))
    ddp.register_comm_hook(None, allreduce_hook)
    ddp.register_comm_hook(None, allreduce_hook)


def parameter_replaced() -> None:
    ddp = lockstep.DDP(TwoHeads())
    ddp.module.head_a = nn.Linear(4, 2)
    step(ddp, use_b=True)


def parameter_added() -> None:
    ddp = lockstep.DDP(TwoHeads())
    step(ddp, use_b=True)
    ddp.module.adapter = nn.Linear(4, 4)
    step(ddp, use_b=True)


def backward_raised() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("a bad batch")

    class Net(TwoHeads):
        def forward(self, x: torch.Tensor, broken: bool = False) -> torch.Tensor:  # type: ignore[override]
            x = self.trunk(x)
            x = Broken.apply(x) if broken else x
            return self.head_a(x) + self.head_b(x)

    ddp = lockstep.DDP(Net())
    with contextlib.suppress(ArithmeticError):
        step(ddp, broken=True)
    step(ddp)


def different_order() -> None:
    names = ("b", "a") if dist.get_rank() else ("a", "b")
    lockstep.DDP(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}))


def different_dtype() -> None:
    module = nn.Linear(3, 3)
    lockstep.DDP(module.double() if dist.get_rank() else module)


def different_option() -> None:
    lockstep.DDP(nn.Linear(3, 3), bucket_cap_mb=1 + dist.get_rank())


def different_ignored() -> None:
    module = nn.Linear(3, 3)
    if dist.get_rank():
        lockstep.DDP._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    lockstep.DDP(module)


def module_on_meta() -> None:
    lockstep.DDP(nn.Linear(3, 3, device="meta"))


def nothing_to_train() -> None:
    lockstep.DDP(nn.Linear(3, 3).requires_grad_(False))


def lazy_module() -> None:
    lockstep.DDP(nn.LazyLinear(3))


def zero_bucket_cap() -> None:
    lockstep.DDP(nn.Linear(3, 3), bucket_cap_mb=0)


def unknown_bucket_order() -> None:
    lockstep.DDP(nn.Linear(3, 3), bucket_order="random")


def plan_of_another_model() -> None:
    plan = lockstep.DDP(nn.Linear(3, 3)).plan
    lockstep.DDP(nn.Linear(3, 4), plan=plan)


def sync_batch_norm_on_cpu() -> None:
    lockstep.DDP(nn.SyncBatchNorm(3))


def half_a_delay() -> None:
    module = nn.Linear(3, 3)
    lockstep.DDP(module, delay_all_reduce_named_params=[("bias", module.bias)])


def step_inside_no_sync() -> list[str]:
    ddp = lockstep.DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, ddp.no_sync():
        warnings.simplefilter("always")
        step(ddp)
        optimizer.step()
    return [str(w.message) for w in caught]


def reset_after_an_error() -> list[torch.Tensor]:
    """The way back after a caught error, as its message says."""
    ddp = lockstep.DDP(TwoHeads())
    step(ddp)
    ddp.reset_sync_window()
    ddp.zero_grad()
    step(ddp, use_b=True)
    return [p.grad for p in ddp.parameters()]
