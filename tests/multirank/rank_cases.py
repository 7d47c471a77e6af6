"""Models with distributed values inside: groups, meshes, placements, DTensors, collectives, hooks, surroundings.

Each kind is one case of ``test_program_ranks.py``.  ``change`` alters what the forward depends on, so that another
graph must be made; ``touch`` alters what it does not depend on.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

VARIABLE = "LOCKSTEP_TEST_NOTHING"
_shared: dict[str, Any] = {}


def shared(name: str, make: Any) -> Any:
    """Groups and meshes are made once for a world: each is a collective."""
    if name not in _shared:
        _shared[name] = make()
    return _shared[name]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        world = dist.get_world_size()
        self.linear = nn.Linear(4, 4)
        self.group: Any = dist.group.WORLD
        self.new: Any = shared("new", lambda: dist.new_group(list(range(world))))
        self.mine: Any = shared("mine", lambda: dist.new_group([0]))  # of which the other ranks are no members
        # Of this rank alone.
        self.alone: Any = shared("alone", lambda: [dist.new_group([r]) for r in range(world)])[dist.get_rank()]
        self.mesh: DeviceMesh = shared("mesh", lambda: init_device_mesh("cpu", (world,), mesh_dim_names=("all",)))
        self.plane: DeviceMesh = shared(
            "plane", lambda: init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "inner"))
        )
        self.unused = 0

    def use(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.use(torch.tanh(self.linear(x)))

    def inputs(self, x: Tensor) -> tuple[Any, ...]:
        return (x,)

    def touch(self) -> None:
        self.unused += 1

    change: Any = None
    needs_compiled_autograd = False
    breaks = False  # where torch itself cannot make one graph of it


# ---------------------------------------------------------------- process groups


class GroupSizes(Base):
    """The default group, a new one, an attribute, one that is closed over."""

    def use(self, x: Tensor) -> Tensor:
        closed = self.new

        def size() -> int:
            return dist.get_world_size(closed)

        return x * dist.get_world_size() + self.group.size() + dist.get_world_size(dist.group.WORLD) + size()


class GroupAsArgument(Base):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        (group,) = rest
        return self.linear(x) * dist.get_world_size(group) + group.size()

    def inputs(self, x: Tensor) -> tuple[Any, ...]:
        return (x, self.group)

    def change(self) -> None:
        self.group = self.alone


class GroupFacts(Base):
    """Members, global ranks, backends."""

    def use(self, x: Tensor) -> Tensor:
        members = dist.get_process_group_ranks(self.group)
        x = x * len(members) + members[-1] + dist.get_global_rank(self.group, 0)
        return x * 2 if dist.get_backend(self.group) == "gloo" and dist.get_backend() == "gloo" else x


class GroupName(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * (2 if self.group.group_name == dist.group.WORLD.group_name else 3)

    def change(self) -> None:
        self.group = self.new


class ReadsRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * (1 + dist.get_rank())


class ReadsRankAsTensor(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * torch.tensor(1.0 + dist.get_rank())


class ReadsGroupRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + self.group.rank() - dist.get_rank(self.new) / 2


class ReadsNonMember(Base):
    """A group that only rank 0 is in."""

    def use(self, x: Tensor) -> Tensor:
        return x * dist.get_world_size(self.mine)


class BranchesOnRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 2 if dist.get_rank() == 0 else torch.sin(x)  # named


class BranchesOnMembership(Base):
    def use(self, x: Tensor) -> Tensor:
        return x.cos() if dist.get_rank(self.mine) >= 0 else x  # named


class IndexesByRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + x[dist.get_rank()]


class KeepsRank(Base):
    """Asked for when the model was made, and by way of the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.label = f"rank {self.rank}"
        self.table = torch.full((4,), 1.0 + self.rank)

    def use(self, x: Tensor) -> Tensor:
        mean = x.detach().mean() * (0.1 + self.rank)
        return (x * (self.rank + 1) + int(os.environ["RANK"])) * self.table - 2.5 * self.rank + mean


