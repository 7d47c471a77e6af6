"""Optimizers inside a program: their learning rates as tensors, their step counts where the parameters are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.program.reasons import takes_rate_as_tensor


class Rates:
    """The learning rates of optimizers as tensors that a program reads, written anew when the host's numbers change.

    The numbers in the optimizers stay plain, so that schedulers, logs and checkpoints find what they always find.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._groups: list[dict[str, Any]] = [
            group for optimizer in optimizers if takes_rate_as_tensor(optimizer) for group in optimizer.param_groups
        ]
        self.tensors = [torch.tensor(float(group["lr"]), dtype=torch.float32, device=device) for group in self._groups]
        self._written = [float(group["lr"]) for group in self._groups]

    def write(self) -> None:
        """Put the rates as they are now where the program reads them."""
        for index, group in enumerate(self._groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self.tensors[index].copy_(rate, non_blocking=True)
            elif rate != self._written[index]:
                self.tensors[index].fill_(rate)
                self._written[index] = rate

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the optimizers the tensors, while a program of them is made."""
        before = [(group["lr"], group.get("capturable")) for group in self._groups]
        for group, tensor in zip(self._groups, self.tensors, strict=True):
            group["lr"] = tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(self._groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable


def move_step_counts(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Put the step counts of optimizers beside the parameters, where a program can count them."""
    for optimizer in optimizers:
        moved = False
        for parameter, state in optimizer.state.items():
            count = state.get("step")
            if isinstance(count, Tensor) and count.device != parameter.device:
                state["step"] = count.to(parameter.device)
                moved = True
        for group in optimizer.param_groups if moved else ():
            group["capturable"] = True  # without it each parameter's count would be read by the host, one by one


def load_kernels(optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Tensor]) -> None:
    """Run stand-ins of optimizers on a few numbers, with rates as tensors.

    Kernels are loaded when they are first used, which had better not be inside a capture; and those that take a rate
    as a tensor have not been used before.
    """
    following = iter(rates)
    for optimizer in optimizers:
        if not takes_rate_as_tensor(optimizer):
            continue
        stand_in: Any = object.__new__(type(optimizer))
        own = {"_warned_capturable_if_run_uncaptured": True}
        vars(stand_in).update({name: value for name, value in vars(optimizer).items() if name != "step"} | own)
        stand_in.state, stand_in.param_groups = defaultdict(dict), []
        for group in optimizer.param_groups:
            rate = next(following)
            kinds = {(p.dtype, p.device): p for p in group["params"]}
            dummies = [torch.zeros(2, dtype=dtype, device=device) for dtype, device in kinds]
            for dummy in dummies:
                dummy.grad = torch.zeros_like(dummy)
            changed = {**group, "params": dummies, "lr": rate}
            stand_in.param_groups.append({**changed, "capturable": True} if "capturable" in group else changed)
        for _ in range(2):
            type(optimizer).step(stand_in)


def keeps_python_state(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The name of a number that an optimizer keeps in Python, and changes in each step; empty if there is none."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    return f"{type(optimizer).__name__} keeps {name!r} as a Python number"
    return ""
