"""Making artifacts in one process, for ranks that are not there: what ``lockstep precompile`` does while a script runs.

The script is the user's and trains as it always does, in a world whose collectives return at once.  After a few updates
of each of its steps, what was compiled is written, and the script is left.  What it computed means nothing: gradients
are those of one rank.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lockstep import torch_private
from lockstep.program.loading import file_name

_MOST_CAUGHT = 3
_MOST_MORE = 8  # updates that are waited for a first program


class Enough(BaseException):
    """Leaves the script: everything was written.  Not an ``Exception``, which a script may catch."""


@dataclass
class Made:
    """One file that was written."""

    path: Path
    digest: str
    explanation: str


@dataclass
class Precompiling:
    """What has been made so far in this process."""

    folder: Path
    num_updates: int
    made: dict[int, Made] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    leave: Callable[[], None] = lambda: None  # ends the process, where a script catches all that it is left by
    _num_left: int = 0
    _steps: list[Any] = field(default_factory=list)

    def enter(self, step: Any) -> None:
        """Note a step of the script when it is made: they are numbered as they are when artifacts are loaded."""
        self._steps.append(step)

    def after_update(self, step: Any) -> None:
        """Write the artifact of a step that has been trained long enough; leave the script after the last one."""
        if step.num_updates >= self.num_updates + (_MOST_MORE if step._waits_for_program else 0):
            self._write(step)
            if len(self.made) + len(self.failed) == len(self._steps):
                self._num_left += 1
                if self._num_left > _MOST_CAUGHT:
                    self.leave()
                raise Enough

    def end(self) -> None:
        """The script has ended by itself: write what there is."""
        for step in self._steps:
            self._write(step)

    def _write(self, step: Any) -> None:
        number = self._steps.index(step)
        if number in self.made or number in self.failed:
            return
        path = self.folder / file_name(number)
        try:
            digest = step.save(path)
        except (RuntimeError, OSError) as error:
            self.failed[number] = f"{error}\n{step.explain()}"
            return
        self.made[number] = Made(path, digest, str(step.explain()))


active: Precompiling | None = None


def begin(folder: Path, world: int, num_updates: int) -> Precompiling:
    """Let this process be rank 0 of a world that is not there, and write what its steps compile."""
    global active
    active = Precompiling(folder, num_updates)
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), 0)
    worlds = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world)
    launcher = {"GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "precompile"}
    launcher |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    for name, value in (ranks | worlds | launcher).items():
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    _pretend(world)
    return active


def _pretend(world: int) -> None:
    """Let all groups be of ranks that are not there, whatever backend and address are given: nobody would answer."""
    init, new = dist.init_process_group, dist.new_group
    options = torch_private.pretended_group_options(world)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(**options)

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name in ("group_desc", "sort_ranks")}
        return new(ranks, backend=options["backend"], **kept)

    names = {"init_process_group": init_process_group, "new_group": new_group, **_OF_OBJECTS}
    originals = {name: getattr(dist, name) for name in names}
    for module in list(sys.modules.values()):  # some of torch's modules have taken a name for their own
        if _is_of_torchs_distributed(module):
            known = vars(module)
            known.update({name: own for name, own in names.items() if known.get(name) is originals[name]})


def _is_of_torchs_distributed(module: Any) -> bool:
    if not isinstance(module, ModuleType):
        return False
    name = str(vars(module).get("__name__"))
    return name == "torch.distributed" or name.startswith("torch.distributed.")


# ---------------------------------------------------------------- objects

# Objects travel as bytes in tensors, of which those of other ranks would be whatever the memory held.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [copy.deepcopy(obj) for _ in object_gather_list]


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """What another rank would send is what this one has in its place."""


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _monitored_barrier(*args: Any, **kwargs: Any) -> None:
    """Everybody is here."""


_OF_OBJECTS: dict[str, Callable[..., None]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    "monitored_barrier": _monitored_barrier,
}
