"""Iterators and sources of random numbers that a model or loss keeps: no program follows them, and the loop runs."""

from __future__ import annotations

import array
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import lockstep
from program.loops import Mlp, assert_same, batch_of


def numbers() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 1.1


def from_deque() -> Callable[[], float]:
    queue = deque([1.0, 2.0, 3.0])

    def draw() -> float:
        queue.rotate()
        return queue[0]

    return draw


def from_bytes() -> Callable[[], float]:
    count = bytearray(1)

    def draw() -> float:
        count[0] += 1
        return float(count[0])

    return draw


def from_array() -> Callable[[], float]:
    count = array.array("d", [1.0])

    def draw() -> float:
        count[0] += 0.5
        return count[0]

    return draw


def nexts(make: Callable[[], Iterator[float]]) -> Callable[[], Callable[[], float]]:
    def made() -> Callable[[], float]:
        source = make()
        return lambda: float(next(source))

    return made


def of_torch() -> Callable[[], float]:
    source = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=source)  # type: ignore[return-value]


SOURCES: dict[str, Callable[[], Callable[[], float]]] = {
    "a generator": nexts(numbers),
    "itertools.count": nexts(lambda: itertools.count(1)),
    "itertools.cycle": nexts(lambda: itertools.cycle([1.0, 2.0, 3.0])),
    "an iterator of a list": nexts(lambda: iter([1.0 + 0.1 * i for i in range(50)])),
    "enumerate": nexts(lambda: map(float, range(1, 50))),
    "random.Random": lambda: random.Random(3).random,
    "numpy's generator": lambda: numpy.random.default_rng(3).random,
    "numpy's older state": lambda: numpy.random.RandomState(3).rand,
    "torch.Generator": of_torch,
    "a deque": from_deque,
    "bytes": from_bytes,
    "an array": from_array,
}


class Drawing(Mlp):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.draw()


@pytest.mark.parametrize("name", SOURCES)
def test_what_moves_on_is_noticed(name: str, uncompiled: None) -> None:
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        module: nn.Module = Drawing(SOURCES[name]())
        step: Any = lockstep.TrainStep(
            module, torch.optim.SGD(module.parameters(), lr=0.01), lambda m, b: m(b["x"]).square().mean(), mode=mode
        )
        losses = torch.stack([step(batch_of(index)) for index in range(6)])
        ends.append({"losses": losses, **module.state_dict()})
    assert_same(*ends)
    assert step.explain().num_program_calls == 0
    assert step.explain().reasons
