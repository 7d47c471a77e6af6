"""Parts of the surface that are about how gradients travel: delays, precision, order, groups, meshes.

Each compares gradients with a single process on the whole batch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

ROWS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def seeded(build: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(7)
    return build()


def batch(step: int, world: int) -> Tensor:
    return torch.randn(ROWS * world, 6, generator=torch.Generator().manual_seed(step))


def my_rows(x: Tensor) -> Tensor:
    return x[dist.get_rank() * ROWS : (dist.get_rank() + 1) * ROWS]


def loss_of(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def reference_gradients(build: type[nn.Module] = Net, step: int = 0) -> dict[str, Tensor]:
    module = seeded(build)
    loss_of(module(batch(step, dist.get_world_size()))).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_gradients(module: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
    got = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


# ---------------------------------------------------------------- delayed


def delayed(all_parameters: bool) -> None:
    import lockstep

    module = seeded()
    module.unused = nn.Linear(2, 2)
    some = ["second.weight", "second.bias", "unused.weight"]
    names = [n for n, _ in module.named_parameters()] if all_parameters else some
    trigger = module.first.weight
    ddp = lockstep.DDP(
        module,
        delay_all_reduce_named_params=[(n, p) for n, p in module.named_parameters() if n in names and p is not trigger],
        param_to_hook_all_reduce=trigger,
        find_unused_parameters=True,
    )
    for step in range(3):
        ddp.zero_grad()
        expected = reference_gradients(step=step)
        loss_of(ddp(my_rows(batch(step, dist.get_world_size())))).backward()
        assert_gradients(module, expected)
    trigger.requires_grad_(False)  # it never comes, as where ranks take different branches
    ddp.zero_grad()
    loss_of(ddp(my_rows(batch(3, dist.get_world_size())))).backward()
    assert_gradients(module, {n: g for n, g in reference_gradients(step=3).items() if n != "first.weight"})


@pytest.mark.parametrize("all_parameters", [False, True], ids=["some", "all but the trigger"])
def test_delayed_parameters_are_reduced_whether_or_not_the_trigger_fires(all_parameters: bool) -> None:
    run_ranks(2, delayed, all_parameters)


# ---------------------------------------------------------------- native mixed precision


def mixed_precision(reduce_dtype: torch.dtype | None) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    import lockstep

    module = seeded()
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    ddp = lockstep.DDP(module, mixed_precision=config, bucket_cap_mb=0.0002)
    seen: list[torch.dtype] = []
    module.first.register_forward_hook(lambda m, args, out: seen.append(m.weight.dtype))
    world = dist.get_world_size()
    for accumulate in (False, True):
        ddp.zero_grad()
        reference = seeded().bfloat16()
        if accumulate:
            with ddp.no_sync():
                loss_of(ddp(my_rows(batch(1, world)))).backward()
            assert all(p.grad.dtype == torch.float32 for p in ddp.parameters())
            loss_of(reference(batch(1, world).bfloat16())).backward()
        loss_of(ddp(my_rows(batch(0, world)))).backward()
        loss_of(reference(batch(0, world).bfloat16())).backward()
        expected = {n: p.grad.float() for n, p in reference.named_parameters()}
        assert_gradients(module, expected, rtol=0.1, atol=0.02)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in ddp.parameters())
    with torch.no_grad():
        assert ddp(my_rows(batch(0, world))).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in ddp.parameters()), "evaluation left the low copies in place"
    with pytest.raises(RuntimeError, match="shapes"):
        ddp(torch.ones(2, 5))
    assert all(p.dtype == torch.float32 for p in ddp.parameters()), "a failed forward left the low copies in place"


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["bf16 reduce", "fp32 reduce"])
def test_native_mixed_precision(reduce_dtype: torch.dtype | None) -> None:
    run_ranks(2, mixed_precision, reduce_dtype)


# ---------------------------------------------------------------- the plan in use


class Backwards(nn.Module):
    """Runs its layers in the opposite of declaration order, so that the default plan expects the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8)
        self.first = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def observed_order() -> tuple[str, list[str], str]:
    import lockstep

    module = seeded(Backwards)
    ddp = lockstep.DDP(module, bucket_order="observed", bucket_cap_mb=0.0001)
    declared = ddp.plan.digest
    for step in range(3):
        ddp.zero_grad()
        expected = reference_gradients(Backwards, step)
        loss_of(ddp(my_rows(batch(step, dist.get_world_size())))).backward()
        assert_gradients(module, expected)
    assert ddp.plan.order == "observed"
    assert ddp.plan.digest != declared
    return ddp.plan.digest, [p.name for p in ddp.plan.parameters], ddp.plan.to_json()


