"""The two operators that a compiled backward calls: ``launch`` and ``collect``.

    launch(grads, parameters) -> results   the gradients of one bucket, side by side in one buffer that is on its way
    collect(firsts)                        wait until the buffers that begin with these have arrived

They are opaque to the compiler, and what they do is decided when they run: whether this pass synchronises
(``no_sync``), what the communication hook does, what has accumulated in ``.grad`` before.  So none of that needs
another graph.  ``launch`` is given the parameters themselves, not an index: one compiled graph may serve several
modules of the same shape (blocks of a model, two wrapped models), and each call then finds its own bucket.

[Note: a list, never a cat]  The gradients go in as a list and are packed outside of the graph.  A ``cat`` in the graph
would be fused with the reductions that make the gradients; on the GPU that once gave layer-norm gradients that were
wrong by five orders of magnitude while the loss went on falling (``benchmarks/gpu.py`` keeps a check for it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.engine import delivery

# The memory order of the gradients does not matter, since they are packed one by one; and a CUDA graph must not record
# what is decided anew in each step.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)

_library = torch.library.Library("lockstep", "DEF")
_library.define("launch(Tensor[] grads, Tensor[] parameters) -> Tensor[]", tags=_TAGS)
_library.define("collect(Tensor(a!)[] firsts) -> ()", tags=_TAGS)


# Under compiled autograd the compiler watches while these run; there is nothing in them for it.
@torch.library.impl(_library, "launch", "CompositeExplicitAutograd")
@torch.compiler.disable
def _launch(grads: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    return delivery.deliver(grads, parameters)


@torch.library.impl(_library, "collect", "CompositeExplicitAutograd")
@torch.compiler.disable
def _collect(firsts: list[Tensor]) -> None:
    delivery.land(firsts)


@torch.library.register_fake("lockstep::launch", lib=_library)
def fake_launch(grads: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device) for p in parameters]


@torch.library.register_fake("lockstep::collect", lib=_library)
def _fake_collect(firsts: list[Tensor]) -> None:
    return None


launch = torch.ops.lockstep.launch.default
collect = torch.ops.lockstep.collect.default
