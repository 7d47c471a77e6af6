"""Random numbers that a program could not draw as the step does."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

_OF_TORCH = "torch's generator of the CPU"
_ELSEWHERE = 0x10C57E9  # no program of anybody's begins here


class HostRandomness:
    """The random numbers of the host, which a program cannot draw: Python's, NumPy's and those of torch on the CPU."""

    def __init__(self, *, elsewhere: bool = False) -> None:
        self._python = random.getstate()
        self._torch = self._begun = torch.get_rng_state()
        if elsewhere:  # so that a step which sets its seed, to what it was set to in the last one, is noticed
            torch.default_generator.manual_seed(_ELSEWHERE)
            self._begun = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None

    def drawn(self) -> list[str]:
        """Whose random numbers were drawn since."""
        found = []
        if random.getstate() != self._python:
            found.append("Python's random")
        if not torch.equal(torch.get_rng_state(), self._begun):
            found.append(_OF_TORCH)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            now = numpy.random.get_state()
            if now[2] != self._numpy[2] or (now[1] != self._numpy[1]).any():
                found.append("NumPy's random")
        return found

    def restore(self) -> None:
        """Undo the drawing."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def why_not_so_random(graph: Any, drawn: Sequence[str], seeded: Sequence[str]) -> str:
    """Why a program of this trace would draw other random numbers than the step; empty if it would not.

    It draws on from where the generator is, whatever the step has set it to.  A checkpoint sets it back to compute its
    layers once more, which is nothing where they draw none.
    """
    of_the_host = [name for name in drawn if name != _OF_TORCH]
    if of_the_host:
        return f"the step draws random numbers of the host ({', '.join(of_the_host)})"
    draws = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)
    if not seeded or not (draws or _OF_TORCH in drawn):
        return ""
    return f"random numbers are set back inside of it ({seeded[0]}), as a checkpoint does around layers that draw some"
