"""Artifacts: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import torch_private as private

LIBRARY = "c" + "a" * 51 + ".main.so"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One program, compiled into a cache of its own: its content and its libraries."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=str(tmp_path_factory.mktemp("cache"))):
        before = private.compile_counts()["compiled"]
        graph = private.trace_program(lambda x: (x * 3 + 1,), [torch.ones(5)])
        private.compile_program(graph, [torch.ones(5)])(torch.ones(5))
        assert private.compile_counts()["compiled"] == before + 1
        yield graph, private.save_compiled(), private.compiled_libraries()


def test_why_nothing_is_kept() -> None:
    from torch._inductor import config

    assert private.why_nothing_is_kept() == ""
    with config.patch(fx_graph_cache=False):
        assert "fx_graph_cache" in private.why_nothing_is_kept()
    with config.patch(force_disable_caches=True):
        assert "force_disable_caches" in private.why_nothing_is_kept()


def test_save_compiled(compiled: Any) -> None:
    _, (content, num_graphs), _ = compiled
    assert len(content) > 1000
    assert num_graphs >= 1


def test_compiled_libraries(compiled: Any) -> None:
    _, _, libraries = compiled
    assert [name for name in libraries if name.endswith(".main.so")]
    assert all(library.startswith(b"\x7fELF") for library in libraries.values())


def test_load_compiled(compiled: Any, tmp_path: Path) -> None:
    from torch._inductor.utils import fresh_cache

    graph, (content, num_graphs), libraries = compiled
    with fresh_cache(dir=str(tmp_path)):
        assert private.load_compiled(content, libraries) == num_graphs
        before = private.compile_counts()
        (result,) = private.compile_program(graph, [torch.ones(5)])(torch.ones(5))
        after = private.compile_counts()
    assert result.tolist() == [4.0] * 5
    assert after == {"found": before["found"] + 1, "compiled": before["compiled"]}


def test_compile_counts() -> None:
    assert set(private.compile_counts()) == {"found", "compiled"}


def test_is_library_name() -> None:
    assert private.is_library_name(LIBRARY)
    assert not private.is_library_name(f"../{LIBRARY}")
    assert not private.is_library_name("libc.so")


def test_compiler_settings() -> None:
    from torch._inductor import config

    before = private.compiler_settings()
    assert "max_autotune" in before
    with config.patch(max_autotune=not config.max_autotune):
        changed = {name for name, value in private.compiler_settings().items() if before.get(name) != value}
    assert "max_autotune" in changed


def test_pretended_group_options() -> None:
    dist.init_process_group(**private.pretended_group_options(4))
    try:
        assert private.is_pretended(dist.group.WORLD)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (dist.get_rank(), dist.get_world_size(), tensor.tolist()) == (0, 4, [1.0, 1.0])
    finally:
        dist.destroy_process_group()
