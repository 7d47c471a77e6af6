"""What of a model is data parallel: who keeps gradients local in a micro-step, who has windows to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.ddp import DistributedDataParallel
from lockstep.shard import ShardedModule
from lockstep.shard.added import Added
from lockstep.shard.mesh import whole_group


class Parallel:
    """The data-parallel wrappers in one model, none for a plain one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        modules = list(model.modules())
        self.wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self.sharded: list[Any] = _outermost(modules)
        self.foreign = [
            m
            for m in modules
            if isinstance(m, nn.parallel.DistributedDataParallel) and not isinstance(m, DistributedDataParallel)
        ]

    @contextmanager
    def local(self) -> Iterator[None]:
        """Add gradients up on this rank alone: every micro-step but the last."""
        with ExitStack() as stack:
            for part in (*self.wrappers, *self.foreign):
                stack.enter_context(part.no_sync())
            for module in self.sharded:
                stack.enter_context(Added.no_sync(module))
            yield

    @property
    def steps(self) -> list[Any]:
        """Those that reduce gradients; of a sharded model, which makes them when it is first used, too."""
        sharded = [step for root in self.roots for step in root.steps]
        return [*(wrapper.step for wrapper in self.wrappers), *sharded]

    @property
    def roots(self) -> list[Any]:
        """The sharded models, with all that they are made of."""
        return [module._lockstep_root for module in self.sharded]

    @property
    def is_joined(self) -> bool:
        """Whether inputs may be uneven now: inside ``join()``."""
        return any(wrapper._parts.uneven.is_on for wrapper in self.wrappers)

    @property
    def meets_in_micro_steps(self) -> bool:
        """Whether ranks exchange something in every micro-step, all of them: a sharded model gathers in each."""
        return bool(self.sharded) and not any(module._lockstep_root.attendance.is_joining for module in self.sharded)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def rank(self) -> int:
        """Which of the ranks that train this model together this one is."""
        for wrapper in self.wrappers:
            return int(wrapper._peers.rank)
        for sharded in self.sharded:
            return int(whole_group(sharded._lockstep_unit.mesh).rank())
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def drop_local_gradients(self) -> None:
        """Forget what sharded models have added up in whole gradients, which no shard's ``.grad`` has yet."""
        for module in self.sharded:
            module._lockstep_root.drop_local_gradients(module._lockstep_units())

    def reset(self) -> None:
        """Forget a window that was under way on this rank, after an attempt that others know nothing of."""
        for wrapper in self.wrappers:
            wrapper.step.reset()
            wrapper._parts.precision.restore()
        for root in self.roots:
            root.drop_attempt()


def _outermost(modules: list[nn.Module]) -> list[Any]:
    """The sharded modules that are in no other: their ``no_sync`` is for all that is inside."""
    inside: set[int] = set()
    found = []
    for module in modules:
        if isinstance(module, ShardedModule) and id(module) not in inside:
            found.append(module)
            inside |= {id(m) for m in module.modules()}  # type: ignore[attr-defined]
    return found
