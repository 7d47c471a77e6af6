"""``lockstep env``: versions, and what is usable on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lockstep.version import __version__

__all__ = ["collect", "is_tested_torch", "print_json", "print_tables"]

# The oldest and the newest torch release this version was run on.
TESTED_TORCH = ("2.11", "2.13")

PACKAGES = ("numpy", "rich", "typer", "safetensors", "transformers", "accelerate", "lightning")

VARIABLE_PREFIXES = ("LOCKSTEP_", "TORCH_", "TORCHELASTIC_", "PET_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_")
VARIABLE_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def collect() -> dict[str, Any]:
    """Everything ``lockstep env`` knows, as plain data."""
    return {
        "versions": _versions(),
        "torch_tested": {
            "from": TESTED_TORCH[0],
            "to": TESTED_TORCH[1],
            "inside": is_tested_torch(torch.__version__),
        },
        "backends": _backends(),
        "gpus": _gpus(),
        "cores": {"in_machine": os.cpu_count(), "usable": _num_usable_cores()},
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _is_relevant(name)},
    }


def is_tested_torch(version: str) -> bool:
    """Whether a torch version such as ``2.13.0+cpu`` lies in the range that was tested."""
    oldest, newest = (_release(v) for v in TESTED_TORCH)
    return oldest <= _release(version) <= newest


def print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=2))


def print_tables(facts: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    tested = facts["torch_tested"]
    range_text = f"{tested['from']} to {tested['to']}"
    verdict = "[green]in the tested range" if tested["inside"] else "[yellow]outside the tested range"

    machine = _table("what", "value")
    for name, version in facts["versions"].items():
        note = f"  {verdict} ({range_text})[/]" if name == "torch" else ""
        machine.add_row(name, f"{version}{note}" if version else "[dim]none")
    machine.add_row("cores", f"{facts['cores']['usable']} usable of {facts['cores']['in_machine']}")
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in facts["gpus"]]
    machine.add_row("GPUs", "\n".join(gpus) or "none")
    console.print(machine)

    backends = _table("backend", "usable", "why")
    for name, state in facts["backends"].items():
        backends.add_row(name, "[green]yes" if state["usable"] else "[yellow]no", state["why"])
    console.print(backends)

    if facts["variables"]:
        variables = _table("variable", "value")
        for name, value in facts["variables"].items():
            variables.add_row(name, value)
        console.print(variables)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA in torch": torch.version.cuda,
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _backends() -> dict[str, dict[str, Any]]:
    return {
        "gloo": _gloo_state(),
        "nccl": _built_and("nccl", dist.is_nccl_available(), torch.cuda.is_available(), "no GPU is visible"),
        "mpi": _built_and("mpi", dist.is_mpi_available(), True, ""),
        "ucc": _built_and("ucc", dist.is_ucc_available(), True, ""),
    }


def _built_and(name: str, built: bool, usable: bool, otherwise: str) -> dict[str, Any]:
    if not built:
        return {"usable": False, "why": f"this torch was built without {name}"}
    return {"usable": usable, "why": "built into this torch" if usable else otherwise}


def _gloo_state() -> dict[str, Any]:
    """Gloo can be built in and still fail, for example where the host name has no address; so it is tried."""
    if not dist.is_gloo_available():
        return {"usable": False, "why": "this torch was built without gloo"}
    if dist.is_initialized():
        return {"usable": True, "why": "built into this torch"}
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except Exception as error:
        return {"usable": False, "why": f"an all-reduce with one rank failed: {error}"}
    return {"usable": True, "why": "an all-reduce with one rank worked"}


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)})
    return gpus


def _num_usable_cores() -> int:
    """Cores this process may run on, which in a container is often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_relevant(name: str) -> bool:
    return name in VARIABLE_NAMES or name.startswith(VARIABLE_PREFIXES)
