"""What is compared: torch's DDP, lockstep's, and an earlier lockstep's, by name, through the same code.

A subject is a wrapper with its options. ``alone`` wraps nothing (compute without data parallel).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

ROOT = Path(__file__).resolve().parents[1]
BEFORE_FOLDER = "BENCHMARKS_BEFORE"  # the environment variable by which ranks find the earlier version


def lockstep_ddp() -> Callable[..., nn.Module]:
    """Lockstep's class, from the installed package or from this checkout."""
    try:
        lockstep = importlib.import_module("lockstep")
    except ModuleNotFoundError:
        sys.path.insert(0, str(ROOT / "src"))
        lockstep = importlib.import_module("lockstep")
    return lockstep.DistributedDataParallel


def lockstep_hooks() -> Any:
    try:
        return importlib.import_module("lockstep.hooks")
    except ModuleNotFoundError:
        sys.path.insert(0, str(ROOT / "src"))
        return importlib.import_module("lockstep.hooks")


def before_ddp() -> Callable[..., nn.Module]:
    """The class of an earlier version, from the folder that before.py has written."""
    folder = os.environ.get(BEFORE_FOLDER)
    if folder is None:
        raise ModuleNotFoundError(f"no earlier version is here: {BEFORE_FOLDER} is not set (see before.py)")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("lockstep_before").DistributedDataParallel


@dataclass(frozen=True)
class Subject:
    name: str
    wrapper: str
    options: dict[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.wrapper == "alone":
            return module
        wrapper = WRAPPERS[self.wrapper]()
        return wrapper(module, **self.options)


WRAPPERS: dict[str, Callable[[], Callable[..., nn.Module]]] = {
    "torch": lambda: TorchDDP,
    "lockstep": lockstep_ddp,
    "before": before_ddp,
}
COMMUNICATION_ALONE = "communication alone"  # not a subject: the all-reduce of all gradients at once
ALONE = Subject("compute alone", "alone")
TORCH_DEFAULT = Subject("torch default", "torch")
TORCH_VIEW = Subject("torch view", "torch", {"gradient_as_bucket_view": True})
LOCKSTEP_DEFAULT = Subject("lockstep default", "lockstep")
BEFORE_DEFAULT = Subject("before default", "before")
LOCKSTEP_VIEW = Subject("lockstep view", "lockstep", {"gradient_as_bucket_view": True})

# torch's settings that change its speed: the bucket size, views instead of copies, and a fixed graph.
TORCH_GRID = [
    TORCH_VIEW,
    *(
        Subject(f"torch {cap} MiB view", "torch", {"bucket_cap_mb": cap, "gradient_as_bucket_view": True})
        for cap in (1, 4)
    ),
    *(
        Subject(
            f"torch {cap} MiB view static",
            "torch",
            {"bucket_cap_mb": cap, "gradient_as_bucket_view": True, "static_graph": True},
        )
        for cap in (1, 4, 25)
    ),
]
LOCKSTEP_GRID = [
    LOCKSTEP_VIEW,
    *(Subject(f"lockstep {cap} MiB", "lockstep", {"bucket_cap_mb": cap}) for cap in (1, 4)),
    *(
        Subject(f"lockstep {cap} MiB view", "lockstep", {"bucket_cap_mb": cap, "gradient_as_bucket_view": True})
        for cap in (1, 4)
    ),
]
BY_NAME = {s.name: s for s in [ALONE, TORCH_DEFAULT, LOCKSTEP_DEFAULT, BEFORE_DEFAULT, *TORCH_GRID, *LOCKSTEP_GRID]}


def lockstep_is_here() -> str | None:
    """None when lockstep can be measured, otherwise why not."""
    try:
        lockstep_ddp()
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
