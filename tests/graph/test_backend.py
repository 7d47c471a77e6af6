"""Which backends take part, by which strategy, and what lockstep.compile and lockstep.explain say (a world of one)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lockstep
from lockstep.graph import ops
from lockstep.graph.backend import graph_compiler, lockstep_backend

pytestmark = pytest.mark.usefixtures("world_of_one")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(ddp: lockstep.DDP, run: Callable[[Tensor], Tensor], num: int = 4) -> None:
    for _ in range(num):
        ddp.zero_grad()
        run(torch.ones(3, 4)).square().sum().backward()


def own_backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return gm


@pytest.mark.parametrize("name", ["inductor", "aot_eager", "aot_eager_default_partitioner", "lockstep"])
def test_backends_that_trace_a_backward(name: str) -> None:
    assert graph_compiler(torch._dynamo.lookup_backend(name)) is not None


@pytest.mark.parametrize("backend", ["eager", own_backend])
def test_backends_that_do_not(backend: Any) -> None:
    assert graph_compiler(torch._dynamo.lookup_backend(backend)) is None


def test_the_backend_is_known_by_name_with_mode_and_options() -> None:
    assert torch._dynamo.lookup_backend("lockstep") is lockstep_backend
    wrapper = torch._TorchCompileWrapper("lockstep", None, {"max_fusion_size": 3}, None)
    assert graph_compiler(wrapper) is not None


@pytest.mark.parametrize(
    ("backend", "overlap", "expected"),
    [
        ("aot_eager", None, "graph"),
        ("aot_eager", "split", "split"),
        ("aot_eager", "none", "none"),
        ("eager", None, "split"),
        (own_backend, None, "split"),
        (own_backend, "none", "none"),
    ],
)
def test_strategy(backend: Any, overlap: str | None, expected: str) -> None:
    ddp = lockstep.DDP(model(), bucket_cap_mb=1e-5, overlap=overlap)
    train(ddp, torch.compile(ddp, backend=backend))
    assert {record.strategy for record in ddp._graphs} == {expected}
    assert all(bucket.left_in_graph == (expected == "graph") for bucket in ddp.reducer.buckets)


def test_a_backend_without_a_backward_cannot_do_graph() -> None:
    ddp = lockstep.DDP(model(), overlap="graph")
    with pytest.raises(Exception, match="overlap='graph' needs a backend that traces the backward"):
        torch.compile(ddp, backend=own_backend)(torch.ones(3, 4))


def test_dynamo_config_turns_overlap_off() -> None:
    ddp = lockstep.DDP(model())
    with torch._dynamo.config.patch(optimize_ddp=False):
        train(ddp, torch.compile(ddp, backend="aot_eager"))
    assert not ddp._graphs


def test_a_pass_of_the_user_runs_before_ours_and_sees_no_launch() -> None:
    seen: list[int] = []

    def look(graph: fx.Graph) -> None:
        seen.append(sum(node.target is ops.launch for node in graph.nodes))

    ddp = lockstep.DDP(model(), bucket_cap_mb=1e-5)
    train(ddp, torch.compile(ddp, options={"joint_custom_post_pass": look}), num=2)
    assert seen == [0]
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


def test_autocast_gradients_are_packed_before_they_are_cast() -> None:
    dtypes: list[torch.dtype] = []
    from lockstep.engine.feeders import graph as feeder

    before = feeder.deliver

    def look(grads: list[Tensor], parameters: list[Tensor], group: int) -> Tensor:
        dtypes.extend(g.dtype for g in grads)
        return before(grads, parameters, group)

    ddp = lockstep.DDP(model(), bucket_cap_mb=1e-5)
    compiled = torch.compile(ddp, backend="aot_eager")
    feeder.deliver = look  # type: ignore[assignment]
    try:
        with torch.autocast("cpu", torch.bfloat16):
            out = compiled(torch.ones(3, 4))
        out.float().square().sum().backward()
    finally:
        feeder.deliver = before
    assert torch.bfloat16 in dtypes
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ddp.parameters())


def test_explain_names_launches_and_what_is_left() -> None:
    ddp = lockstep.DDP(model(), bucket_cap_mb=1e-5)
    train(ddp, torch.compile(ddp, backend="aot_eager", fullgraph=True))
    explanation = lockstep.explain(ddp)
    (graph,) = explanation.graphs
    assert [launch.names for launch in graph.launches] == [bucket.names for bucket in ddp.plan]
    fractions = [launch.fraction for launch in graph.launches]
    assert all(f is not None and 0 <= f <= 1 for f in fractions)
    assert fractions == sorted(fractions, key=lambda f: f or 0.0)
    assert not explanation.left_to_hooks
    assert "2.weight" in str(explanation)
    assert "% of the backward" in str(explanation)

    eager = lockstep.DDP(model())
    assert set(lockstep.explain(eager).left_to_hooks.values()) == {"nothing was compiled"}


def test_a_bucket_of_which_a_graph_has_only_a_part() -> None:
    """Blocks are compiled, what is around them is not: buckets at the edges leave with the rest of them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.compile(backend="aot_eager")
    module = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 4))
    ddp = lockstep.DDP(module, bucket_cap_mb=1e-4)  # more than one parameter, less than a block with its neighbour
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, ddp, num=6)
    assert not [text for warning in caught if "compiled" in (text := str(warning.message))]
    buckets = {name: bucket for bucket in ddp.plan for name in bucket.names}
    assert any({name[0] for name in bucket.names} > {"1"} for bucket in ddp.plan)
    launches = [launch for graph in lockstep.explain(ddp).graphs for launch in graph.launches]
    assert launches
    for launch in launches:
        rest = set(buckets[launch.names[0]].names) - set(launch.names)
        is_whole_in_graphs = not any(name[0] in "04" for name in rest)
        assert launch.delivers is is_whole_in_graphs
        assert is_whole_in_graphs or "the rest of its bucket came later" in launch.left_because


