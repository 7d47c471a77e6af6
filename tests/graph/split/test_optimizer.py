"""The split strategy: where a graph is cut, and that the parts compute what the whole does, parameter by parameter."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.graph.split import SplitOptimizer
from lockstep.plan.caps import BucketCaps

BACKENDS = ["eager", "aot_eager", "inductor"]
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Split:
    """A module compiled in parts; remembers the parts."""

    def __init__(
        self,
        module: nn.Module,
        backend: str = "eager",
        cap: int = 1,
        first: int | None = None,
        each: tuple[int, ...] = (),
        dynamic: bool | None = None,
        **options: Any,
    ):
        self.module, self.parts = module, []
        self._compile = torch._dynamo.lookup_backend(backend)
        self.optimizer = SplitOptimizer(BucketCaps(cap, first or cap, each), self._record, **options)
        self.compiled = torch.compile(module, backend=self.optimizer.compile_fn, dynamic=dynamic)

    def _record(self, gm: torch.fx.GraphModule, inputs: Any, **configs: Any) -> Any:
        self.parts.append(gm)
        return self._compile(gm, inputs, **configs)

    def buckets(self) -> list[list[str]]:
        """The buckets of the last graph, in the order of launch: the parameters of the module, by name."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [[names[id(p)] for p in bucket.parameters] for bucket in reversed(self.optimizer.buckets)]


def tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor)]


def assert_same(module: nn.Module, *inputs: Any, backend: str, steps: int = 2, tolerance: float = 1e-4, **options: Any):
    """Outputs, gradients and buffers against the module itself, uncompiled."""
    plain = copy.deepcopy(module)
    split = Split(module, backend, **options)
    for _ in range(steps):
        outcomes = []
        for model, call in ((plain, plain), (module, split.compiled)):
            model.zero_grad()
            torch.manual_seed(1)
            outputs = call(*inputs)
            sum((t * t).sum() for t in tensors(outputs) if t.requires_grad).backward()
            outcomes.append(outputs)
        torch.testing.assert_close(outcomes[1], outcomes[0], atol=tolerance, rtol=tolerance)
        for (name, want), got in zip(plain.named_parameters(), module.parameters(), strict=True):
            assert (want.grad is None) == (got.grad is None), name
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad, atol=tolerance, rtol=tolerance, msg=f"{name}: {{}}")
        torch.testing.assert_close(list(module.buffers()), list(plain.buffers()), atol=tolerance, rtol=tolerance)
    return split


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------ where it is cut


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_part_per_bucket(backend: str) -> None:
    split = assert_same(mlp(4, 6, 5, 3), torch.rand(2, 4), backend=backend)
    assert len(split.parts) == 3
    assert split.buckets() == [["4.weight", "4.bias"], ["2.weight", "2.bias"], ["0.weight", "0.bias"]]
    assert [b.names for b in split.optimizer.buckets] == list(reversed(split.buckets()))


def test_counts_that_pytorch_tests_expect() -> None:
    inputs = torch.rand(2, 10)
    with torch.device("meta"):
        model = mlp(10, 5000, 5000, 5000, 5)
    graphs = []
    for cap, hidden in ((25 * MIB, model), (250 * MIB, mlp(10, 5, 5, 5, 5))):
        split = Split(hidden, cap=cap, first=MIB)
        split.compiled(inputs.to(next(hidden.parameters()).device))
        graphs.append(len(split.parts))
    assert graphs == [3, 1]


def test_the_first_bucket_has_a_cap_of_its_own() -> None:
    # 400 bytes each
    layers = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(6)))
    split = Split(layers, cap=1200, first=400)
    split.compiled(torch.rand(1, 10))
    assert [len(bucket) for bucket in split.buckets()] == [1, 3, 2]
    assert [bucket.num_bytes for bucket in split.optimizer.buckets] == [800, 1200, 400]


def test_a_list_of_caps_is_used_in_launch_order() -> None:
    layers = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(7)))
    split = Split(layers, each=(400, 1200, 800))  # the last one repeats
    split.compiled(torch.rand(1, 10))
    assert [len(bucket) for bucket in split.buckets()] == [1, 3, 2, 1]
    assert "caps of 400, 1,200, 800 bytes" in split.optimizer.table()