class IndexesByRankInParts(Base):
    def use(self, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        filled = torch.full((4,), 0.5 * rank) * torch.tensor(float(rank))
        return x * x[:, rank : rank + 2].sum() + x[rank, rank] - x[-1 - rank] * filled


class SlicesByRank(Base):
    """Rows, columns and parts of the rank; positions and constants that are made for it."""

    def use(self, x: Tensor) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        part = x[rank : rank + 1, :].sum() + x[:, rank].mean() + x.narrow(1, rank, 2).sum()
        wide = torch.cat([x] * world, 1)
        mine = wide.chunk(world, 1)[rank] + wide.split(4, 1)[rank - 1]
        positions = torch.arange(4 * rank, 4 * rank + 4) + torch.full((4,), 0.5 * rank) + torch.tensor(float(rank))
        return (1 - rank - x).abs() + part * mine + positions * x.clamp(min=0)


# ---------------------------------------------------------------- meshes


class MeshFacts(Base):
    def use(self, x: Tensor) -> Tensor:
        x = x * self.mesh.size() + self.mesh.ndim + self.plane.size(1) + len(self.plane.shape)
        names = self.plane.mesh_dim_names
        return x * 2 if names is not None and names[1] == "inner" and self.mesh.device_type == "cpu" else x


class SubMesh(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * self.plane["inner"].size() + self.plane["outer"].ndim


class MeshGroup(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * self.mesh.get_group().size() + self.plane.get_group("inner").size()


class MeshComparison(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 3 if self.mesh == self.mesh and self.mesh != self.plane else x


class ChangedMesh(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * self.mesh.ndim

    def change(self) -> None:
        self.mesh = self.plane


class ReadsLocalRank(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + self.mesh.get_local_rank() * self.plane.get_local_rank("inner")


class ReadsCoordinate(Base):
    def use(self, x: Tensor) -> Tensor:
        coordinate = self.plane.get_coordinate()
        assert coordinate is not None
        return x + coordinate[1] - 2.5 * self.mesh.get_rank()


# ---------------------------------------------------------------- placements


class Placements(Base):
    def __init__(self) -> None:
        super().__init__()
        self.placement: Any = Shard(0)

    def use(self, x: Tensor) -> Tensor:
        kinds = (Shard(0), Replicate(), Partial())
        same = self.placement == kinds[0] and Replicate() == kinds[1] and Shard(0) != Shard(1)
        kind = isinstance(self.placement, Shard) and kinds[1].is_replicate() and kinds[2].is_partial()
        return x * (kinds[0].dim + 2) if same and kind else x

    def change(self) -> None:
        self.placement = Shard(1)


# ---------------------------------------------------------------- DTensors


class FromLocal(Base):
    def use(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return (whole * 2).to_local(grad_placements=[Replicate()])


class Redistribute(Base):
    """A sum over ranks with a gradient, and the way back."""

    def use(self, x: Tensor) -> Tensor:
        summed = DTensor.from_local(x, self.mesh, [Partial()], run_check=False).redistribute(self.mesh, [Replicate()])
        return x * summed.to_local(grad_placements=[Replicate()])


class GathersShards(Base):
    def use(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False).full_tensor()
        return x + whole.sum(0)


class DTensorInput(Base):
    def forward(self, x: Any, *rest: Any) -> Tensor:
        return self.use(torch.tanh(self.linear(x.to_local() * 2)))

    def inputs(self, x: Tensor) -> tuple[Any, ...]:
        return (DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False),)


class DTensorOutput(Base):
    def use(self, x: Tensor) -> Any:
        return DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False) * 3


class DTensorBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = distribute_tensor(torch.arange(1.0, 5.0), self.mesh, [Replicate()])

    def use(self, x: Tensor) -> Tensor:
        return x * self.scale.to_local()


class DTensorParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(distribute_tensor(torch.arange(1.0, 5.0), self.mesh, [Replicate()]))

    def use(self, x: Tensor) -> Tensor:
        return x * self.scale.to_local(grad_placements=[Replicate()])


# ---------------------------------------------------------------- collectives


class FunctionalSums(Base):
    """With the group given in each way."""

    def use(self, x: Tensor) -> Tensor:
        still, found = x.detach(), x
        for group in (self.group, dist.group.WORLD, self.mesh, (self.plane, 1), self.group.group_name):
            found = found + functional.wait_tensor(functional.all_reduce(still, "sum", group))
        return found


class FunctionalOthers(Base):
    def use(self, x: Tensor) -> Tensor:
        still = x.detach()
        gathered = functional.all_gather_tensor(still, 0, self.group)
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, self.mesh)
        return x + gathered.sum(0) + scattered


class DifferentiableGather(Base):
    def use(self, x: Tensor) -> Tensor:
        return x + functional.all_gather_tensor_autograd(x, 0, self.group).sum(0)


class LaterWait(Base):
    def use(self, x: Tensor) -> Tensor:
        pending = functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return torch.sin(x) + pending


class InPlace(Base):
    def use(self, x: Tensor) -> Tensor:
        total, other = x.detach().clone(), x.detach() * 2
        dist.all_reduce(total)
        dist.all_reduce(other, group=self.new)
        return x + total + other


class InPlaceAsync(Base):
    breaks = True

    def use(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        work = dist.all_reduce(total, group=self.group, async_op=True)
        y = torch.sin(x)
        work.wait()
        return y + total


# ---------------------------------------------------------------- hooks


class ForwardHooks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, given, output: output * 2)
        self.linear.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        self.register_forward_hook(lambda module, given, output: output - 1)


class BackwardHooks(Base):
    """On an inner module; they replace gradients."""

    needs_compiled_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
        self.linear.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 3,))
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return torch.tanh(self.linear(self.first(x)))


class ModelBackwardHooks(Base):
    """On the model itself."""

    needs_compiled_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 3,))


class TensorHook(Base):
    needs_compiled_autograd = True

    def use(self, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 5)
        return y.sin()


# ---------------------------------------------------------------- surroundings


class Available(Base):
    def use(self, x: Tensor) -> Tensor:
        return x * 3 if dist.is_available() and dist.is_initialized() and torch.distributed.is_gloo_available() else x


class Environment(Base):
    """Read when the graph is made: torch guards on no variable of the environment."""

    def use(self, x: Tensor) -> Tensor:
        return x * 5 if os.environ.get(VARIABLE) is None else x
