"""What a captured program knows of ranks: distributed values inside compiled models, each on two and three ranks.

Values and gradients are those of the uncompiled module on every rank, there is one graph, and it is the same on all
ranks: a number that differs by rank is an input of it.  Where a rank shapes the graph, ``lockstep.explain`` names the
line that read it.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from multirank import rank_cases as cases
from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.tensor")

SAME = (
    *("GroupSizes", "GroupAsArgument", "GroupFacts", "GroupName"),
    *("MeshFacts", "SubMesh", "MeshGroup", "MeshComparison", "ChangedMesh", "Placements"),
    *(
        "FromLocal",
        "Redistribute",
        "GathersShards",
        "DTensorInput",
        "DTensorOutput",
        "DTensorBuffer",
        "DTensorParameter",
    ),
    *("FunctionalSums", "FunctionalOthers", "DifferentiableGather", "LaterWait", "InPlace", "InPlaceAsync"),
    *("ForwardHooks", "Available", "Environment"),
)
LIFTED = (
    *("ReadsRank", "ReadsGroupRank", "ReadsNonMember", "ReadsLocalRank", "ReadsCoordinate"),
    *("ReadsRankAsTensor", "IndexesByRank", "IndexesByRankInParts", "KeepsRank"),
)
NAMED = ("BranchesOnRank", "BranchesOnMembership")
HOOKS = ("BackwardHooks", "ModelBackwardHooks", "TensorHook")


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def steps(
    name: str, model: Any, module: Any, plain_model: Any, plain: Any, *, num: int, compiled_backward: bool
) -> None:
    """Train both for some batches, and compare outputs and gradients."""
    for index in range(num):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
        ends = []
        for called, inner in ((model, module), (plain_model, plain)):
            inner.zero_grad()
            around: Any = nullcontext()
            if compiled_backward and called is model:
                around = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True))
            with around:
                output = called(*inner.inputs(x))
                local(output).square().mean().backward()
            ends.append((local(output).detach(), [local(p.grad).clone() for p in inner.parameters()]))
        torch.testing.assert_close(ends[0][0], ends[1][0], msg=lambda text: f"{name}: {text}")
        for mine, right in zip(ends[0][1], ends[1][1], strict=True):
            torch.testing.assert_close(mine, right, msg=lambda text: f"{name}: {text}")


def run_case(names: tuple[str, ...], compiled_backward: bool = False, fullgraph: bool = True) -> dict[str, Any]:
    import lockstep

    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        kind = getattr(cases, name)
        module, plain = kind(), kind()
        plain.load_state_dict(copy.deepcopy(module.state_dict()))
        ddp, plain_ddp = lockstep.DDP(module), lockstep.DDP(plain)
        model = torch.compile(ddp, backend="aot_eager", fullgraph=fullgraph and not kind.breaks)
        everything = (name, model, module, plain_ddp, plain)
        steps(*everything, num=2, compiled_backward=compiled_backward)
        module.touch()
        plain.touch()
        steps(*everything, num=1, compiled_backward=compiled_backward)
        dist.barrier()
        explanation = lockstep.explain(ddp)
        num_after_change = 0
        if kind.change is not None:
            module.change()
            plain.change()
            steps(*everything, num=2, compiled_backward=compiled_backward)
            num_after_change = len(lockstep.explain(ddp).graphs)
        digests = tuple(graph.digest for graph in explanation.graphs)
        found[name] = (digests, explanation.rank_is_baked_in_at, num_after_change, str(explanation))
    return found


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("names", [SAME[:12], SAME[12:], LIFTED], ids=["groups", "tensors", "ranks"])
def test_all_ranks_have_the_same_graph(world: int, names: tuple[str, ...]) -> None:
    everyones = run_ranks(world, run_case, names, preload=PRELOAD)
    for found in everyones:
        for name, (digests, places, num_after_change, _) in found.items():
            assert (name, places) == (name, ())
            assert len(digests) == 1 or getattr(cases, name).breaks, name
            assert digests == everyones[0][name][0], name
            assert num_after_change == (2 if getattr(cases, name).change is not None else 0), name


def line_of(name: str) -> str:
    import inspect

    lines, first = inspect.getsourcelines(getattr(cases, name))
    offset = next(index for index, line in enumerate(lines) if "# named" in line)
    return f"rank_cases.py:{first + offset}"


@pytest.mark.parametrize("world", [3])
def test_a_rank_that_shapes_the_graph_is_named_with_its_line(world: int) -> None:
    for found in run_ranks(world, run_case, NAMED, preload=PRELOAD):
        for name in NAMED:
            digests, places, _, text = found[name]
            assert len(digests) == 1
            assert places == (line_of(name),)
            assert f"rank is baked in at {line_of(name)}" in text


@pytest.mark.parametrize("world", [3])
def test_hooks_of_modules_and_tensors_with_compiled_autograd(world: int) -> None:
    for found in run_ranks(world, run_case, HOOKS, True, preload=PRELOAD):
        assert all(places == () for _, places, *_ in found.values())


def test_hooks_of_modules_and_tensors_without_compiled_autograd() -> None:
    run_ranks(2, run_case, HOOKS, False, False, preload=PRELOAD)


# ---------------------------------------------------------------- in a whole step, and in a sharded model

IN_STEPS = (
    *("GroupSizes", "GroupFacts", "MeshFacts", "MeshGroup", "Placements", "FromLocal", "Redistribute"),
    *("FunctionalSums", "LaterWait", "InPlace", "ForwardHooks", "Available", "Environment", "ReadsRank"),
    *("GathersShards", "DTensorParameter", "DTensorBuffer", "DifferentiableGather", "ReadsRankAsTensor"),
    *("ReadsGroupRank", "ReadsNonMember", "ReadsLocalRank", "ReadsCoordinate", "KeepsRank", "SlicesByRank"),
    *("IndexesByRank", "BranchesOnRank"),
)
IN_SHARDS = ("GroupFacts", "MeshGroup", "Placements", "FromLocal", "FunctionalSums", "ForwardHooks", "ReadsRank")


def run_in_step(names: tuple[str, ...]) -> dict[str, Any]:
    import lockstep
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph  # what is tested is the program, not the compiler
    torch.set_default_dtype(torch.float64)  # a program adds up in another order, and these models enlarge rounding
    found: dict[str, Any] = {}
    for name in names:
        ends = []
        for mode in ("loop", "graph"):
            torch.manual_seed(0)
            module = getattr(cases, name)()
            model = lockstep.DDP(module)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = lockstep.TrainStep(model, optimizer, lambda m, batch: local(m(*batch)).square().mean(), mode=mode)
            losses = []
            for index in range(5):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
                losses.append(step(module.inputs(x)))
            ends.append([*losses, *(local(p.detach()) for p in module.parameters())])
        dist.barrier()
        for mine, right in zip(*ends, strict=True):
            torch.testing.assert_close(mine, right, msg=lambda text, n=name: f"{n}: {text}")
        explained = step.explain()
        digests = [program.digest for program in getattr(step._runner, "programs", [])]
        found[name] = (explained.num_program_calls, digests, str(explained))
    return found


@pytest.mark.parametrize("world", [3])
def test_in_a_program_of_the_whole_step(world: int) -> None:
    everyones = run_ranks(world, run_in_step, IN_STEPS, preload=PRELOAD)
    for found in everyones:
        for name, (num_calls, digests, text) in found.items():
            # A collective in place is of C++, and no trace sees it: the loop runs.
            assert num_calls == (0 if name in ("InPlace", "DTensorParameter") else 4), f"{name}: {text}"
            if name == "InPlace":
                assert "a collective of torch.distributed (allreduce) runs in place at rank_cases.py:" in text
            if name == "DTensorParameter":
                assert "scale is a DTensor" in text
            if name.startswith("Branches"):
                assert f"rank is baked in at {line_in_use(name)}" in text
            else:
                assert "baked in" not in text
                assert digests == everyones[0][name][1], name


def line_in_use(name: str) -> str:
    import inspect

    _, first = inspect.getsourcelines(getattr(cases, name).use)
    return f"rank_cases.py:{first + 1}"


def run_sharded(names: tuple[str, ...]) -> None:
    import lockstep

    for name in names:
        torch._dynamo.reset()
        pair = []
        for _ in range(2):
            torch.manual_seed(0)
            pair.append(lockstep.fully_shard(getattr(cases, name)()))
        module, plain = pair
        model = torch.compile(module, backend="aot_eager")
        steps(name, model, module, plain, plain, num=3, compiled_backward=False)


@pytest.mark.parametrize("world", [3])
def test_in_a_sharded_model(world: int) -> None:
    run_ranks(world, run_sharded, IN_SHARDS, preload=PRELOAD)


def fail_in_a_program() -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    import lockstep
    from lockstep import errors, torch_private
    from lockstep.observe.moments import StepMoment
    from lockstep.testing import inject

    torch_private.compile_program = lambda graph, *_: graph
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = lockstep.DDP(torch.nn.Linear(4, 4))
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(), mode="graph"
    )
    for _ in range(3):
        step(torch.ones(2, 4))
    assert step.explain().num_program_calls == 2
    with (
        inject.fault(StepMoment.LAUNCH, inject.raises, rank=1, step=3),
        pytest.raises(inject.Fault if rank else errors.PeerFailed, match="injected at launch of step 3"),
    ):
        step(torch.ones(2, 4))
    if rank == 0:
        _get_default_store().set("heard of it", "")
    _get_default_store().wait(["heard of it"])  # the one that failed is alive all the time


def test_an_error_in_a_program_is_told_to_the_others() -> None:
    run_ranks(2, fail_in_a_program, env={"LOCKSTEP_LATE_TIMEOUT": "200"})
