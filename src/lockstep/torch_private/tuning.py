"""Where Inductor times the candidates for an operator, and takes the fastest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

_Share = Callable[[str, Sequence[str], Callable[[], list[float]]], list[float]]


def stand_in_for_timing(share: _Share) -> None:
    """Let ``share(what, candidates, measure)`` bring the seconds of each candidate, where Inductor would time them.

    Inductor looks into the cache of this machine first, and ``measure`` is what it does when that has nothing.  Its own
    way to share the work between ranks (``distributed_max_autotune_gemm``) gathers by a collective in the middle of a
    compilation, and knows GPUs only.
    """
    from torch._inductor.codecache import PersistentCache

    original = PersistentCache.lookup
    if getattr(original, "_asks_lockstep", False):
        return

    def lookup(self: Any, choices: Any, op: str, inputs: str, benchmark: Any, *args: Any, **kwargs: Any) -> Any:
        if benchmark is None or len(choices) < 2 or _is_collective(benchmark):
            return original(self, choices, op, inputs, benchmark, *args, **kwargs)

        def shared(candidates: Sequence[Any]) -> dict[Any, float]:
            timings: dict[Any, float] = {}

            def measure() -> list[float]:
                timings.update(benchmark(candidates))
                return [float(timings[candidate]) for candidate in candidates]

            names = [str(candidate.hash_key()) for candidate in candidates]
            asked = f"{op} {inputs} {args} {kwargs} {torch.get_float32_matmul_precision()} {sorted(names)}"
            what = hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
            return dict(zip(candidates, share(f"{op}/{what}", names, measure), strict=True))

        return original(self, choices, op, inputs, shared, *args, **kwargs)

    lookup._asks_lockstep = True  # type: ignore[attr-defined]
    PersistentCache.lookup = lookup  # type: ignore[method-assign]


def _is_collective(benchmark: Any) -> bool:
    """Whether all ranks have to time together, since what is timed is a collective; only its own function knows."""
    names = getattr(getattr(benchmark, "__code__", None), "co_freevars", ())
    cells = getattr(benchmark, "__closure__", None) or ()
    found = dict(zip(names, cells, strict=True)).get("is_collective")
    return found is not None and bool(found.cell_contents)
