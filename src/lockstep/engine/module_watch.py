"""Notices that some module somewhere got a new parameter, so that wrappers know when to look at theirs again."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_num_registrations = 0
_is_counting = False


def num_registrations() -> int:
    """How many parameters were given to modules in this process so far; it grows when any module changes."""
    return _num_registrations


def _count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    global _num_registrations
    _num_registrations += 1


def start() -> None:
    """Begin to count.  The hook is on all modules of the process, so it waits for the first wrapper."""
    global _is_counting
    if not _is_counting:
        _is_counting = True
        register_module_parameter_registration_hook(_count)
