"""Start the ranks of one attempt, with torchrun's environment, redirections and log files."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.utils.api import macros

from lockstep import settings
from lockstep.launch.inside import PARENT_FILE
from lockstep.launch.store import HostedStore


class CannotStart(Exception):
    """This machine does not let the job begin; the message says why, in a line."""


@dataclass(frozen=True)
class Program:
    """What every rank runs: torch's launch configuration, and a command."""

    config: Any
    entrypoint: str
    arguments: list[str]
    max_restarts: int
    run_id: str

    @property
    def world(self) -> int:
        return int(self.config.nproc_per_node)


class Started:
    """The processes of one attempt."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.processes: dict[int, subprocess.Popen[Any]] = {
            rank: handler.proc for rank, handler in context.subprocess_handlers.items()
        }
        self.host = socket.gethostname()

    def close(self) -> None:
        """Flush what is still on its way to log files; all processes have ended by now."""
        self._context.close()


def mark_of(folder: Path) -> str:
    """What the environment of a rank and of all its descendants contains."""
    return f"{settings.RUN_FOLDER.name}={folder}"


def start(program: Program, store: HostedStore, attempt: int, folder: Path) -> Started:
    """Start all ranks; ``folder`` is shared with them."""
    (folder / PARENT_FILE).write_text(str(os.getpid()))
    config = program.config
    template = config.log_line_prefix_template
    environments, arguments, prefixes = {}, {}, {}
    for rank in range(program.world):
        environments[rank] = _environment(program, store, attempt, folder, rank)
        arguments[rank] = tuple(macros.substitute(list(program.arguments), str(rank)))
        if template:
            prefixes[rank] = Template(template).safe_substitute(role_name=config.role, rank=rank, local_rank=rank)
    optional = {
        "numa_options": getattr(config, "numa_options", None),
        "duplicate_stdout_filters": getattr(config, "duplicate_stdout_filters", None),
        "duplicate_stderr_filters": getattr(config, "duplicate_stderr_filters", None),
    }
    known = inspect.signature(start_processes).parameters
    context = start_processes(
        name=config.role,
        entrypoint=program.entrypoint,
        args=arguments,
        envs=environments,
        logs_specs=config.logs_specs,
        log_line_prefixes=prefixes or None,
        start_method=config.start_method,
        **{name: value for name, value in optional.items() if name in known},
    )
    return Started(context)


def _environment(program: Program, store: HostedStore, attempt: int, folder: Path, rank: int) -> dict[str, str]:
    world = str(program.world)
    environment = {
        "RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": program.config.role,
        "LOCAL_WORLD_SIZE": world,
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": store.address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(program.max_restarts),
        "TORCHELASTIC_RUN_ID": program.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # all ranks are clients of the launcher's store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        settings.RUN_FOLDER.name: str(folder),
    }
    if getattr(program.config, "virtual_local_rank", False):
        # Each rank sees one device only, as its device 0.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = visible.split(",") if visible else [str(number) for number in range(program.world)]
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank]
        environment["LOCAL_RANK"] = "0"
    else:
        environment["LOCAL_RANK"] = str(rank)
    return environment
