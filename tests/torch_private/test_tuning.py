"""Timing of candidates: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lockstep import torch_private as private


class Choice:
    def __init__(self, name: str) -> None:
        self.name = name

    def hash_key(self) -> str:
        return self.name


def test_stand_in_for_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.utils import fresh_cache

    asked: list[tuple[str, Sequence[str]]] = []

    def share(what: str, candidates: Sequence[str], measure: Callable[[], list[float]]) -> list[float]:
        asked.append((what, candidates))
        return [2.0 * seconds for seconds in measure()]

    monkeypatch.setattr(codecache.PersistentCache, "lookup", codecache.PersistentCache.lookup)
    lookup = codecache.PersistentCache.lookup
    if getattr(lookup, "_asks_lockstep", False):  # another test has compiled something
        monkeypatch.setattr(codecache.PersistentCache, "lookup", lookup.__closure__[0].cell_contents)
    private.stand_in_for_timing(share)
    choices = [Choice("a"), Choice("b")]
    with fresh_cache(dir=str(tmp_path)):
        for _ in range(2):  # the second time they are found in the cache of this machine
            found = codecache.PersistentCache().lookup(choices, "mm", "4x4", lambda c: {c[0]: 3.0, c[1]: 1.0})
            assert found == {choices[0]: 6.0, choices[1]: 2.0}
    ((what, candidates),) = asked
    assert what.startswith("mm/")
    assert list(candidates) == ["a", "b"]


def test_collectives_are_timed_by_all_ranks_together() -> None:
    import inspect

    from torch._inductor import select_algorithm

    from lockstep.torch_private import tuning

    def timing(is_collective: bool) -> Callable[[Sequence[Choice]], bool]:
        return lambda choices: is_collective

    assert tuning._is_collective(timing(True))
    assert not tuning._is_collective(timing(False))
    assert not tuning._is_collective(len)
    # The name under which Inductor knows it; older versions time no collectives.
    source = inspect.getsource(select_algorithm.AlgorithmSelectorCache)
    assert "is_collective=is_collective" in source or "is_collective" not in source
