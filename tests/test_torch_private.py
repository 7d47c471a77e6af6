"""Every private torch name, one test each: when torch moves one, the failing test says which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep import torch_private as private

SOURCE = Path(private.__file__)


pytestmark = pytest.mark.usefixtures("world_of_one")


def check_TorchDDP() -> None:
    assert hasattr(private.TorchDDP, "_active_ddp_module")
    assert private.TorchDDP._get_active_ddp_module() is None


def _joint_graph(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.fx.Graph:
    """The graph of forward and backward, as passes get it."""
    seen: list[torch.fx.Graph] = []
    parts = private.aot_backend_parts(torch._dynamo.lookup_backend("aot_eager"))
    assert parts is not None
    partition = parts["partition_fn"]

    def look(module, *args, **kwargs):
        seen.append(module.graph)
        return partition(module, *args, **kwargs)

    torch.compile(model, backend=private.aot_backend({**parts, "partition_fn": look}))(*inputs).sum().backward()
    return seen[0]


def check_aot_backend() -> None:
    model = torch.nn.Linear(3, 2)
    graph = _joint_graph(model, torch.ones(1, 3))
    assert any(node.op == "output" for node in graph.nodes)


check_aot_backend_parts = check_aot_backend


def check_gradient_positions() -> None:
    graph = _joint_graph(torch.nn.Linear(3, 2), torch.ones(1, 3))
    inputs, positions = private.plain_inputs(graph), private.gradient_positions(graph.output_node())
    shapes = {tuple(inputs[index].meta["val"].shape) for index in positions}
    assert shapes == {(2, 3), (2,)}
    results = graph.output_node().args[0]
    assert all(results[at].meta["val"].shape == inputs[index].meta["val"].shape for index, at in positions.items())


check_plain_inputs = check_gradient_positions


def check_copy_node_origin() -> None:
    graph = torch.fx.Graph()
    one, two = graph.placeholder("one"), graph.placeholder("two")
    one.meta["seq_nr"] = 7
    private.copy_node_origin(one, two)
    assert two.meta["seq_nr"] == 7


def check_node_flops() -> None:
    graph = _joint_graph(torch.nn.Linear(3, 2), torch.ones(5, 3))
    assert sum(private.node_flops(node) for node in graph.nodes) >= 2 * 5 * 3 * 2


def check_size_hint() -> None:
    assert private.size_hint(4) == 4
    seen = []

    def backend(gm, inputs):
        seen.extend(private.size_hint(i) for i in inputs if not isinstance(i, torch.Tensor))
        return gm

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(6))
    assert seen == [6]


def check_foreach_add() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    private.foreach_add(tensors, [torch.ones(2), torch.ones(3)])
    assert [t.sum().item() for t in tensors] == [4.0, 6.0]


def check_engine_will_run() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    node = private.gradient_accumulator(parameter)
    answers = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            answers.append(private.engine_will_run(node))
            return g * 2

    Ask.apply(parameter).sum().backward()
    torch.autograd.grad(Ask.apply(parameter).sum(), parameter)
    assert answers == [True, False]


def check_only_hooks_are_ours() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not private.only_hooks_are_ours([parameter])
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert private.only_hooks_are_ours([parameter])
    parameter.register_hook(lambda g: None)
    assert not private.only_hooks_are_ours([parameter])


def check_own_code() -> None:
    def add(a, b=2):
        return a + b

    other = private.own_code(add)
    assert other(1) == 3
    assert other.__code__ is not add.__code__


def check_compiler_is_watching() -> None:
    seen = []

    def look(x):
        seen.append(private.compiler_is_watching())
        return x

    private.leave_frame_to_python(look)
    look(1)
    torch.compile(look, backend="eager")(1)
    assert seen == [False, True]


def check_compiler_is_off() -> None:
    assert not private.compiler_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert private.compiler_is_off()
    assert not private.compiler_is_off()


def check_is_compiled() -> None:
    plain, in_place = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert [private.is_compiled(m) for m in (plain, in_place, torch.compile(plain, backend="eager"))] == [
        False,
        True,
        True,
    ]


def check_has_compiled_code() -> None:
    def double(x):
        return x * 2

    assert not private.has_compiled_code(double)
    torch.compile(double, backend="eager")(torch.ones(1))
    assert private.has_compiled_code(double)


def check_unwrap_backend() -> None:
    plain = torch._dynamo.lookup_backend("aot_eager")
    assert private.unwrap_backend(plain) == (plain, {})
    wrapped = torch._TorchCompileWrapper("aot_eager", None, {"some": 1}, None)
    assert private.unwrap_backend(wrapped) == (plain, {"options": {"some": 1}})


def check_inductor_backend() -> None:
    backend = private.inductor_backend("reduce-overhead", {"max_fusion_size": 3})
    assert private.inductor_config_of(backend) == {"triton.cudagraphs": True, "max_fusion_size": 3}
    assert private.inductor_config_of(torch._dynamo.lookup_backend("inductor")) == {}
    assert private.inductor_config_of(print) is None


check_inductor_config_of = check_inductor_backend


def check_inductor_setting() -> None:
    assert private.inductor_setting("joint_custom_post_pass", {}) is None
    assert private.inductor_setting("joint_custom_post_pass", {"joint_custom_post_pass": 3}) == 3


def check_compile_with_inductor() -> None:
    passes = []
    spy = private.graph_pass(lambda graph: passes.append("ours"), "key", before=lambda graph: passes.append("theirs"))
    assert spy.uuid() is None  # a pass of the user that does not name itself must keep caches away

    def backend(gm, inputs):
        patches = {"post_grad_custom_post_pass": spy}
        return private.compile_with_inductor(private.inductor_backend(), gm, inputs, patches)

    assert torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(3)).tolist() == [1.0] * 3
    assert passes == ["theirs", "ours"]


check_graph_pass = check_compile_with_inductor


def check_register_backend() -> None:
    def a_backend_for_tests(gm, inputs):
        return gm

    private.register_backend(a_backend_for_tests, "a_backend_for_tests")
    assert torch._dynamo.lookup_backend("a_backend_for_tests") is a_backend_for_tests


def check_stand_in_for_ddp_optimizer() -> None:
    from torch._dynamo.backends import distributed

    assert distributed.DDPOptimizer._asks_lockstep  # since lockstep was imported
    made = distributed.DDPOptimizer(bucket_bytes_cap=2**20, backend_compile_fn=print)
    assert made.bucket_bytes_cap == 2**20  # torch's own, as no wrapper of ours is running


def check_BufferCommHookLocation() -> None:
    assert {m.name for m in private.BufferCommHookLocation} == {"PRE_FORWARD", "POST_FORWARD"}


def check_BuiltinCommHookType() -> None:
    assert {"ALLREDUCE", "FP16_COMPRESS"} <= set(private.BuiltinCommHookType.__members__)


def check_GradBucket() -> None:
    methods = {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}
    assert methods <= set(dir(private.GradBucket))


def check_MixedPrecision() -> None:
    config = private.MixedPrecision(param_dtype=torch.bfloat16)
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (torch.bfloat16, None, None)


def check_RecordFunction() -> None:
    with torch.profiler.profile() as profile, private.RecordFunction("lockstep::probe"):
        torch.zeros(1)
    assert any(event.key == "lockstep::probe" for event in profile.key_averages())


def check_all_reduce() -> None:
    tensor = torch.full((3,), 2.0)
    private.all_reduce(dist.group.WORLD, tensor, dist.ReduceOp.AVG).wait()
    assert tensor.tolist() == [2.0] * 3


def check_as_overlapped_optimizer() -> None:
    optimizer = private.as_overlapped_optimizer(torch.optim.SGD, None, 0.1)
    assert callable(optimizer.register_ddp)


def check_backend_name() -> None:
    assert private.backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"


def check_cast_forward_inputs() -> None:
    args, kwargs = private.cast_forward_inputs(torch.bfloat16, torch.zeros(1), x=torch.zeros(1))
    assert args[0].dtype == kwargs["x"].dtype == torch.bfloat16


def check_current_dist_autograd_context() -> None:
    assert private.current_dist_autograd_context() is None


def check_default_group() -> None:
    assert private.default_group() is dist.group.WORLD


def check_default_store() -> None:
    private.default_store().set("probe", "yes")
    assert private.default_store().get("probe") == b"yes"


def check_dtensor_like() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
    made = private.dtensor_like(parameter, torch.ones(2))
    assert made.to_local().tolist() == [1.0, 1.0]


def check_alias() -> None:
    flat = torch.arange(6.0)
    part = private.alias(flat, (2, 2), (1, 2), 1)
    assert part.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    part.zero_()
    assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 5.0]  # the same memory
    assert not part._is_view()


def check_flatten_dense() -> None:
    assert private.flatten_dense([torch.ones(2, 2), torch.zeros(1)]).tolist() == [1.0] * 4 + [0.0]


def check_unflatten_dense() -> None:
    flat = torch.arange(5.0)
    first, second = private.unflatten_dense(flat, [torch.empty(2, 2), torch.empty(1)])
    first.zero_()
    assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, 4.0]  # views, not copies
    assert second.tolist() == [4.0]


def check_foreach_copy() -> None:
    target = [torch.zeros(2), torch.zeros(1)]
    private.foreach_copy(target, [torch.ones(2), torch.ones(1)])
    assert [t.sum().item() for t in target] == [2.0, 1.0]


def check_foreach_mul() -> None:
    tensors = [torch.ones(2), torch.ones(1)]
    private.foreach_mul(tensors, 0.5)
    assert [t.sum().item() for t in tensors] == [1.0, 0.5]


def check_gradient_accumulator() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert private.gradient_accumulator(parameter).variable is parameter


def check_in_backward() -> None:
    seen = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.register_hook(lambda g: seen.append(private.in_backward()))
    parameter.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


def check_in_backward_optimizer_handles() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = torch.nn.Parameter(torch.zeros(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert private.in_backward_optimizer_handles(parameter)


def check_in_nested_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def ask(_: torch.Tensor) -> None:
        private.queue_backward_callback(lambda: seen.append(private.in_nested_backward()))

    layer = torch.nn.Linear(1, 1)
    outside = torch.nn.Parameter(torch.ones(1))
    layer.weight.register_post_accumulate_grad_hook(ask)
    outside.register_post_accumulate_grad_hook(ask)
    checkpoint(layer, outside * torch.ones(1), use_reentrant=True).sum().backward()
    assert seen == [True, False]


def check_inputs_to_device() -> None:
    args, kwargs = private.inputs_to_device((torch.zeros(1),), {"x": [torch.zeros(1)]}, torch.device("cpu"), False)
    assert args[0][0].device.type == kwargs[0]["x"][0].device.type == "cpu"


def check_leave_frame_to_python() -> None:
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


def check_preserve_version_counter() -> None:
    buffer = torch.zeros(1)
    before = buffer._version
    with private.preserve_version_counter([buffer]):
        buffer.add_(1)
    assert buffer._version == before


def check_memory_owners() -> None:
    flat = torch.zeros(4)
    assert private.memory_owners(flat) == 1
    alias = torch.ones(2)
    alias.data = flat[:2]
    assert private.memory_owners(flat) == 2
    del alias
    assert private.memory_owners(flat) == 1


def check_queue_backward_callback() -> None:
    order = []
    parameter = torch.nn.Parameter(torch.zeros(1))

    def on_gradient(_: torch.Tensor) -> None:
        private.queue_backward_callback(lambda: order.append("end"))
        order.append("gradient")

    parameter.register_post_accumulate_grad_hook(on_gradient)
    parameter.sum().backward()
    assert order == ["gradient", "end"]


def check_rank_not_in_group() -> None:
    assert not private.rank_not_in_group(dist.group.WORLD)


def check_enters_autocast() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    targets = [node.target for node in traced(cast).nodes]
    assert sum(private.enters_autocast(target) for target in targets) == 1


def check_exits_autocast() -> None:
    assert private.exits_autocast(private.exit_autocast())
    assert not private.exits_autocast(torch.add)


def check_exit_autocast() -> None:
    entered = torch.autocast("cpu", torch.bfloat16)
    entered.__enter__()
    assert torch.is_autocast_enabled("cpu")
    private.exit_autocast()(entered)
    assert not torch.is_autocast_enabled("cpu")


def check_sets_grad_mode() -> None:
    def without(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + 1

    assert sum(private.sets_grad_mode(node.target) for node in traced(without).nodes) == 2


def check_split_reason() -> None:
    assert "DDPOptimizer" in private.split_reason(__file__).reason


def check_fake_mode_for() -> None:
    mode = private.fake_mode_for([torch.ones(1)])
    assert private.fake_mode_for([private.fake_tensor(torch.ones(1), mode)]) is mode


def check_fake_tensor() -> None:
    real = torch.ones(2)
    fake = private.fake_tensor(real, private.fake_mode_for([real]))
    assert (fake.shape, fake.device, fake.is_meta) == (real.shape, real.device, False)
    assert private.fake_tensor(fake, None) is fake


def check_fake_copy() -> None:
    norm = torch.nn.BatchNorm1d(2)
    mode = private.fake_mode_for([])
    with private.run_on_fakes(mode):
        private.fake_copy(norm, mode)(torch.ones(3, 2))
    assert norm.num_batches_tracked.item() == 0


def check_run_on_fakes() -> None:
    real = torch.ones(2)
    mode = private.fake_mode_for([real])
    with private.run_on_fakes(mode):
        assert (private.fake_tensor(torch.ones(2), mode) + real).fake_mode is mode
    assert not mode.allow_non_fake_inputs


def check_saved_tensor_hooks_wait() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda t: t):
        with private.saved_tensor_hooks_wait():
            x.exp()
        assert seen == []
        x.exp()
        assert len(seen) == 1


def check_tracing_context_of_a_part() -> None:
    from torch._dynamo.backends.common import aot_autograd

    answers = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        with private.tracing_context_of_a_part() as with_fakes:
            answers.append(with_fakes())
            compiled = aot_autograd(fw_compiler=lambda g, _: g)(graph, inputs)
            answers.append(with_fakes())
            answers.append(type(compiled(*inputs)[0]).__name__)
        return compiled

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1)).item() == 2.0
    assert answers == [False, True, "FakeTensor"]
    with private.tracing_context_of_a_part() as with_fakes:
        assert not with_fakes()


def check_inductor_cache_directory() -> None:
    import os

    from torch._inductor import config

    with config.patch(fx_graph_cache=True, force_disable_caches=False):
        assert private.inductor_cache_directory() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    with config.patch(fx_graph_cache=False):
        assert private.inductor_cache_directory() is None
    with config.patch(force_disable_caches=True):
        assert private.inductor_cache_directory() is None


def check_inductor_can_cache() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.higher_order.wrap(torch.sin, x)

    modules = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        modules.append((graph, private.inductor_can_cache(graph)))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch.compile(body, backend=backend)(torch.ones(2))
    assert [answer for _, answer in modules] == [True, False]


def check_inductor_meets_ranks() -> None:
    from torch._inductor import config

    assert not private.inductor_meets_ranks()
    for setting in ("aten_distributed_optimizations.enable_overlap_scheduling", "distributed_max_autotune_gemm"):
        with config.patch(setting, True):
            assert private.inductor_meets_ranks()


def check_inductor_input() -> None:
    from torch._inductor import config

    texts = []

    def around(graph: torch.fx.GraphModule, compile: object) -> object:
        texts.append(private.inductor_input(graph))
        return compile()

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        return private.compile_with_inductor(private.inductor_backend(), gm, inputs, {}, around)

    def text_of(function: object, size: int = 3) -> str:
        torch._dynamo.reset()
        torch.compile(function, backend=backend)(torch.ones(size))
        return texts[-1]

    first = text_of(torch.sin)
    assert " at 0x" not in first
    assert text_of(torch.sin) == first
    assert first not in (text_of(torch.cos), text_of(torch.sin, 4))
    with config.patch(max_fusion_size=3):
        assert text_of(torch.sin) != first


def check_recompile_reason() -> None:
    reasons = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        reasons.append(private.recompile_reason())
        return graph

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    assert reasons[0] == private.recompile_reason() == ""
    assert "expected 2, actual 3" in reasons[1]


def check_graph_input_name() -> None:
    graph = traced(lambda rows: rows + 1)
    assert [private.graph_input_name(node) for node in graph.find_nodes(op="placeholder")] == ["rows"]


def traced(function: object) -> torch.fx.Graph:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph.graph)
        return graph

    torch.compile(function, backend=backend)(torch.ones(2, 2))
    return graphs[0]


@pytest.mark.parametrize("name", private.__all__)
def test_private_name(name: str) -> None:
    globals()[f"check_{name}"]()


def test_every_name_has_a_reason() -> None:
    """Functions carry a docstring, constants a comment above them."""
    text = SOURCE.read_text()
    tree = ast.parse(text)
    functions = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert all(functions.values()), [name for name, doc in functions.items() if not doc]
    assert set(private.__all__) - set(functions) == {
        "BufferCommHookLocation",
        "BuiltinCommHookType",
        "GradBucket",
        "MixedPrecision",
        "RecordFunction",
        "TorchDDP",
        "alias",
        "cast_forward_inputs",
        "default_group",
        "default_store",
        "flatten_dense",
        "foreach_add",
        "foreach_copy",
        "foreach_mul",
        "inputs_to_device",
        "rank_not_in_group",
        "unflatten_dense",
    }
