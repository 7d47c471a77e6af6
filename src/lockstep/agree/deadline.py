"""How long a rank may give no sign of life; whoever goes by it lets the launcher know, which has one of its own."""

from __future__ import annotations

import contextlib
import os

from lockstep import settings


class _Told:
    """What this process has told its launcher."""

    seconds: float | None = None


def silence_limit() -> float:
    """Read the deadline, which a program may have set for itself only, and leave word of it for the launcher."""
    seconds = settings.heartbeat_timeout()
    folder = settings.run_folder()
    if folder is not None and seconds != _Told.seconds:
        with contextlib.suppress(OSError, KeyError, ValueError):
            settings.silence_mark(folder, int(os.environ["RANK"])).write_text(repr(seconds))
            _Told.seconds = seconds
    return seconds
