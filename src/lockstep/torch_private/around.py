"""What stands around a step in torch itself: modes, hooks for all modules, the state of random numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


def global_hooks() -> tuple[Hashable, ...]:
    """The hooks on all modules, and on what autograd keeps: they can be set in public, but not seen.

    Each by its identity, as one may have no hash; they are kept by torch for as long as they are in use.
    """
    from torch.nn.modules import module

    hooks: list[Any] = [
        *module._global_forward_pre_hooks.values(),
        *module._global_forward_hooks.values(),
        *module._global_backward_pre_hooks.values(),
        *module._global_backward_hooks.values(),
        *(torch._C._autograd._top_saved_tensors_default_hooks(False) or ()),
    ]
    return tuple(map(id, hooks))


def modes_around() -> list[str]:
    """The modes that see every call or operator now, but for the one that says where new tensors are made."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes: list[Any] = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


_SEEDING = {
    "torch": ("set_rng_state", "manual_seed", "seed", "initial_seed"),
    "torch.random": ("set_rng_state", "manual_seed", "seed", "initial_seed"),
    "torch.cuda": ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"),
}


@contextmanager
def noting_seeds() -> Iterator[list[str]]:
    """Note the calls that set random numbers back, or elsewhere, or ask for their seed.

    torch's checkpoints do where they compute again.  Methods of a generator cannot be seen here: they are C.
    """
    noted: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for module, names in _SEEDING.items():
            for name in names:
                function = getattr(__import__(module, fromlist=[name]), name)
                stack.enter_context(patch(f"{module}.{name}", noting(name, function)))
        yield noted