def test_nothing_to_split_is_compiled_once_as_it_came() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: Any, **configs: Any) -> Any:
        seen.append((gm, inputs, configs))
        return gm

    optimizer = SplitOptimizer(BucketCaps(MIB, MIB), backend)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    assert optimizer.compile_fn(graph, [torch.ones(1)], option=3) is graph
    assert seen == [(graph, [torch.ones(1)], {"option": 3})]
    assert optimizer.find_buckets(graph, [torch.ones(1)]) == []
    assert "nothing to split" in optimizer.table()
    empty = torch.fx.symbolic_trace(lambda x: x)
    assert optimizer.compile_fn(empty, [torch.ones(1)]) is empty
    assert optimizer.buckets == []
    torch.compile(mlp(2, 2), backend=optimizer.compile_fn)(torch.ones(1, 2))
    assert [len(bucket.parameters) for bucket in optimizer.buckets] == [2]


def test_ignored_parameters_do_not_count() -> None:
    model = mlp(4, 4, 4, 4)
    model[2].weight._ddp_ignored = True
    ignored = model[4].bias
    split = Split(model, ignores=lambda parameter: parameter is ignored)
    split.compiled(torch.rand(2, 4))
    assert split.buckets() == [["4.weight"], ["2.bias"], ["0.weight", "0.bias"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shared_parameter_counts_once_where_its_gradient_is_ready(backend: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.middle = nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.middle(self.embed(tokens)), self.embed.weight)

    split = assert_same(Tied(), torch.tensor([[1, 2, 3]]), backend=backend)
    assert split.buckets() == [["middle.weight", "middle.bias"], ["embed.weight"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_in_functions_methods_lists_and_keywords(backend: str) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v, self.u, self.t = (nn.Parameter(torch.rand(4, 4)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, weight=self.w)
            x = torch.cat([x, self.v])
            x = x @ self.u.t()
            best, where = torch.stack((x, torch.einsum("ab,bc->ac", x, self.t))).max(dim=0)
            return best + where

    split = assert_same(Functional(), torch.rand(2, 4), backend=backend)
    assert split.buckets() == [["t"], ["u"], ["v"], ["w"]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_that_call_modules_and_hold_attributes(backend: str) -> None:
    """As dynamo made them before it inlined modules, and as people make them: nothing is known of the values."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 4)})
            self.w = nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner["norm"](x * self.w)
            return (self.inner["last"](x) + self.inner["last"].bias,)

    model = Whole()
    graph = torch.fx.symbolic_trace(copy.deepcopy(model))
    optimizer = SplitOptimizer(BucketCaps(1, 1), torch._dynamo.lookup_backend(backend))
    x = torch.rand(3, 4)
    found = optimizer.find_buckets(graph, [x])
    compiled = optimizer.compile_fn(graph, [x])
    model(x)[0].square().sum().backward()
    compiled(x)[0].square().sum().backward()
    assert [b.names for b in reversed(optimizer.buckets)] == [
        ["inner.last.weight", "inner.last.bias"],
        ["inner.norm.weight", "inner.norm.bias"],
        ["w"],
    ]
    assert found[2][0] is graph.w
    assert [[id(p) for p in bucket] for bucket in found] == [
        [id(p) for p in bucket.parameters] for bucket in reversed(optimizer.buckets)
    ]
    for (name, want), got in zip(model.named_parameters(), graph.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=f"{name}: {{}}")
    torch.testing.assert_close(list(graph.buffers()), list(model.buffers()))


class Counting(nn.Module):
    """Writes to a buffer between its layers; those nodes give nothing to anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(self.scale.detach())
        x = self.a(x)
        self.seen.mul_(2)
        self.seen.add_(x.detach().sum(0))
        x = self.b(x)
        with torch.no_grad():
            self.seen.add_(self.scale)
        return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_to_buffers_stay_in_order(backend: str) -> None:
    split = assert_same(Counting(), torch.rand(2, 4), backend=backend)
    assert len(split.parts) == 2


def test_a_part_without_output_grows_until_it_has_one() -> None:
    class WritesLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.register_buffer("seen", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x))
            self.seen.copy_(self.c(torch.ones(2, 4)).detach())
            return y

    split = assert_same(WritesLast(), torch.rand(2, 4), backend="aot_eager")
    last = split.optimizer.buckets[-1]
    assert last.num_extra_nodes > 0
    assert last.num_bytes > last.num_bytes_at_cap > 0
    assert split.buckets() == [["c.weight", "c.bias", "b.weight", "b.bias"], ["a.weight", "a.bias"]]
    assert "extended past the cap" in split.optimizer.table()


def test_the_table_is_printed_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lockstep.split"):
        split = Split(mlp(4, 4, 4))
        split.compiled(torch.rand(1, 4))
    table = split.optimizer.table()
    assert table in caplog.text
    assert table.splitlines()[2].split() == ["0", "80", "2.weight"]


def test_the_parts_carry_what_dynamo_left_on_the_graph() -> None:
    split = Split(mlp(4, 4, 4))
    split.compiled(torch.rand(1, 4))
    for part in split.parts:
        assert "dynamo_compile_id" in part.meta
        assert hasattr(part, "_param_name_to_source")
        assert "DDPOptimizer" in part.compile_subgraph_reason.reason
        sources = [node._dynamo_source for node in part.graph.find_nodes(op="placeholder")]
        assert sum(source is not None for source in sources) >= 2


def test_explain_knows_the_parts_in_the_place_of_torchs_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(bucket_bytes_cap: int, backend_compile_fn: Any) -> SplitOptimizer:
        return SplitOptimizer(BucketCaps(bucket_bytes_cap, bucket_bytes_cap), backend_compile_fn)

    monkeypatch.setattr("torch._dynamo.backends.distributed.DDPOptimizer", optimizer)
    wrapper = SimpleNamespace(bucket_bytes_cap=64)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", wrapper)
    with torch._dynamo.config.patch(optimize_ddp=True):
        explained = torch._dynamo.explain(mlp(4, 4, 4, 4))(torch.rand(1, 4))
    assert len(explained.break_reasons) == 3
    assert all("DDPOptimizer" in reason.reason for reason in explained.break_reasons)


# ------------------------------------------------------------------------------------------ what crosses a boundary


@pytest.mark.parametrize("backend", BACKENDS)
def test_channels_last_and_batch_norm(backend: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.n1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.c2, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.c2(F.relu(self.n1(self.c1(x))))).mean((2, 3)))

    images = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    split = assert_same(Net().to(memory_format=torch.channels_last), images, backend=backend)
    assert len(split.parts) == 4


def test_strides_that_the_compiler_changed_are_handed_on() -> None:
    """Inductor makes the convolution's output channels last; the second part has to be compiled for that."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    settings = {"keep_output_stride": False, "force_layout_optimization": True}
    with torch._inductor.config.patch(settings):
        split = assert_same(model, torch.rand(2, 3, 8, 8), backend="inductor", steps=1)
    handed_on = split.parts[1].graph.find_nodes(op="placeholder")[0].meta["example_value"]
    assert handed_on.shape == (2, 8, 6, 6)
    assert handed_on.stride() == (288, 1, 48, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposed_and_chunked_values(backend: str) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.w = nn.Linear(3, 8), nn.Linear(40, 16), nn.Parameter(torch.rand(16, 16))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.a(x.transpose(2, 1)).chunk(2, 2)
            y = self.b(torch.cat([second, first], 1).flatten(1))
            y = (y @ self.w.t()).t()
            return y.t() + 1, y

    assert len(assert_same(Shuffled(), torch.rand(4, 3, 5), backend=backend).parts) == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_sizes_are_compiled_once(backend: str) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([x, x], 1)
            return self.b(self.a(x).reshape(-1, 4)).view(x.shape) * x.size(1)

    split = Split(Doubling(), backend, dynamic=True)
    for length in (3, 5, 8):
        x = torch.rand(2, length, 4)
        torch.testing.assert_close(split.compiled(x), split.module(x))
        split.compiled(x).sum().backward()
    assert len(split.parts) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["list", "nonzero", "floats"])
def test_sizes_and_scalars_known_only_at_run_time(backend: str, kind: str) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.rand(4, 4)) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            if kind == "list":
                count, _ = y.tolist()
                x = (x @ self.a) @ self.b
                return x @ self.c * torch.ones(count).sum() * count
            if kind == "nonzero":
                found = y.nonzero()
                return ((x @ self.a) @ self.b) @ self.c * (found + 1).sum(), found * 2
            total = y.float().sum()
            factor = total.item()
            x = x @ self.a * factor
            total.zero_()  # what is computed again in the next part must not see this
            return x @ self.b * (factor + 1) + total, factor

    config = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with config:
        split = assert_same(Counted(), torch.rand(3, 4), torch.tensor([2, 5]), backend=backend, dynamic=True)
    assert len(split.parts) == (2 if kind == "floats" else 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float_of_the_program_crosses(backend: str) -> None:
    """Dynamo passes a float that changes as a tensor, and compilers fold it; see pytorch issue 196227."""

    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.rate = nn.Linear(4, 4), nn.Linear(4, 4), 0.1

        def forward(self, x: Tensor) -> Tensor:
            keep = 1 - self.rate
            return self.b(self.a(x) * keep) / keep

    split = Split(DropPath(), backend)
    x = torch.rand(2, 4)
    for rate in (0.1, 0.2, 0.3, 0.4):
        split.module.rate = rate
        split.module.zero_grad()
        split.module(x).sum().backward()
        want = [p.grad.clone() for p in split.module.parameters()]
        split.module.zero_grad()
        split.compiled(x).sum().backward()
        torch.testing.assert_close([p.grad for p in split.module.parameters()], want)
    assert len(split.parts) <= 4


# ------------------------------------------------------------------------------------------ regions and operators


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["autocast", "no_grad"])
def test_modes_reach_over_a_boundary(backend: str, mode: str) -> None:
    enter = {"autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16), "no_grad": torch.no_grad}[mode]

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with enter():
                y = self.layers[1](self.layers[0](x))
            return self.layers[2](y.float()), y

    split = assert_same(Inside(), torch.rand(2, 4), backend=backend, tolerance=2e-2)
    assert len(split.parts) == 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


def save_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints_stay_whole(backend: str, selective: bool) -> None:
    if selective and backend == "eager":
        pytest.skip("a selective checkpoint needs AOTAutograd")
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)}

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            for block in (self.x, self.y):
                x = checkpoint(block, x, use_reentrant=False, **(options if selective else {})).cos()
            return x

    split = assert_same(Checkpointed(), torch.rand(2, 4), backend=backend)
    assert [len(bucket) for bucket in split.buckets()] == [4, 4]
    bodies = [getattr(part, node.target) for part in split.parts for node in part.graph.find_nodes(op="get_attr")]
    assert len(bodies) == 2
    assert all(("_checkpoint_context_fn" in body.meta) == selective for body in bodies)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_conditions_and_function_transforms_stay_whole(backend: str) -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = torch.vmap(lambda row: F.linear(F.linear(row, self.b.weight).sin(), self.c.weight))(x)
            return self.a(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    split = assert_same(Transformed(), torch.rand(2, 4), backend=backend)
    assert [sorted(bucket) for bucket in split.buckets()] == [["b.weight", "c.weight"], ["a.weight"]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_flex_attention_stays_whole(backend: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("slope", torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return score + (i - j) * self.slope[h]

            # On the CPU it has no backward of its own.
            q, k = (layer(x).unsqueeze(1).detach() for layer in (self.q, self.k))
            return self.out(flex_attention(q, k, k, score_mod=bias).squeeze(1))

    split = assert_same(Attention(), torch.rand(2, 8, 16), backend=backend)
    assert len(split.parts) == 3


def test_hooks_on_saved_tensors_see_real_tensors_only() -> None:
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(type(tensor))
        return tensor

    split = Split(mlp(4, 4, 4), "aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        split.compiled(torch.rand(2, 4)).sum().backward()
    assert len(split.parts) == 2
    assert all("Fake" not in kind.__name__ for kind in seen)


def test_a_compiler_of_the_user() -> None:
    def runs_as_traced(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: gm.forward(*args)

    model = mlp(4, 4, 4)
    compiled = torch.compile(model, backend=SplitOptimizer(BucketCaps(1, 1), runs_as_traced).compile_fn)
    x = torch.rand(2, 4)
    torch.testing.assert_close(compiled(x), model(x))
