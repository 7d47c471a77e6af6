"""Under distributed autograd (RPC), gradients live in a context instead of ``.grad``.

That engine calls only hooks that sit on the accumulator node, so inside a context the nodes get hooks too; gradients
are taken from the context, reduced by the same window, and written back into it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed.autograd as dist_autograd

from lockstep import torch_private
from lockstep.engine.bucket import Slot
from lockstep.engine.eager import EagerBackward


class DistAutogradBridge:
    """Feeds gradients of a distributed autograd context to the eager caller."""

    def __init__(self, backward: EagerBackward) -> None:
        self._backward = backward
        self._nodes: list[Any] = []  # a node lives only as long as someone holds it
        self._context: int | None = None

    def attach_in_context(self) -> None:
        """In a forward: hook the accumulator nodes, once, if this thread is in a distributed autograd context."""
        self._context = torch_private.current_dist_autograd_context()
        if self._context is None or self._nodes:
            return
        for slot in self._backward.reducer.slots:
            node = torch_private.gradient_accumulator(slot.parameter)
            assert node is not None
            node.register_hook(partial(self._on_node, slot))
            self._nodes.append(node)

    def _on_node(self, slot: Slot, *_: object) -> None:
        """The backward may run in another thread than the forward, so the forward's context is remembered."""
        if self._context is None:
            return
        gradients = dist_autograd.get_gradients(self._context)  # type: ignore[attr-defined]
        if slot.parameter in gradients:
            self._backward.on_context_gradient(slot, gradients)
