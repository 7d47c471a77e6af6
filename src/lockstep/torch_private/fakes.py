"""Tensors without data, and the state that must wait while a graph runs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def fake_mode_for(inputs: Iterable[Any]) -> Any:
    """The mode dynamo traced with, or that of the inputs, or a new one: values without data that graphs run on."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(list(inputs)) or FakeTensorMode()


def fake_tensor(tensor: torch.Tensor, fake_mode: Any) -> torch.Tensor:
    """The tensor without data that dynamo has for this one: the same object, with the same symbols for its sizes."""
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor if isinstance(tensor, FakeTensor) else to_fake_tensor(tensor, fake_mode)  # type: ignore[no-any-return]


@contextmanager
def run_on_fakes(fake_mode: Any) -> Iterator[None]:
    """Run a part on tensors without data; its own parameters are real, which the mode has to be told to accept."""
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


@contextmanager
def saved_tensor_hooks_wait() -> Iterator[None]:
    """Keep the user's hooks on saved tensors away from tensors without data; they are for the real run."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)  # type: ignore[attr-defined]


@contextmanager
def tracing_context_of_a_part() -> Iterator[Callable[[], bool]]:
    """A copy of dynamo's tracing context, in which AOTAutograd answers the first call of what it compiles with fakes.

    Yields the question whether it will: a compiler need not use AOTAutograd, and without dynamo there is no context.
    """
    import copy

    from torch._guards import TracingContext, tracing

    whole = TracingContext.try_get()
    if whole is None:
        yield lambda: False
        return
    part = copy.copy(whole)
    part.fw_metadata = None
    part.fakify_first_call = True
    try:
        with tracing(part):
            yield lambda: part.fw_metadata is not None
    finally:
        part.fakify_first_call = False


def fake_copy(module: torch.nn.Module, fake_mode: Any) -> torch.nn.Module:
    """The module with tensors without data for its parameters and buffers, so that a trial run changes nothing."""
    from torch._dynamo.utils import deepcopy_to_fake_tensor

    return deepcopy_to_fake_tensor(module, fake_mode)  # type: ignore[no-any-return]