def test_a_backward_without_a_forward_says_nothing_of_the_graphs() -> None:
    ddp = lockstep.DDP(model(), bucket_cap_mb=1e-5)
    compiled = torch.compile(ddp, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            train(ddp, compiled, num=1)
            next(ddp.parameters()).square().sum().backward()
    assert not [text for warning in caught if "compiled" in (text := str(warning.message))]
    (graph,) = lockstep.explain(ddp).graphs
    assert all(launch.delivers for launch in graph.launches)
    assert ddp.metrics()["lockstep/launched_in_graph"] == 0  # in the window of the second backward


def test_a_region_that_never_ran_and_a_bucket_that_did_not_come_are_warnings() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Bilinear(4, 4, 2)
            self.unused.compile(backend="aot_eager")
            self.unused.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    module = Half()
    ddp = lockstep.DDP(module, bucket_cap_mb=1e-5)
    module.used.weight.register_hook(lambda g: g)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, torch.compile(ddp, backend="aot_eager"), num=5)
    texts = [str(w.message) for w in caught]
    assert any("unused was compiled, but no graph of it has run" in text for text in texts)
    assert any("used.weight" in text and "hooks of your own" in text for text in texts)


def test_lockstep_compile(capsys: pytest.CaptureFixture[str]) -> None:
    ddp = lockstep.DDP(model())
    run = lockstep.compile(ddp, overlap="split", verbose=True, backend="aot_eager")
    assert ddp.overlap == "split"
    train(ddp, run, num=5)
    assert "overlap=split" in capsys.readouterr().err
    with pytest.raises(ValueError, match="overlap must be one of"):
        lockstep.compile(ddp, overlap="sometimes")
    with pytest.raises(ValueError, match=r"no lockstep\.DDP"):
        lockstep.compile(nn.Linear(2, 2), overlap="none")
    with pytest.raises(ValueError, match="found 0"):
        lockstep.explain(nn.Linear(2, 2))


def test_a_changed_plan_compiles_anew() -> None:
    module = model()
    module[2].requires_grad_(False)
    ddp = lockstep.DDP(module, bucket_cap_mb=1e-5)
    run = torch.compile(ddp, backend="aot_eager")
    train(ddp, run, num=3)
    module[2].requires_grad_(True)
    train(ddp, run, num=3)
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)
    assert "2.weight" in {name for bucket in ddp.plan for name in bucket.names}


def test_the_operators_keep_the_contract_of_operators() -> None:
    gradients, parameters = [torch.ones(3), torch.ones(2, 2)], [torch.ones(3), torch.ones(2, 2)]
    with torch.no_grad():
        told = torch.library.opcheck(ops.launch, (gradients, parameters, 0))
    assert set(told.values()) == {"SUCCESS"}


def test_sizes_at_which_gradients_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the compiler relies on memory that is aligned; asked here as it is there."""
    from torch._inductor import graph, utils

    monkeypatch.setattr(graph, "should_assume_input_aligned", utils.tensor_is_aligned)
    ddp = lockstep.DDP(nn.Sequential(nn.Linear(4, 15), nn.LayerNorm(15), nn.Linear(15, 10)))
    train(ddp, torch.compile(ddp))
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)
