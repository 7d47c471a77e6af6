"""Making artifacts in one process, for ranks that are not there: what ``lockstep precompile`` does while a script runs.

The script is the user's and trains as it always does, in a world whose collectives return at once.  After a few updates
of each of its steps, what was compiled is written, and the script is left.  What it computed means nothing: gradients
are those of one rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep import torch_private
from lockstep.program.loading import file_name


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
    _steps: list[Any] = field(default_factory=list)

    def enter(self, step: Any) -> None:
        """Note a step of the script when it is made: they are numbered as they are when artifacts are loaded."""
        self._steps.append(step)

    def after_update(self, step: Any) -> None:
        """Write the artifact of a step that has been trained long enough; leave the script after the last one."""
        if step.num_updates >= self.num_updates:
            self._write(step)
            if len(self.made) + len(self.failed) == len(self._steps):
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
        except RuntimeError as error:
            self.failed[number] = f"{error}\n{step.explain()}"
            return
        self.made[number] = Made(path, digest, str(step.explain()))


active: Precompiling | None = None


def begin(folder: Path, world: int, num_updates: int) -> Precompiling:
    """Let this process be rank 0 of a world that is not there, and write what its steps compile."""
    global active
    active = Precompiling(folder, num_updates)
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()})
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

    for module in (dist, dist.distributed_c10d):
        vars(module).update(init_process_group=init_process_group, new_group=new_group)
