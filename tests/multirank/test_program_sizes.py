"""The buckets that a program of the whole step has, and where its gradients are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._functorch.aot_autograd")
NUM_LAYERS = 6


def train(mode: str, hook: bool = False, **options: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """A few steps of a stack of layers with 1.5 MiB of weights."""
    import lockstep
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(NUM_LAYERS)])
    model = lockstep.DDP(module, **options)
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode=mode)
    found = []
    for index in range(6):
        generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
        found.append(step(torch.randn(4, 256, generator=generator)))
    return model, step, [*found, *(p.detach() for p in model.parameters())]


def slow_link() -> None:
    """Let the link be slow, however fast it is: so the buckets that suit it are not the default ones."""
    from lockstep.ddp import compilation
    from lockstep.plan.link import LinkModel

    measure = compilation.measure_link

    def measured(*args: Any) -> LinkModel:
        assert measure(*args).bytes_per_second > 0
        return LinkModel(latency_seconds=1e-5, bytes_per_second=1e8)

    compilation.measure_link = measured


def compare() -> list[str]:
    slow_link()
    _, _, right = train("loop")
    digests = []
    for _ in range(2):  # the second model takes the plan of the first
        model, step, found = train("graph")
        torch.testing.assert_close(found, right)
        assert not step.explain().reasons
        assert step.explain().num_program_calls == 5
        assert model.plan.link is not None
        (program,) = step._runner.programs
        targets = [node.target for node in program.graph.graph.nodes]
        # The weights' gradients are made where they travel, and by nobody else; biases are brought.
        assert targets.count(torch.ops.lockstep.program_product.default) == NUM_LAYERS
        launches = [node for node in program.graph.graph.nodes if "program_launch" in str(node.target)]
        assert sum(len(node.args[0]) for node in launches) == NUM_LAYERS
        digests += [model.plan.digest, program.digest]
    assert digests[:2] == digests[2:]
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_buckets_are_chosen_for_the_link_and_are_the_same_on_all_ranks(world: int) -> None:
    answers = run_ranks(world, compare, preload=PRELOAD)
    assert all(answer == answers[0] for answer in answers)


def keep() -> None:
    for options in ({"bucket_cap_mb": 0.5}, {"hook": True}):
        model, step, found = train("graph", **options)
        assert model.plan.link is None
        assert step.explain().num_program_calls == 5
        torch.testing.assert_close(found, train("loop", **options)[2])


def test_sizes_of_the_users_and_those_of_a_hook_stay() -> None:
    run_ranks(2, keep, preload=PRELOAD)


class Crossed(nn.Module):
    """Its layers are used in another order than they are made in, and two weights have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(24, 8), nn.Linear(16, 24)
        self.one, self.other = (nn.Parameter(0.1 * torch.randn(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(nn.functional.linear(x, self.one + self.other))))


def observe() -> None:
    import lockstep
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        model = lockstep.DDP(Crossed(), bucket_order="observed", bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode=mode)
        for index in range(5):
            generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
            step(torch.randn(4, 16, generator=generator))
        ends.append([p.detach() for p in model.parameters()])
        assert model.plan.order == "observed"
    assert step.explain().num_program_calls == 4, str(step.explain())
    torch.testing.assert_close(*ends)


def test_a_program_is_made_for_the_order_that_was_observed() -> None:
    run_ranks(2, observe, preload=PRELOAD)
