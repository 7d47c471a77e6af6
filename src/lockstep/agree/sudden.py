"""An end without Python's own: who wants to hear the error that a process is about to leave with."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

# Called with the error, in whichever thread found it; a launcher's rank leaves its last words this way.
listeners: list[Callable[[BaseException], None]] = []


def leave(error: BaseException, status: int = 1) -> None:
    """End this process now, from any thread, where its main thread cannot be reached to raise ``error`` in it."""
    for listener in listeners:
        with contextlib.suppress(Exception):
            listener(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
