"""Inductor: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

from uuid import uuid4

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_inductor_backend() -> None:
    backend = private.inductor_backend("reduce-overhead", {"max_fusion_size": 3})
    assert private.inductor_config_of(backend) == {"triton.cudagraphs": True, "max_fusion_size": 3}
    assert private.inductor_config_of(torch._dynamo.lookup_backend("inductor")) == {}
    assert private.inductor_config_of(print) is None


test_inductor_config_of = test_inductor_backend


def test_inductor_setting() -> None:
    assert private.inductor_setting("joint_custom_post_pass", {}) is None
    assert private.inductor_setting("joint_custom_post_pass", {"joint_custom_post_pass": 3}) == 3


def test_compile_with_inductor() -> None:
    passes = []
    spy = private.graph_pass(lambda graph: passes.append("ours"), "key", before=lambda graph: passes.append("theirs"))
    assert spy.uuid() is None  # a pass of the user that does not name itself must keep caches away

    def backend(gm, inputs):
        patches = {"post_grad_custom_post_pass": spy}
        return private.compile_with_inductor(private.inductor_backend(), gm, inputs, patches)

    assert torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(3)).tolist() == [1.0] * 3
    assert passes == ["theirs", "ours"]


def test_graph_pass() -> None:
    """Its key is in that of AOTAutograd's cache, which hands out graphs that no pass has seen in this process."""
    from torch._dynamo.utils import counters

    def weight(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 3

    found = []
    run = uuid4().hex  # what other runs have left in the cache is not this one's
    for setting in ("joint_custom_post_pass", "post_grad_custom_post_pass"):
        for key in ("one", "one", "other"):
            torch._dynamo.reset()
            counters.clear()
            patches = {setting: private.graph_pass(lambda graph: None, f"{setting} {key} {run}")}

            def backend(gm: torch.fx.GraphModule, inputs: object, patches: object = patches) -> object:
                return private.compile_with_inductor(private.inductor_backend(), gm, inputs, patches)

            torch.compile(weight, backend=backend)(torch.ones(3, requires_grad=True)).sum().backward()
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0] * 2


def test_inductor_cache_directory() -> None:
    import os

    from torch._inductor import config

    with config.patch(fx_graph_cache=True, force_disable_caches=False):
        assert private.inductor_cache_directory() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    with config.patch(fx_graph_cache=False):
        assert private.inductor_cache_directory() is None
    with config.patch(force_disable_caches=True):
        assert private.inductor_cache_directory() is None


def test_inductor_can_cache() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.higher_order.wrap(torch.sin, x)

    modules = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        modules.append((graph, private.inductor_can_cache(graph)))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch.compile(body, backend=backend)(torch.ones(2))
    assert [answer for _, answer in modules] == [True, False]


def test_inductor_meets_ranks() -> None:
    from torch._inductor import config

    assert not private.inductor_meets_ranks()
    for setting in ("aten_distributed_optimizations.enable_overlap_scheduling", "distributed_max_autotune_gemm"):
        with config.patch(setting, True):
            assert private.inductor_meets_ranks()


def test_inductor_input() -> None:
    from torch._inductor import config

    texts = []

    def around(graph: torch.fx.GraphModule, compile: object) -> object:
        texts.append(private.inductor_input(graph))
        return compile()

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        return private.compile_with_inductor(private.inductor_backend(), gm, inputs, {}, around)

    def text_of(function: object, size: int = 3) -> str:
        torch._dynamo.reset()
        with torch._functorch.config.patch(enable_autograd_cache=False):  # what it holds is not lowered again
            torch.compile(function, backend=backend)(torch.ones(size))
        return texts[-1]

    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    def cosine(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x) + 1

    first = text_of(sine)
    assert " at 0x" not in first
    assert text_of(sine) == first
    assert first not in (text_of(cosine), text_of(sine, 4))
    with config.patch(max_fusion_size=3):
        assert text_of(sine) != first


def test_joint_graphs_are_made() -> None:
    from torch._functorch import config

    before = config.enable_autograd_cache, config.enable_remote_autograd_cache
    with private.joint_graphs_are_made():
        assert not config.enable_autograd_cache
        assert config.enable_remote_autograd_cache is False
    assert (config.enable_autograd_cache, config.enable_remote_autograd_cache) == before
