"""What the operating system knows of processes: states, whose they are, and who ran out of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def state_of(pid: int) -> str:
    """The state letter of a process (``T`` is stopped, ``Z`` ended); empty where it is not known."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process, or its cgroup is frozen."""
    return state_of(pid) in ("T", "t") or _is_frozen(pid)


def _is_frozen(pid: int) -> bool:
    # What is in force, also where it is a cgroup further up that was frozen.
    for path, kind in _cgroup_files(pid, "freezer", "freezer.state", "cgroup.events"):
        with contextlib.suppress(OSError):
            if ("FROZEN" if kind == "v1" else "frozen 1") in path.read_text().splitlines():
                return True
    return False


def marked(mark: str, besides: Iterable[int] = ()) -> list[int]:
    """Processes whose environment carries ``mark``, as all descendants of a rank do."""
    wanted, spared = os.fsencode(mark), {os.getpid(), *besides}
    found = []
    try:
        entries = list(PROC.iterdir())
    except OSError:  # there is none, or this process has all files open that it may
        entries = []
    for entry in entries:
        if entry.name.isdigit() and int(entry.name) not in spared:
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if wanted in variables and state_of(int(entry.name)) != "Z":
                    found.append(int(entry.name))
    return found


def send(pid: int, number: int, *, to_session: bool) -> None:
    """Send a signal to a process, or to the group that it leads; one that has gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if to_session:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def kill_marked(mark: str, besides: Iterable[int] = ()) -> list[int]:
    """End all processes that carry a mark; the ones that were there."""
    found = marked(mark, besides)
    for pid in found:
        send(pid, signal.SIGKILL, to_session=False)
    return found


OF_THE_MACHINE = "the memory of this machine"


def num_oom_kills(pid: int | str = "self") -> dict[str, int]:
    """How many processes were killed for want of memory so far, by the limit that they ran into.

    The machine's count has those of all cgroups on it, whoever's they are.
    """
    counts: dict[str, int] = {}
    files = _cgroup_files(pid, "memory", "memory.oom_control", "memory.events.local")  # without the cgroups below it
    for path, _ in files or _cgroup_files(pid, "memory", "memory.oom_control", "memory.events"):
        _add_count(counts, path, f"the memory limit of its cgroup{_limit_beside(path)}")
    _add_count(counts, PROC / "vmstat", OF_THE_MACHINE)
    return counts


def _add_count(counts: dict[str, int], path: Path, name: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            word, _, value = line.partition(" ")
            if word == "oom_kill":
                counts[name] = int(value)


def _limit_beside(path: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return f" ({int((path.parent / name).read_text()) / 2**20:,.0f} MiB)"
    return ""


def _cgroup_files(pid: int | str, controller: str, v1: str, v2: str) -> list[tuple[Path, str]]:
    """Files of the cgroup of a process, where they exist: one per version of cgroups that is mounted."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        place = place.lstrip("/")
        if controllers == "":
            candidates = [(_CGROUPS / place / v2, "v2"), (_CGROUPS / "unified" / place / v2, "v2")]
        elif controller in controllers.split(","):
            # Inside a container the path is the host's, and the container's own cgroup is at the root.
            candidates = [(_CGROUPS / controller / place / v1, "v1"), (_CGROUPS / controller / v1, "v1")]
        else:
            continue
        found += [(path, kind) for path, kind in candidates if path.exists()][:1]
    return found


def die_with_parent() -> None:
    """Let the kernel end this process when the thread that started it has gone; Linux only."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
