"""Whether the process of another rank still lives, where this can be asked: on the same host, in the same namespace."""

from __future__ import annotations

import json
import os
from pathlib import Path


def card() -> str:
    """Describe this process so that others can look for it."""
    return json.dumps([_namespace(), os.getpid(), _start_of(os.getpid())])


def is_dead(text: str | None) -> bool:
    """Tell whether the process with this card is known to have ended; False where it cannot be known."""
    if not text:
        return False
    try:
        namespace, pid, start = json.loads(text)
        if not namespace or namespace != _namespace() or start is None:
            return False
        return _start_of(int(pid)) != start
    except (ValueError, TypeError):
        return False


def _namespace() -> str:
    """Name the set of processes that this one can see; empty where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return when a process began, which tells it from another with the same number; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
