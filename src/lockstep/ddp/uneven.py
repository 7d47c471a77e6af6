"""Uneven inputs: what the wrapper does under ``join()``, where a rank that has run out of data mirrors the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from lockstep import errors
from lockstep.ddp.buffers import BufferSync
from lockstep.ddp.peers import Peers
from lockstep.ddp.plan_keeper import PlanKeeper
from lockstep.engine.join import MirrorHook
from lockstep.engine.module_state import sync_module_states
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep
from lockstep.observe.logging_data import LoggingData


class UnevenInputs(Joinable):
    """Takes part in a join context for one wrapper, which hands its own part of it on to here."""

    def __init__(
        self,
        module: nn.Module,
        ignored: set[str],
        device: torch.device,
        step: SyncStep,
        peers: Peers,
        keeper: PlanKeeper,
        buffers: BufferSync,
        logger: LoggingData,
    ) -> None:
        super().__init__()
        self._module = module
        self._ignored = ignored
        self._device = device
        self.step = step
        self._peers = peers
        self._keeper = keeper
        self._buffers = buffers
        self.logger = logger
        self._divide_by_initial_world_size = True  # MirrorHook sets it
        self._syncs = True
        self._decision_is_used = False
        self._awaits_backward = False  # a forward was told of whose backward has not begun
        self._notice: Any = None  # the count of ranks that have data, as of the last forward
        self.authoritative_rank = 0

    # ---------------------------------------------------------------- as a member of the join context

    def join_hook(self, **kwargs: Any) -> MirrorHook:
        self._awaits_backward, self._notice = False, None
        return MirrorHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return self._peers.group

    @property
    def is_on(self) -> bool:
        return self._join_config.enable

    # ---------------------------------------------------------------- as a rank that has data

    def notify(self) -> None:
        """Tell the context that a forward begins; learn by how many ranks to divide."""
        if self.is_on and self.step.skips_unused_buckets:
            raise RuntimeError(
                "skip_all_reduce_unused_params=True does not go with join(): a rank that has run out of data takes "
                "part in every bucket, and cannot know which ones the others leave out."
            )
        if self.is_on and self._awaits_backward:
            self._require_all_have_data()
        work = self._notice = Join.notify_join_context(self)
        self.step.reducer.mean.divisor = None
        if self.is_on and not self._divide_by_initial_world_size:
            assert work is not None, "dividing by the active ranks needs this wrapper first in the Join context"
            self._wait(work, "the count of ranks that have data")
            (num_active,) = work.get_future().wait()
            self.step.reducer.mean.divisor = float(num_active.item())

    def _require_all_have_data(self) -> None:
        """Raise in a second forward before a backward, where ranks without data already mirror that backward."""
        if self._notice is None:
            return  # another member of the context notifies
        self._wait(self._notice, "the count of ranks that have data")
        (num_active,) = self._notice.get_future().wait()
        if int(num_active.item()) < self._peers.world:
            with self.step.telling_peers():
                raise errors.LockstepError(
                    "Under join(), once a rank has run out of data, every forward must be followed by its backward: "
                    "ranks without data mirror the two together. This forward came before the backward of the one "
                    "before it. Put the inputs of both into one forward; run one that is not trained under "
                    "torch.no_grad(), and not between a forward and its backward."
                )

    def decide(self, wants_sync: bool) -> None:
        """Tell ranks without data whether this iteration's backward will synchronise; without gradients none will."""
        if self.is_on:
            trains = torch.is_grad_enabled()
            self._tell_whether_to_sync(wants_sync and trains)
            if trains:
                self._syncs = self._awaits_backward = wants_sync
                self._decision_is_used = False

    def consume_decision(self) -> bool:
        """See [Note: when a pass synchronises] in engine/step.py."""
        if self._syncs and self.step.state is not State.OPEN:
            if self._decision_is_used:
                raise errors.LockstepError(
                    "Under join() a forward can have one backward that synchronises: ranks that ran out of data mirror "
                    "one. Add the losses up and call backward once, or run the earlier ones inside no_sync()."
                )
            self._decision_is_used = True
        self._awaits_backward = False
        return self._syncs

    def buffer_source(self) -> int:
        """Choose whose buffers all take: rank 0 may have run out of data and hold stale ones."""
        return self.find_common_rank(self._peers.rank, True) if self.is_on else 0

    def find_common_rank(self, rank: int, condition: bool) -> int:
        """Find the highest rank for which ``condition`` holds."""
        answer = torch.tensor([rank if condition else -1], device=self._device)
        transport = self.step.reducer.transport
        transport.land(transport.start_max(answer), "the search for a rank that has data")
        found = int(answer.item())
        assert found >= 0, "no rank met the condition"
        return found

    # ---------------------------------------------------------------- as a rank without data, see engine/join.py

    def wait_for_ranks_with_data(self, work: Any) -> None:
        """Wait until the ranks that have data begin their next iteration, or have none any more."""
        self._wait(work, "join(), without data, for the next iteration of the ranks that have some")

    def _wait(self, work: Any, where: str) -> None:
        """Wait for a collective of torch's own context as for one of ours."""
        transport = self.step.reducer.transport
        if transport.blocks_host(self._device):
            transport.watch.wait_work(work, lambda: where)
        else:
            work.wait()

    def mirror_forward(self) -> None:
        """Take part in the collectives of one forward of the others."""
        # Zeros whatever they are divided by; but the operation must be the same as on the other ranks.
        world = float(self._peers.world)
        self.step.reducer.mean.divisor = None if self._divide_by_initial_world_size else world
        self._keeper.confirm()
        if self._buffers.will_sync_before:
            self._buffers.exchange(self.find_common_rank(self._peers.rank, False))

    def ask_whether_to_sync(self) -> bool:
        """Ask ranks with data whether this iteration's backward will synchronise."""
        flight, answer = self._tell_whether_to_sync(False)
        self.step.reducer.transport.land(flight, "the question whether this iteration synchronises")
        # As on the other ranks: after an iteration without synchronisation, buffers are not synchronised either.
        self._buffers.is_due = bool(answer.item())
        return self._buffers.is_due

    def _tell_whether_to_sync(self, mine: bool) -> tuple[Any, torch.Tensor]:
        answer = torch.full((1,), float(mine), device=self._device)
        return self.step.reducer.transport.start_all_reduce(answer, mean=False), answer

    def sync_final_model(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that trained to the end."""
        self.step.num_updates = 0  # ranks that ran out of data have made fewer
        self.step.has_fresh_gradients = False
        self.step.drift.forget()
        self.authoritative_rank = self.find_common_rank(self._peers.rank, is_last_joiner)
        sync_module_states(
            self._module,
            self._peers.group,
            source=self.authoritative_rank,
            ignored=self._ignored,
            with_buffers=self._buffers.syncs_in_forward,
            chunk_bytes=self._buffers.chunk_bytes,
            watch=self._peers.watch,
        )
