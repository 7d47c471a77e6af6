"""This version against an earlier one on one GPU, each in a process of its own, in turns; run in a rank by gpu.py."""

from __future__ import annotations

from typing import Any

from gpu_compiled import CompiledTrainer
from gpu_device import prepare
from gpu_timing import Trainer
from subjects import WRAPPERS, Subject
from turns import Turns

KINDS = ("eager step", "compiled step", "host, compiled forward and backward")


def measure(num_rounds: int, num_steps: int, subject: str, turns: list[Any]) -> dict[str, list[float]]:
    """Seconds per step of each kind in each turn, with the collective forced."""
    assert subject in WRAPPERS
    own = Turns(*turns)
    prepare()
    eager, compiled = own.take(
        lambda: (
            Trainer(Subject(subject, subject), num_steps, forced=True),
            CompiledTrainer(subject, num_steps=num_steps, forced=True),
        )
    )
    works = (eager.seconds_per_step, compiled.seconds_per_step, compiled.host_seconds_per_step)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(num_rounds):
        for kind, seconds in zip(KINDS, own.take(lambda: [work() for work in works]), strict=True):
            times[kind].append(seconds)
    return times
