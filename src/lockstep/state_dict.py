"""State dict keys across wrappers: plain names, ``module.`` and ``_orig_mod.`` in any order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

_COMPILED = "_orig_mod."
_WRAPPED = "module."


def unwrap(model: nn.Module) -> nn.Module:
    """The plain module inside any order of data-parallel wrapping and ``torch.compile``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def own_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of the plain model with the tensors it computes with, where a class would give whole copies."""
    plain = unwrap(model)
    giving: Any = (getattr(module, "giving_shards", None) for module in plain.modules())
    with next((found(plain) for found in giving if found is not None), nullcontext()):
        state: dict[str, Any] = plain.state_dict()
    return state


def plain_key(key: str) -> str:
    """``key`` without wrapper prefixes."""
    key = key.replace(_COMPILED, "")
    while key.startswith(_WRAPPED):
        key = key[len(_WRAPPED) :]
    return key


def rename_keys(state_dict: dict[str, Any], prefix: str, expected: set[str]) -> None:
    """Rename, in place, the keys under ``prefix`` to those in ``expected`` that mean the same tensor.

    A key that fits as it is stays; a name that could mean two tensors is an error, never a guess.
    """
    by_plain: dict[str, list[str]] = {}
    for key in expected:
        by_plain.setdefault(plain_key(key[len(prefix) :]), []).append(key)
    for key in [k for k in state_dict if k.startswith(prefix) and k not in expected]:
        targets = by_plain.get(plain_key(key[len(prefix) :]), [])
        if len(targets) > 1:
            raise KeyError(f"{key!r} could mean any of {sorted(targets)}; rename it to the one that is meant.")
        if targets:
            if targets[0] in state_dict:
                raise KeyError(f"{key!r} and {targets[0]!r} both name the same tensor; keep one of them.")
            state_dict[targets[0]] = state_dict.pop(key)
