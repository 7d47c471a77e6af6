"""Notices that some module somewhere got a new parameter, so that wrappers know when to look at theirs again."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_num_registrations = 0


def num_registrations() -> int:
    """How many parameters were given to modules in this process so far; it grows when any module changes."""
    return _num_registrations


def _count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    global _num_registrations
    _num_registrations += 1


register_module_parameter_registration_hook(_count)
