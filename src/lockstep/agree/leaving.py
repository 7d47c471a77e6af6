"""Leave when it is time to: a process whose group is broken does not wait for what is still under way in it.

When a group of gloo is destroyed it waits for every collective that was started.  One that a peer never comes to would
hold the process in ``destroy_process_group()``, or at its very end, after Python has let go of everything: for as long
as that peer lives.  So groups are kept for ever once a wait has failed, and the C library ends the process after
Python's own end (handlers of ``atexit`` have run, streams are flushed, the status is the one that was meant) and before
the end of torch's threads, which would wait, or abort the process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

from lockstep import torch_private

logger = logging.getLogger("lockstep")

_kept: list[Any] = []
_lock = threading.Lock()


class _Exit:
    """Whether the C library was told."""

    is_arranged = False


def has_abandoned() -> bool:
    """Whether a wait has failed in this process, whatever came of it: something may be under way for ever."""
    return bool(_kept)


def abandon_groups(*, at_the_end: bool = False) -> None:
    """Wait for nothing of the groups that there are now, neither when they are destroyed nor at the end.

    ``at_the_end`` of the process it is arranged once more: what torch registered since would come first, and wait.
    """
    with _lock:
        for group in torch_private.living_groups():
            if not any(group is kept for kept in _kept):
                _kept.append(group)
                # At the end Python empties this list too, and would destroy the group.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if at_the_end or not _Exit.is_arranged:
            _Exit.is_arranged = True
            _arrange_exit()


def _arrange_exit() -> None:
    """Let ``exit(status)`` flush the streams of C and go; where C has no such function, torch ends as it does."""
    try:
        libc = ctypes.CDLL(None)
        on_exit, at_exit = libc.on_exit, libc.__cxa_atexit
        leave, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fflush))
    except (OSError, AttributeError):
        logger.debug("this C library has no on_exit")
        return
    on_exit.argtypes = [ctypes.c_void_p] * 2
    at_exit.argtypes = [ctypes.c_void_p] * 3
    # What is registered last is called first.
    on_exit(leave, None)
    at_exit(flush, None, None)
