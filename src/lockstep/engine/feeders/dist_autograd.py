"""Distributed autograd (RPC): gradients live in a context instead of ``.grad``.

That engine calls only hooks that sit on the accumulator node, so inside a context the nodes get hooks too; gradients
are taken from the context, reduced by the same window, and written back into it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed.autograd as dist_autograd

from lockstep import torch_private
from lockstep.engine.bucket import Slot
from lockstep.engine.step import SyncStep


class DistAutogradFeeder:
    """Tells a step of gradients that arrive in a distributed autograd context."""

    def __init__(self, step: SyncStep) -> None:
        self._step = step
        self._nodes: dict[int, Any] = {}  # by slot; a node lives only as long as someone holds it
        self._context: int | None = None

    def attach_in_context(self) -> None:
        """In a forward: hook the accumulator nodes, once each, if this thread is in a distributed autograd context."""
        self._context = torch_private.current_dist_autograd_context()
        if self._context is None:
            return
        slots = {id(slot): slot for slot in self._step.reducer.slots}
        self._nodes = {key: node for key, node in self._nodes.items() if key in slots}
        for key, slot in slots.items():
            if key not in self._nodes:
                node = torch_private.gradient_accumulator(slot.parameter)
                if node is not None:
                    node.register_hook(partial(self._on_node, slot))
                    self._nodes[key] = node

    @torch_private.leave_to_python
    def _on_node(self, slot: Slot, *_: object) -> None:
        """The backward may run in another thread than the forward, so the forward's context is remembered."""
        if self._context is None:
            return
        gradients = dist_autograd.get_gradients(self._context)  # type: ignore[attr-defined]
        if slot.parameter in gradients:
            self._step.intake.context_gradients = gradients
            self._step.intake.is_plain = False
            self._step.intake.deliver(slot)
