"""Random numbers that a program could not draw as the step does."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep import torch_private
from lockstep.program.untraceable import Untraceable

OF_TORCH = "torch's generator of the CPU"
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
            found.append(OF_TORCH)
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


class Draws:
    """Follows torch's generator of the CPU through a trace, in which nothing is drawn.

    Each operator that will draw is given a seed of its own: if the generator has another one when the trace comes to
    the next, the step has set it back or elsewhere by whatever means, and a program, which draws on from where the
    generator is, would draw other numbers.  To set it and put it back is nothing where none are drawn in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_cpu = device.type == "cpu"
        self._seed = _ELSEWHERE
        self._draws = False
        self._is_moved = False

    def before(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Look at the generator as the trace comes to an operator; returns what to give it, without the default one."""
        if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
            return args, kwargs
        if _drops_nothing(operator, args, kwargs):
            return args, kwargs
        self._draws = True
        self._is_moved = self._is_moved or torch.default_generator.initial_seed() != self._seed
        self._seed += 1
        torch.default_generator.manual_seed(self._seed)
        return [self._checked(value) for value in args], {name: self._checked(kwargs[name]) for name in kwargs}

    def _checked(self, value: Any) -> Any:
        """Refuse a generator that the step brings along; the default one is what an operator takes by itself.

        It comes as another object here; a copy of it has not the new seed.
        """
        if not isinstance(value, torch.Generator):
            return value
        if value.initial_seed() != self._seed:
            raise Untraceable("the step draws random numbers from a generator of its own")
        return None

    @property
    def is_as_left(self) -> bool:
        """Whether the generator is where the last operator that draws has left it."""
        return torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(self._seed).get_state())

    def why_not(self, drawn: Sequence[str], seeded: Sequence[str]) -> str:
        """Why a program of this trace would draw other random numbers than the step; empty if it would not.

        ``drawn`` are random numbers of the host that were drawn meanwhile, ``seeded`` the calls that set some.
        """
        if of_the_host := [name for name in drawn if name != OF_TORCH]:
            return f"the step draws random numbers of the host ({', '.join(of_the_host)})"
        if "initial_seed" in seeded:
            return "the step asks for the seed of random numbers"
        is_moved = self._is_moved or not self.is_as_left
        # Of a GPU's generator only the calls are seen, not where it is.
        if not is_moved and (self._is_on_cpu or not seeded or not self._draws):
            return ""
        how = seeded[0] if seeded else "a method of the generator"
        return f"random numbers are set back inside of it ({how}), as a checkpoint does around layers that draw some"


def _drops_nothing(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is an attention without dropout, which draws nothing though it is marked as one that does."""
    return bool(torch_private.argument_of(operator, "dropout_p", args, kwargs) == 0.0)
