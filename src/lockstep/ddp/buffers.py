"""Buffers in the forward: which ones are made equal, when, and by whom (a broadcast, or a hook of the user's)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.ddp.peers import Peers
from lockstep.engine.module_state import broadcast_tensors
from lockstep.engine.step import SyncStep


@dataclass
class BufferHook:
    """A hook that synchronises buffers in place of the broadcast."""

    hook: Callable[..., Any]
    state: Any
    location: Any


class BufferSync:
    """The buffers of one module."""

    def __init__(
        self,
        module: nn.Module,
        ignored: set[str],
        step: SyncStep,
        peers: Peers,
        *,
        chunk_bytes: int,
        syncs_in_forward: bool,
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._step = step
        self._peers = peers
        self.chunk_bytes = chunk_bytes
        self.syncs_in_forward = syncs_in_forward
        # After an iteration that did not synchronise, buffers are as they were.
        self.is_due = True
        self.hook: BufferHook | None = None
        self.find()

    def find(self) -> None:
        """Look the buffers up anew: modules may replace theirs at any time."""
        self.named: dict[str, Tensor] = {n: b for n, b in self._module.named_buffers() if n not in self._ignored}

    @property
    def all(self) -> list[Tensor]:
        return list(self.named.values())

    # ---------------------------------------------------------------- when

    @property
    def will_sync(self) -> bool:
        return self.is_due and self.syncs_in_forward and len(self.named) > 0

    @property
    def will_sync_before(self) -> bool:
        return self.will_sync and not self._comes_after

    @property
    def will_sync_after(self) -> bool:
        return self.will_sync and self._comes_after

    @property
    def _comes_after(self) -> bool:
        return self.hook is not None and self.hook.location.name == "POST_FORWARD"

    # ---------------------------------------------------------------- how

    def sync(self, source: int) -> None:
        """Find the buffers, and give everyone those of rank ``source``."""
        with torch.no_grad():
            self.find()
            with torch_private.preserve_version_counter(self.all):
                self.exchange(source)

    def exchange(self, source: int) -> None:
        """Run the hook, or else broadcast from rank ``source``."""
        if self.hook is None:
            self.broadcast(source=source)
            return
        futures = self.hook.hook(self.hook.state, self.named)
        if futures is not None:
            self._step.add_post_backward_futures(futures)

    def broadcast(
        self, tensors: Iterable[Tensor] | None = None, chunk_bytes: int | None = None, source: int = 0
    ) -> None:
        """Send tensors (the buffers) from rank ``source`` to all."""
        broadcast_tensors(
            self.all if tensors is None else tensors,
            self._peers.group,
            source,
            self.chunk_bytes if chunk_bytes is None else chunk_bytes,
            self._peers.watch,
        )

    def use_hook(self, state: Any, hook: Callable[..., Any], location: Any) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise from now on."""
        if not callable(hook):
            raise TypeError(f"A buffer communication hook must be callable, got {type(hook).__name__}.")
        self.hook = BufferHook(hook, state, location)
