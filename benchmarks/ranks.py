"""Starts ranks as fresh processes, gives them a job, and brings the answers back.

The parent calls ``run_ranks("module:function", options, ...)``; each rank runs this same file as a script,
joins the process group and calls the function with its options. The function's answer must be JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class RanksFailed(RuntimeError):
    """A rank exited with an error or was too late; the message holds the end of its output."""


def run_ranks(
    job: str,
    options: dict[str, Any],
    num_ranks: int = 2,
    time_limit: float = 600,
    prefixes: list[list[str]] | None = None,
    master_address: str = "127.0.0.1",
    environments: list[dict[str, str]] | None = None,
    backend: str = "gloo",
    group_timeout: float = 300,
) -> list[Any]:
    """Each rank's answer, in rank order; ``prefixes`` run a rank inside something (a network namespace)."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                description = {
                    "job": job,
                    "options": options,
                    "folder": folder,
                    "backend": backend,
                    "timeout": group_timeout,
                }
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": master_address,
                    "MASTER_PORT": str(port),
                    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
                    **(environments[rank] if environments else {}),
                }
                command = [sys.executable, str(HERE / "ranks.py"), json.dumps(description)]
                with open(f"{folder}/log{rank}", "wb") as log:
                    children.append(
                        subprocess.Popen(
                            [*(prefixes[rank] if prefixes else []), *command],
                            env=environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            _wait(children, time_limit, folder)
            return [json.loads(Path(folder, f"answer{rank}").read_text()) for rank in range(num_ranks)]
        finally:
            for child in children:
                _kill(child)


def _wait(children: list[subprocess.Popen[bytes]], time_limit: float, folder: str) -> None:
    deadline = time.monotonic() + time_limit
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0)]
        if failed:
            time.sleep(1)  # let the others write down what they saw
            raise RanksFailed(f"rank {failed[0]} failed:\n{_log_end(folder, failed[0])}")
        if time.monotonic() > deadline:
            late = [rank for rank, child in enumerate(children) if child.poll() is None]
            ends = "\n".join(f"rank {rank}:\n{_log_end(folder, rank)}" for rank in late)
            raise RanksFailed(f"ranks {late} did not finish within {time_limit:.0f} s\n{ends}")
        time.sleep(0.05)
    failed = [rank for rank, child in enumerate(children) if child.returncode != 0]
    if failed:
        raise RanksFailed(f"rank {failed[0]} failed:\n{_log_end(folder, failed[0])}")


def _log_end(folder: str, rank: int) -> str:
    return Path(folder, f"log{rank}").read_text(errors="replace")[-3000:]


def _kill(child: subprocess.Popen[bytes]) -> None:
    # The whole session of the child: a prefix such as ``ip netns exec`` and what it runs.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    description = json.loads(sys.argv[1])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        description["backend"],
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=description["timeout"]),
    )
    module_name, function_name = description["job"].split(":")
    function = getattr(importlib.import_module(module_name), function_name)
    answer = function(**description["options"])
    Path(description["folder"], f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be letting go of Python objects, and abort a regular exit


if __name__ == "__main__":
    main()
