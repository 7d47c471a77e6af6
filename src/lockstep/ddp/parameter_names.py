"""Parameters by name, as torch's private helpers hand them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from lockstep.ddp import setup
from lockstep.ddp.logbook import throw
from lockstep.engine.bucket import Slot
from lockstep.observe.logging_data import LoggingData


def ignore(module: nn.Module, names: Iterable[str]) -> None:
    """Mark parameters and buffers that stay local."""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    ignored = set(names)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in ignored:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]


def data_parallel(module: nn.Module, *, named: bool) -> Iterator[Any]:
    """Yield the parameters that do not stay local."""
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "_ddp_ignored"):
            yield (name, parameter) if named else parameter


def trained(module: nn.Module, ignored: set[str]) -> tuple[list[nn.Parameter], list[bool]]:
    """List the parameters to reduce, and whether each has sparse gradients."""
    slots = setup.trainable_slots(module, ignored)
    sparse = setup.sparse_parameter_names(module)
    return [slot.parameter for slot in slots], [slot.name in sparse for slot in slots]


def by_position(
    module: nn.Module, ignored: set[str], parameters: Sequence[nn.Parameter], data: LoggingData
) -> dict[int, str]:
    """Name the parameters of a list by their place in it."""
    positions = {id(p): i for i, p in enumerate(parameters)}
    names: dict[int, str] = {}
    for slot in setup.trainable_slots(module, ignored):
        if id(slot.parameter) not in positions:
            throw(data, ValueError, f"Param with name {slot.name} is trained by the module but not in the given list.")
        names[positions[id(slot.parameter)]] = slot.name
    if len(names) != len(parameters):
        throw(
            data,
            ValueError,
            f"Expected param to name mapping to cover {len(parameters)} parameters, but only {len(names)} of them "
            "belong to the module.",
        )
    return names


def check_sparse(slots: Iterable[Slot], names: Iterable[str]) -> None:
    """Raise for a name that is no parameter with sparse gradients."""
    known = {slot.name for slot in slots if slot.bucket.spec.sparse}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not a parameter with sparse gradients; these are: {sorted(known)}.")
