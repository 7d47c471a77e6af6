"""Uneven inputs: what the wrapper does under ``join()``, where a rank that has run out of data mirrors the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from lockstep import errors
from lockstep.agree.watch import Watch
from lockstep.engine.join import MirrorHook
from lockstep.engine.module_state import sync_module_states
from lockstep.engine.step import State, SyncStep


class UnevenInputs(Joinable):
    """Mixed into the wrapper."""

    module: nn.Module
    step: SyncStep
    process_group: Any
    device: torch.device
    forward_sync_buffers: bool
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    parameters_to_ignore: set[str]
    broadcast_bucket_size: int
    _watch: Watch
    _distributed_rank: int
    _authoritative_rank: int
    _divide_by_initial_world_size: bool
    _join_decided_sync: bool
    _join_decision_used: bool
    _confirm_plan: Callable[[], None]
    _check_sync_bufs_pre_fwd: Callable[[], bool]
    _sync_module_buffers: Callable[[int], None]
    _find_common_rank: Callable[[int, bool], int]

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: ranks that run out of data mirror the others' collectives until all are done."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> MirrorHook:
        return MirrorHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _notify_join(self) -> None:
        work = Join.notify_join_context(self)
        self.step.reducer.mean.divisor = None
        if self._join_config.enable and not self._divide_by_initial_world_size:
            assert work is not None, "dividing by the active ranks needs this wrapper first in the Join context"
            (num_active,) = work.get_future().wait()
            self.step.reducer.mean.divisor = float(num_active.item())

    def mirror_forward(self) -> None:
        """As a rank without data: take part in the collectives of one forward of the others."""
        # Zeros whatever they are divided by; but the operation must be the same as on the other ranks.
        world = float(self.process_group.size())
        self.step.reducer.mean.divisor = None if self._divide_by_initial_world_size else world
        self._confirm_plan()
        if self._check_sync_bufs_pre_fwd():
            self._sync_module_buffers(self._find_common_rank(self._distributed_rank, False))

    def ask_whether_to_sync(self, *, has_joined: bool) -> bool:
        """Ranks with data tell those without whether this iteration's backward will synchronise."""
        mine = self.require_backward_grad_sync and not has_joined
        answer = torch.full((1,), float(mine), device=self.device)
        transport = self.step.reducer.transport
        flight = transport.start_all_reduce(answer, mean=False)
        if not has_joined:
            return self.require_backward_grad_sync
        transport.land(flight, "the question whether this iteration synchronises")
        # As on the other ranks: after an iteration without synchronisation, buffers are not synchronised either.
        self.require_forward_param_sync = bool(answer.item())
        return self.require_forward_param_sync

    def sync_final_model(self, is_last_joiner: bool) -> None:
        self.step.num_updates = 0  # ranks that ran out of data have made fewer
        self.step.has_fresh_gradients = False
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        sync_module_states(
            self.module,
            self.process_group,
            source=self._authoritative_rank,
            ignored=self.parameters_to_ignore,
            with_buffers=self.forward_sync_buffers,
            chunk_bytes=self.broadcast_bucket_size,
            watch=self._watch,
        )

    def _consume_join_decision(self) -> bool:
        """See [Note: when a pass synchronises] in engine/eager.py."""
        if self._join_decided_sync and self.step.state is not State.OPEN:
            if self._join_decision_used:
                raise errors.LockstepError(
                    "Under join() a forward can have one backward that synchronises: ranks that ran out of data mirror "
                    "one. Add the losses up and call backward once, or run the earlier ones inside no_sync()."
                )
            self._join_decision_used = True
        return self._join_decided_sync
