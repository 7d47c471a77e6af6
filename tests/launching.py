"""Run a command that launches ranks, with a hard limit, and leave nothing running.

Torch's launcher puts each rank into a session of its own, so a process group does not hold them all.  A
variable in the environment does: every descendant inherits it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "LOCKSTEP_TEST_RUN"
LOCKSTEP = [sys.executable, "-m", "lockstep.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
EXAMPLES = Path(__file__).parents[1] / "examples"
STARTUP = str(Path(__file__).with_name("startup"))

# Set by a launcher that runs this very test suite, or by a user; ranks started here must not see them.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_BACKEND")


# Short gloo jobs now and then abort after their last line, when C++ threads of torch are destroyed at exit. It was
# seen with torch's own class, and with no wrapper at all; such a run says nothing about us and is done once more.
TORN_DOWN_BY_TORCH = "terminate called without an active exception"


@dataclass(frozen=True)
class Finished:
    exit_code: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.strip()]

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\n--- stdout\n{self.output}\n--- stderr\n{self.errors}"


class Launch:
    """A running command; ``finish`` waits for it, and kills it and all that it started at the limit."""

    def __init__(
        self, command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.command = [str(word) for word in command]
        self.process = subprocess.Popen(
            self.command,
            cwd=cwd,
            env=self._environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        env["OMP_NUM_THREADS"] = "1"
        spec = importlib.util.find_spec("lockstep")
        assert spec is not None
        assert spec.origin is not None
        # A checkout that was not installed is found through the path that found it here.
        source = str(Path(spec.origin).parents[1])
        env["PYTHONPATH"] = os.pathsep.join([source, STARTUP, *filter(None, [env.get("PYTHONPATH")])])
        env["LOCKSTEP_REPORT_DIR"] = str(Path(tempfile.gettempdir()) / "lockstep-test-reports")
        env.update(extra)
        name, _, value = self.mark.partition("=")
        env[name] = value
        return env

    def finish(self, limit_s: float = 280) -> Finished:
        try:
            output, errors = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, errors = self.process.communicate()
            raise AssertionError(
                f"{' '.join(self.command)} ran longer than {limit_s:g} s\n"
                f"{Finished(self.process.returncode, output, errors)}"
            ) from None
        left = self._running(patience_s=120)
        self.kill()
        assert not left, f"{' '.join(self.command)} ended but left processes {left} running\n{output}\n{errors}"
        return Finished(self.process.returncode, output, errors)

    def kill(self) -> None:
        for pid in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _running(self, patience_s: float = 0) -> list[int]:
        """Processes that carry the mark, after giving those that are on their way out time to leave."""
        deadline = time.monotonic() + patience_s
        while (found := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _marked(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue  # it has ended, or belongs to someone else
        return found


def free_port() -> int:
    """A port to bind later: not one of those that the kernel hands out meanwhile, to any socket of any process."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(max(1024, lowest - 12_000), lowest)
    for port in [*random.SystemRandom().sample(below, min(200, len(below))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


def run_command(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = 280,
) -> Finished:
    done = Launch(command, cwd, env).finish(limit_s)
    if TORN_DOWN_BY_TORCH in done.errors:
        done = Launch(command, cwd, env).finish(limit_s)
    return done


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    return path
