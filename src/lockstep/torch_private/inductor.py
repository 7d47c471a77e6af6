"""Inductor: its options, its passes, its cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def graph_pass(apply: Callable[[Any], None], key: str, before: Any = None) -> Any:
    """A pass for Inductor that runs after the user's own, if there is one; ``key`` names its outcome for caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class LockstepPass(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: Any) -> None:
            if before is not None:
                before(graph)
            apply(graph)

        def uuid(self) -> Any:
            if before is None:
                return f"lockstep {key}"
            theirs = before.uuid() if hasattr(before, "uuid") else None
            return None if theirs is None else f"lockstep {key} after {theirs}"

    return LockstepPass()


def inductor_setting(name: str, patches: dict[str, Any]) -> Any:
    """The value of an Inductor option as it will be under ``patches``."""
    from torch._inductor import config

    return patches[name] if name in patches else getattr(config, name)


def inductor_config_of(backend: Any) -> dict[str, Any] | None:
    """The options that ``backend`` gives to Inductor; None if it is not Inductor."""
    from torch._dynamo.backends.inductor import inductor

    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return dict(backend.config)
    return {} if backend is inductor else None


def compile_with_inductor(
    backend: Any,
    gm: Any,
    inputs: Any,
    patches: dict[str, Any],
    around: Callable[[Any, Callable[[], Any]], Any] | None = None,
    **more: Any,
) -> Any:
    """What the Inductor backend does when it is called, with further options.

    ``around(graph, compile)`` stands around the lowering of the forward, and of the backward; it returns what
    ``compile`` does.  There is no public hook for the backward, which Inductor lowers when it first runs.
    """
    from functools import partial

    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    extra: dict[str, Any] = dict(more)
    if getattr(backend, "name", None):
        extra["compile_region_name"] = backend.name
    if around is not None:

        def inner_compile(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
            return around(graph, partial(compile_fx_inner, graph, example_inputs, **kwargs))

        extra["inner_compile"] = inner_compile
    return compile_fx(gm, inputs, config_patches=patches, **extra)


def inductor_backend(mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """What torch.compile makes of backend="inductor" with these."""
    return torch._TorchCompileInductorWrapper(mode, options, None)


def inductor_cache_directory() -> str | None:
    """Where another process finds what Inductor compiles now; None where it keeps nothing."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir() if config.fx_graph_cache and not config.force_disable_caches else None


def inductor_can_cache(graph: Any) -> bool:
    """Whether Inductor's cache takes this graph; some operators it does not, and then every process compiles."""
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    try:
        FxGraphCache._check_can_cache(graph)
    except BypassFxGraphCache:
        return False
    return True


def inductor_meets_ranks() -> bool:
    """Whether Inductor runs collectives while it compiles: ranks that took turns would wait for each other then."""
    from torch._inductor import config

    optimizations = getattr(config, "aten_distributed_optimizations", None)
    settings = [
        (config, "distributed_max_autotune_gemm"),
        (optimizations, "spmd_check"),
        (optimizations, "enable_overlap_scheduling"),
    ]
    try:
        from torch._inductor import config_comms

        settings.append((config_comms, "runtime_estimations_align_across_all_distributed_ranks"))
    except ImportError:
        pass
    return any(getattr(owner, name, False) for owner, name in settings)


def inductor_input(graph: Any) -> str:
    """A text that two processes have in common if one can find in Inductor's cache what the other makes of ``graph``.

    Inductor's own key for its cache would do, but takes forty times as long to compute.
    """
    from torch._inductor import config

    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    inputs = [(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in values]
    return f"{graph.graph}\n{inputs}\n{sorted(config.save_config_portable().items())}"


def joint_graphs_are_made() -> AbstractContextManager[Any]:
    """Within this context AOTAutograd makes every joint graph, so that what changes it runs; Inductor's cache stays.

    Its own cache has the passes of Inductor in its key, but not the partitioner that a backend of one's own is given.
    """
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)  # type: ignore[no-any-return]
