"""Whether the process of another rank still lives, where this can be asked: on the same host, in the same namespace."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """A process as others can look for it; what they write about themselves is believed only in this form."""

    namespace: str
    pid: int
    start: str | None
    host: str

    @property
    def is_visible(self) -> bool:
        """Whether this process can look for it: the same host, the same namespace."""
        return bool(self.namespace) and self.start is not None and self.namespace == _namespace()

    @property
    def is_dead(self) -> bool:
        """Whether it is known to have ended; False where it cannot be known."""
        return self.is_visible and _start_of(self.pid) != self.start

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to stand still (SIGSTOP, a debugger, a frozen cgroup)."""
        return self.is_visible and not self.is_dead and _state_of(self.pid) in ("T", "t")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """Describe this process so that others can look for it."""
    return Process(_namespace(), os.getpid(), _start_of(os.getpid()), socket.gethostname()[:200])


def read_process(value: Any) -> Process | None:
    """Read a description that another rank wrote; None where it is not one."""
    if not isinstance(value, dict):
        return None
    namespace, pid, start, host = (value.get(name) for name in ("namespace", "pid", "start", "host"))
    if not (isinstance(namespace, str) and isinstance(host, str) and isinstance(start, str | None)):
        return None
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 1 << 31:
        return None
    return Process(namespace, pid, start, host[:200])


def card() -> str:
    """Describe this process in a line of text."""
    return json.dumps(asdict(this_process()))


def owner_of(text: str | None) -> Process | None:
    """Read such a line; None where there is none, or it is not one."""
    try:
        return read_process(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        return None


def is_dead(text: str | None) -> bool:
    """Tell whether the process with this card is known to have ended; False where it cannot be known."""
    process = owner_of(text)
    return process is not None and process.is_dead


def is_standing_still(pid: int) -> bool:
    """Tell whether a process of this host is known to stand still (SIGSTOP, a debugger)."""
    return _state_of(pid) in ("T", "t")


def _namespace() -> str:
    """Name the set of processes that this one can see; empty where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _state_of(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _start_of(pid: int) -> str | None:
    """Return when a process began, which tells it from another with the same number; None if it has ended."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else fields[19]
