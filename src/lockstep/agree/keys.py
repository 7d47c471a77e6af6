"""Keys on the job's store: which store ranks share, how names of keys begin, how to read one without waiting."""

from __future__ import annotations

import os
from typing import Any

from lockstep import torch_private

_NOTHING = "\x00"


def shared_store(process_group: Any) -> Any | None:
    """The store that the ranks of a group share; None where there is none, or only one rank."""
    if process_group.size() == 1 or torch_private.is_pretended(process_group):
        return None
    try:
        return torch_private.default_store()
    except (RuntimeError, ValueError):
        return None  # a group that was not made by init_process_group brings no store along


def full_name(place: str) -> str:
    """A name on the store for this attempt alone: a launcher may keep its store over restarts."""
    return f"lockstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{place}"


def read(store: Any, key: str) -> str | None:
    """The value of ``key``, None if it is missing or empty; never waits, as ``get`` does for a key that is missing."""
    value = store.compare_set(key, _NOTHING, _NOTHING)
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return None if text == _NOTHING else text or None