def with_plan(saved: str) -> str:
    import lockstep

    module = seeded(Backwards)
    ddp = lockstep.DDP(module, plan=saved)
    loss_of(ddp(my_rows(batch(0, dist.get_world_size())))).backward()
    assert_gradients(module, reference_gradients(Backwards))
    return ddp.plan.digest


def test_an_observed_order_is_agreed_recorded_and_can_be_reused() -> None:
    first, second, third = run_ranks(3, observed_order)
    assert first == second == third
    digest, names, saved = first
    assert names[0].startswith("last")  # its gradient is ready first, although it is declared first
    assert set(run_ranks(3, with_plan, saved)) == {digest}


def default_order_does_not_move() -> list[str]:
    import lockstep

    ddp = lockstep.DDP(seeded(Backwards), bucket_cap_mb=0.0001)
    digests = [ddp.plan.digest]
    for step in range(3):
        loss_of(ddp(my_rows(batch(step, dist.get_world_size())))).backward()
        digests.append(ddp.plan.digest)
    return digests


def test_the_layout_does_not_change_behind_the_users_back() -> None:
    for digests in run_ranks(2, default_order_does_not_move):
        assert len(set(digests)) == 1


# ---------------------------------------------------------------- frozen and unfrozen


def unfreeze_between_steps() -> None:
    import lockstep

    module = seeded()
    module.second.requires_grad_(False)
    ddp = lockstep.DDP(module)
    world = dist.get_world_size()
    for step, trainable in enumerate([False, True, True, False, True]):
        module.second.requires_grad_(trainable)
        ddp.zero_grad()
        reference = seeded()
        reference.second.requires_grad_(trainable)
        loss_of(reference(batch(step, world))).backward()
        loss_of(ddp(my_rows(batch(step, world)))).backward()
        assert_gradients(module, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None})


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    run_ranks(2, unfreeze_between_steps)


# ---------------------------------------------------------------- groups and meshes


def subgroup() -> None:
    import lockstep

    evens = dist.new_group([0, 2])
    odds = dist.new_group([1, 3])
    group = evens if dist.get_rank() % 2 == 0 else odds
    module = seeded()
    ddp = lockstep.DDP(module, process_group=group)
    x = torch.full((2, 6), float(dist.get_rank()))
    loss_of(ddp(x)).backward()
    reference = seeded()
    members = (0, 2) if dist.get_rank() % 2 == 0 else (1, 3)
    loss_of(reference(torch.cat([torch.full((2, 6), float(r)) for r in members]))).backward()
    assert_gradients(module, {n: p.grad for n, p in reference.named_parameters()})


def test_a_subgroup_reduces_among_its_members_only() -> None:
    run_ranks(4, subgroup)


def change_group() -> None:
    import lockstep

    module = seeded()
    ddp = lockstep.DDP(module)
    pair = dist.new_group([0, 1])
    ddp._update_process_group(pair)
    if dist.get_rank() in (0, 1):
        x = torch.full((2, 6), float(dist.get_rank()))
        loss_of(ddp(x)).backward()
        reference = seeded()
        loss_of(reference(torch.cat([torch.full((2, 6), float(r)) for r in (0, 1)]))).backward()
        assert_gradients(module, {n: p.grad for n, p in reference.named_parameters()})
    dist.barrier()
    ddp._update_process_group(dist.group.WORLD)
    ddp.zero_grad()
    loss_of(ddp(my_rows(batch(0, 3)))).backward()
    assert_gradients(module, reference_gradients())


def test_the_process_group_can_be_changed() -> None:
    run_ranks(3, change_group)


def on_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import lockstep

    module = seeded()
    ddp = lockstep.DDP(module, device_mesh=init_device_mesh("cpu", (2,)))
    loss_of(ddp(my_rows(batch(0, 2)))).backward()
    assert_gradients(module, reference_gradients())
    with pytest.raises(RuntimeError, match="1D device mesh"):
        lockstep.DDP(seeded(), device_mesh=init_device_mesh("cpu", (1, 2)))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        lockstep.DDP(seeded(), device_mesh=init_device_mesh("cpu", (2,)), process_group=dist.group.WORLD)


