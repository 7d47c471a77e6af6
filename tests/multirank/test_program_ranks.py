"""What a captured program knows of ranks: distributed values inside compiled models, each on two and three ranks.

Values and gradients are those of the uncompiled module on every rank.  Where nothing in the program depends on the
rank, all ranks have the same graph; where something does, ``lockstep.explain`` names the line that read it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.tensor")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.group: Any = dist.group.WORLD
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
        self.mine = dist.new_group([0])  # of which the other ranks are no members

    def use(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.tanh(self.linear(x)))


class WorldSize(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * dist.get_world_size() + self.group.size() + dist.get_world_size(self.group)


class Backend(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 2 if dist.get_backend() == "gloo" else x


class Available(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 3 if dist.is_available() and dist.is_initialized() else x


class Ranks(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * len(dist.get_process_group_ranks(self.group)) + dist.get_global_rank(self.group, 0)


class Environment(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 5 if os.environ.get("LOCKSTEP_TEST_NOTHING") is None else x


class MeshFacts(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * self.mesh.size() + self.mesh.ndim


class Placements(Base):
    def use(self, x: Tensor) -> Tensor:
        kinds = (Shard(0), Replicate(), Partial())
        same = Shard(0) == kinds[0] and Replicate() == kinds[1] and Shard(0) != Shard(1)
        return x * (kinds[0].dim + 2) if same and kinds[0].is_shard() else x


class FunctionalSum(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + functional.wait_tensor(functional.all_reduce(x.detach(), "sum", self.group))


class FunctionalGather(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + functional.all_gather_tensor(x.detach(), 0, self.group).sum(0)


class LaterWait(Base):
    def use(self, x: Tensor) -> Tensor:
        pending = functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return torch.sin(x) + pending


class FromLocal(Base):
    def use(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return (whole * 2).to_local(grad_placements=[Replicate()])


class Redistribute(Base):
    def use(self, x: Tensor) -> Tensor:
        summed = DTensor.from_local(x.detach(), self.mesh, [Partial()], run_check=False).redistribute(
            self.mesh, [Replicate()]
        )
        return x * summed.to_local()


class ForwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, given, output: output * 2)


class ReadsRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * (1 + dist.get_rank())  # the line that is named


class ReadsGroupRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + self.group.rank()


class ReadsCoordinate(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + self.mesh.get_local_rank()


SAME = (
    WorldSize,
    Backend,
    Available,
    Ranks,
    Environment,
    MeshFacts,
    Placements,
    FunctionalSum,
    FunctionalGather,
    LaterWait,
    FromLocal,
    Redistribute,
    ForwardHook,
)
OTHER = (ReadsRank, ReadsGroupRank, ReadsCoordinate)


def run_case(kinds: tuple[Callable[[], nn.Module], ...]) -> dict[str, Any]:
    import lockstep

    found: dict[str, Any] = {}
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = kind()
        plain = kind()
        plain.load_state_dict(copy.deepcopy(module.state_dict()))
        ddp, plain_ddp = lockstep.DDP(module), lockstep.DDP(plain)
        model = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for index in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
            ends = []
            for called, inner in ((model, module), (plain_ddp, plain)):
                inner.zero_grad()
                output = called(x)
                output.square().mean().backward()
                ends.append((output.detach(), [p.grad.clone() for p in inner.parameters()]))
            torch.testing.assert_close(ends[0][0], ends[1][0], msg=lambda text, k=kind: f"{k.__name__}: {text}")
            for mine, right in zip(ends[0][1], ends[1][1], strict=True):
                torch.testing.assert_close(mine, right, msg=lambda text, k=kind: f"{k.__name__}: {text}")
        dist.barrier()
        explanation = lockstep.explain(ddp)
        name = kind.__name__  # type: ignore[attr-defined]
        found[name] = (len(explanation.graphs), explanation.rank_is_baked_in_at, str(explanation))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_values_that_are_the_same_on_all_ranks_make_the_same_graph(world: int) -> None:
    for found in run_ranks(world, run_case, SAME, preload=PRELOAD):
        assert {name: (graphs, places) for name, (graphs, places, _) in found.items()} == {
            kind.__name__: (1, ()) for kind in SAME
        }


def line_of(kind: type[nn.Module]) -> str:
    import inspect

    lines, first = inspect.getsourcelines(kind)
    offset = next(index for index, line in enumerate(lines) if "return" in line)
    return f"test_program_ranks.py:{first + offset}"


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_baked_in_is_named_with_its_line(world: int) -> None:
    for found in run_ranks(world, run_case, OTHER, preload=PRELOAD):
        for kind in OTHER:
            graphs, places, text = found[kind.__name__]
            assert graphs == 1
            assert places == (line_of(kind),)
            assert f"rank is baked in at {line_of(kind)}" in text
