"""What the compiler has made in this process, as bytes that another process can load."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_LIBRARY = re.compile(r"c[a-z2-7]{51}(\.main)?\.so")
_PROBE = b"_chk_kernel"  # in the small programs by which Inductor asks what the processor can do
_MOST_PROBES = 32


def why_nothing_is_kept() -> str:
    """Why Inductor would not use what it finds in its cache; empty if it would."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    if config.force_disable_caches:
        return "Inductor's caches are off (force_disable_caches)"
    if not config.fx_graph_cache:
        return "Inductor's cache of graphs is off (fx_graph_cache)"
    if not functorch_config.enable_autograd_cache:
        return "AOTAutograd's cache is off (enable_autograd_cache)"
    return ""


def save_compiled() -> tuple[bytes, int]:
    """All graphs that this process compiled or found, in the format of torch; and how many of them there are."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return b"", 0
    content, info = saved
    return content, len(info.inductor_artifacts)


def load_compiled(content: bytes, libraries: Mapping[str, bytes]) -> int:
    """Put graphs and the libraries they call where Inductor looks for them; returns how many graphs there are.

    torch's own function brings the graphs; of what the C++ compiler made of their kernels it brings only the sources,
    and each process would compile these again.  A library is found by its name, which stands for its source, the
    compiler and its options; one with the same name is left as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for name, library in libraries.items():
        path = Path(cache_dir(), name[1:3], name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, library)
    if not content:
        return 0
    info = torch.compiler.load_cache_artifacts(content)
    if info is None:
        raise ValueError("torch cannot read the compiled graphs in it")
    return len(info.inductor_artifacts)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that others find whole or not at all."""
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o755)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def compiled_libraries() -> dict[str, bytes]:
    """The libraries that this process has loaded out of Inductor's cache, and its probes of the processor."""
    if "torch._inductor.codecache" not in sys.modules:
        return {}
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    root = Path(cache_dir())
    kinds = [CppCodeCache, *_below(CppCodeCache)]
    keys = {key for kind in kinds for key in getattr(kind, "cache", {})}
    names = {f"{key}{ending}" for key in keys for ending in (".main.so", ".so")}
    probes = [p.with_suffix(".so") for p in root.glob("??/c*.cpp") if ".main" not in p.name and _PROBE in _start(p)]
    names |= {path.name for path in sorted(probes)[:_MOST_PROBES]}
    paths = {name: root / name[1:3] / name for name in sorted(names) if is_library_name(name)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def is_library_name(name: str) -> bool:
    """Whether Inductor would call a library so: nothing else may be written into its cache."""
    return _LIBRARY.fullmatch(name) is not None


def _below(kind: type) -> list[type]:
    """All classes that inherit from one: each keeps the libraries of its kind."""
    below: list[type] = kind.__subclasses__()
    return [found for sub in below for found in (sub, *_below(sub))]


def _start(path: Path) -> bytes:
    """The first page of a file."""
    with path.open("rb") as file:
        return file.read(4096)


def compiler_settings() -> dict[str, str]:
    """Every option of Inductor that is part of the key of its cache, as text that is the same in all processes."""
    from torch._inductor import config

    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in config.save_config_portable().items()}


def compile_counts() -> dict[str, int]:
    """How many graphs Inductor found in its cache, how many it had to compile, and how many it could not keep."""
    if "torch._dynamo.utils" not in sys.modules:
        return {"found": 0, "compiled": 0}
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    compiled = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    return {"found": counts["fxgraph_cache_hit"], "compiled": compiled}


def pretended_group_options(world: int) -> dict[str, Any]:
    """What to give ``init_process_group`` for a world that is not there: collectives return at once.

    The backend lives in torch's test helpers, and is registered by importing them.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return {"backend": "fake", "store": HashStore(), "rank": 0, "world_size": world}
