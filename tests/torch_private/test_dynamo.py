"""Dynamo: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_own_code() -> None:
    def add(a, b=2):
        return a + b

    other = private.own_code(add)
    assert other(1) == 3
    assert other.__code__ is not add.__code__


def test_compiler_is_watching() -> None:
    seen = []

    def look(x):
        seen.append(private.compiler_is_watching())
        return x

    private.leave_frame_to_python(look)
    look(1)
    torch.compile(look, backend="eager")(1)
    assert seen == [False, True]


def test_compiler_is_off() -> None:
    assert not private.compiler_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert private.compiler_is_off()
    assert not private.compiler_is_off()


def test_is_compiled() -> None:
    plain, in_place = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert [private.is_compiled(m) for m in (plain, in_place, torch.compile(plain, backend="eager"))] == [
        False,
        True,
        True,
    ]


def test_has_compiled_code() -> None:
    def double(x):
        return x * 2

    assert not private.has_compiled_code(double)
    torch.compile(double, backend="eager")(torch.ones(1))
    assert private.has_compiled_code(double)


def test_stand_in_for_ddp_optimizer() -> None:
    gc.collect()  # models of tests before this one
    from torch._dynamo.backends import distributed

    from lockstep.ddp.activate import activate

    activate()
    assert distributed.DDPOptimizer._asks_lockstep
    ours = distributed.DDPOptimizer
    private.stand_in_for_ddp_optimizer(lambda *args, **kwargs: None, lambda: True)
    assert distributed.DDPOptimizer is ours  # one is enough
    made = distributed.DDPOptimizer(bucket_bytes_cap=2**20, backend_compile_fn=print)
    assert made.bucket_bytes_cap == 2**20  # torch's own, as no wrapper of ours lives
    assert torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is None


def test_hands_over_graphs() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if private.hands_over_graphs() else x - 1

    for setting, expected in ((True, 2.0), ("ddp_optimizer", 2.0), (False, 0.0), ("python_reducer", 0.0)):
        with torch._dynamo.config.patch(optimize_ddp=setting):
            assert torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(1)).item() == expected


def test_leave_frame_to_python() -> None:
    graphs = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @private.leave_frame_to_python
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    assert torch.compile(outer, backend=backend)(torch.ones(1)).item() == 4.0
    assert graphs == [["add"]]


def test_split_reason() -> None:
    assert "DDPOptimizer" in private.split_reason(__file__).reason


def test_recompile_reason() -> None:
    reasons = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        reasons.append(private.recompile_reason())
        return graph

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    assert reasons[0] == private.recompile_reason() == ""
    assert "expected 2, actual 3" in reasons[1]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled_operators(function: object) -> list[str]:
    """The operators that a compiler gets to see when ``function`` runs."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(node.name for node in graph.graph.nodes if node.op == "call_function")
        return graph

    assert torch.compile(function, backend=backend)(torch.ones(1)).item() == 7.0
    return seen


@pytest.mark.parametrize("disable", [torch.compiler.disable, private.without_compiler])
def test_without_compiler(disable) -> None:
    @disable
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        assert not private.compiler_is_watching()
        return double(x) - 1  # neither this frame nor one it calls is compiled

    @private.leave_frame_to_python
    def from_python(x: torch.Tensor) -> torch.Tensor:
        return plus_one(x + 1) + 4

    # Called from a frame that is traced, and called from one that is left alone while the compiler watches.
    assert compiled_operators(lambda x: plus_one(x + 1) + 4) == ["add", "add"]
    assert compiled_operators(from_python) == []
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(lambda x: plus_one(x), backend="eager", fullgraph=True)(torch.ones(1))


def test_without_compiler_keeps_the_function_as_it_is() -> None:
    class Thing:
        @private.without_compiler
        def method(self, x: int, *, y: int = 1) -> int:
            """Adds."""
            return x + y

    assert Thing().method(1, y=3) == 4
    assert (Thing.method.__name__, Thing.method.__doc__) == ("method", "Adds.")
    with pytest.raises(TypeError, match="method"):
        Thing().method()


@pytest.mark.parametrize(
    "disable", [lambda f: torch.compiler.disable(f, recursive=False), private.frame_without_compiler]
)
def test_frame_without_compiler(disable) -> None:
    @disable
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return double(x) - 1

    # The frame is skipped, but what it calls is compiled.
    assert compiled_operators(lambda x: plus_one(x + 1) + 4) == ["add", "mul", "add"]