def test_a_device_mesh_of_one_axis() -> None:
    run_ranks(2, on_a_mesh)


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import lockstep

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    torch.manual_seed(7)
    for p in module.parameters():
        nn.init.normal_(p)
    reference = copy.deepcopy(module)
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = lockstep.DDP(module, device_mesh=mesh["dp"])
    dp_rank = mesh["dp"].get_local_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, reference)]
    for step in range(3):  # torch's class loses the synchronisation after the first step
        x = batch(step, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(ddp(x[dp_rank * ROWS : (dp_rank + 1) * ROWS])).backward()
        loss_of(reference(x)).backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()


def test_tensor_parallel_parameters_on_the_data_axis_of_a_mesh() -> None:
    run_ranks(4, tensor_parallel)


def dtensors_pass_through() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    import lockstep

    mesh = init_device_mesh("cpu", (1,) if dist.get_world_size() == 1 else (2,))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            weight = torch.randn(3, 6)
            self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.to_local().t() + self.bias

    module = Mixed()
    ddp = lockstep.DDP(module)
    x = batch(0, 2)
    loss_of(ddp(my_rows(x))).backward()
    weight = module.weight.detach().to_local().clone().requires_grad_()
    loss_of(x @ weight.t() + module.bias.detach()).backward()
    torch.testing.assert_close(module.weight.grad.to_local(), weight.grad)


def test_dtensor_parameters_pass_through() -> None:
    run_ranks(2, dtensors_pass_through)


# ---------------------------------------------------------------- sparse


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def sparse_rows(announce: bool) -> None:
    import lockstep

    module = seeded(Bag)
    ddp = lockstep.DDP(module)
    ids = torch.tensor([[0, 1], [2, 1]]) if dist.get_rank() == 0 else torch.tensor([[5, 5], [9, 0]])
    if announce:
        ddp._set_sparse_metadata({"embed.weight": torch.tensor([0, 1, 2, 5, 9])})
    loss_of(ddp(ids)).backward()
    reference = seeded(Bag)
    loss_of(reference(torch.tensor([[0, 1], [2, 1], [5, 5], [9, 0]]))).backward()
    assert module.embed.weight.grad.is_sparse
    torch.testing.assert_close(module.embed.weight.grad.to_dense(), reference.embed.weight.grad.to_dense())
    torch.testing.assert_close(module.head.weight.grad, reference.head.weight.grad)
    with pytest.raises(ValueError, match=r"head\.weight"):
        ddp._set_sparse_metadata({"head.weight": torch.tensor([0])})


@pytest.mark.parametrize("announce", [False, True], ids=["gathered", "rows announced"])
def test_sparse_gradients(announce: bool) -> None:
    run_ranks(2, sparse_rows, announce)


def gather_sparse() -> None:
    """The way for backends without sparse collectives, against the dense sum."""
    from lockstep.agree.watch import Watch
    from lockstep.engine.sparse import gather_sparse_sum
    from lockstep.engine.transport import Transport

    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(rank, rank + rank + 1) % 6
    mine = torch.sparse_coo_tensor(rows.unsqueeze(0), torch.full((len(rows), 2), float(rank + 1)), (6, 2))
    dense = mine.to_dense()
    dist.all_reduce(dense)
    total = gather_sparse_sum(mine, Transport(dist.group.WORLD, Watch(None, rank)), 1 / world)
    torch.testing.assert_close(total.to_dense(), dense / world)


def test_sparse_gradients_without_sparse_collectives() -> None:
    run_ranks(3, gather_sparse)


# ---------------------------------------------------------------- unused parameters that stay unused


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 600)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def skip_unused() -> int:
    import lockstep

    module = seeded(Skips)
    ddp = lockstep.DDP(module, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.0002)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(my_rows(batch(step, dist.get_world_size())))).backward()
        assert_gradients(module, reference_gradients(Skips, step))
    return ddp.reducer.num_buckets_reduced


def test_buckets_that_no_rank_uses_are_not_sent() -> None:
    assert run_ranks(2, skip_unused) == [1, 1]


# ---------------------------------------------------------------- what logging and timeline say


def observe() -> tuple[dict[str, Any], float]:
    import lockstep

    ddp = lockstep.DDP(seeded(), bucket_cap_mb=0.0002)
    for step in range(4):
        loss_of(ddp(my_rows(batch(step, dist.get_world_size())))).backward()
    names = {i.name for i in ddp.timeline.steps[-1].intervals}
    assert names == {"forward", "backward", "launch", "travel", "collect", "compare"}
    assert {i.bucket for i in ddp.timeline.steps[-1].intervals if i.name == "travel"} == set(range(len(ddp.plan)))
    return ddp._get_ddp_logging_data(), ddp.timeline.steps[-1].exposed_seconds


def test_logging_data_and_timeline_agree_on_the_buckets() -> None:
    for data, exposed in run_ranks(2, observe):
        assert exposed >= 0
        assert data["num_buckets_reduced"] == len(data["bucket_sizes"].split(", "))
        assert data["can_set_static_graph"] == 1
        assert data["backward_comm_time"] > 0