def test_leave_to_python() -> None:
    seen: list[object] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(gm)
        return gm.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @private.leave_to_python
    def called_back(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    assert torch.compile(called_back, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == []


ENDS: list[bool] = []


def note_end() -> None:
    ENDS.append(torch.compiler.is_dynamo_compiling())


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("left_to_python", [False, True])
def test_at_end_of_compiled_backward(monkeypatch: pytest.MonkeyPatch, fullgraph: bool, left_to_python: bool) -> None:
    from torch._dynamo import compiled_autograd, external_utils

    engine = external_utils.FakeCompiledAutogradEngine
    for name in ("exec_final_callbacks", "_exec_final_callbacks_stub"):
        monkeypatch.setattr(engine, name, staticmethod(getattr(engine, name)))
    monkeypatch.setattr(engine.exec_final_callbacks, "_tells_lockstep", False, raising=False)
    monkeypatch.setattr(compiled_autograd, "_impure_targets", compiled_autograd._impure_targets.copy())
    torch._dynamo.reset()
    ENDS.clear()
    private.at_end_of_compiled_backward(note_end)
    private.at_end_of_compiled_backward(note_end)  # once is enough
    parameter = torch.nn.Parameter(torch.ones(2))

    def compiler(gm: torch.fx.GraphModule) -> object:
        return gm if left_to_python else torch.compile(gm, backend="eager", fullgraph=fullgraph)

    with compiled_autograd._enable(compiler):
        (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 2.0]
    assert [not left_to_python] == ENDS
    torch._dynamo.reset()


def test_in_compiled_backward() -> None:
    from torch._dynamo import compiled_autograd

    seen = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(private.in_compiled_backward()))
    (parameter * 2).sum().backward()
    with compiled_autograd._enable(lambda gm: gm):
        (parameter * 2).sum().backward()
    assert seen == [False, True]
    assert not private.in_compiled_backward()


def test_on_graph_so_far() -> None:
    seen = []

    def look(context: Any) -> None:
        seen.append([node.op for node in context.graph().nodes])

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        private.on_graph_so_far(look)
        return y.cos()

    torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert seen == [["placeholder", "call_method"]]
    private.on_graph_so_far(look)
    assert len(seen) == 1


def test_with_effects_in_trace() -> None:
    from torch.utils.checkpoint import checkpoint

    values: dict[str, torch.Tensor | None] = {"x": None}

    def put(value: torch.Tensor | None) -> None:
        values["x"] = value

    def inner(x: torch.Tensor) -> torch.Tensor:
        private.with_effects_in_trace(put, x)
        y = values["x"].sin()
        private.with_effects_in_trace(put, None)
        return y

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x, use_reentrant=False)

    x = torch.ones(2, requires_grad=True)
    torch.compile(outer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert values == {"x": None}


def test_guard_on_groups() -> None:
    private.guard_on_groups()

    def times_size(x, group):
        return x * torch.distributed.get_world_size(group)

    num_graphs = []

    def count(gm, inputs):
        num_graphs.append(1)
        return gm.forward

    compiled = torch.compile(times_size, backend=count, fullgraph=True)
    other = torch.distributed.new_group([0])
    for group in (torch.distributed.group.WORLD, other, torch.distributed.group.WORLD):
        assert compiled(torch.ones(1), group).item() == 1
    assert len(num_graphs) == 2


def test_when_compiling_fails() -> None:
    def look(_: Any) -> None:
        private.when_compiling_fails(lambda error: error.add_note("told"))

    def broken(x: Any, y: Any) -> Any:
        private.on_graph_so_far(look)
        private.on_graph_so_far(look)
        return x @ y

    with pytest.raises(RuntimeError) as caught:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2, 3), torch.ones(2, 3))
    assert caught.value.__notes__.count("told") == 1
    torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2, 3), torch.ones(3, 2))


def test_is_exporting() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if private.is_exporting() else x

    x = torch.zeros(2)
    assert not private.is_exporting()
    assert torch.equal(torch.export.export(Asks(), (x,)).module()(x), x + 1)
    assert torch.equal(torch.compile(Asks(), backend="eager", fullgraph=True)(x), x)
