"""The operators that compiled backwards call; above all ``launch``.

    launch(grads, parameters, group) -> flat     the gradients of one bucket, or of a part of one, are there

It is opaque to the compiler, and what it does is decided when it runs: whether this pass synchronises (``no_sync``),
what the communication hook does, what has accumulated in ``.grad`` before.  So none of that needs another graph.
One compiled graph may serve several modules of the same shape (blocks of a model, two wrapped models): ``group`` only
counts the launches of the graph, and each run of it knows which bucket that is.  The graph's results are parts of
the buffer that comes back; autograd gets them only where the gradients were not taken (``engine/feeders/graph.py``).

[Note: a list, never a cat]  The gradients go in as a list and are packed outside of the graph.  A ``cat`` in the graph
would be fused with the reductions that make the gradients; on the GPU that once gave layer-norm gradients that were
wrong by five orders of magnitude while the loss went on falling (``benchmarks/gpu.py`` keeps a check for it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.feeders import compiled_autograd
from lockstep.engine.feeders import graph as feeder

# The memory order of the gradients does not matter, since they are packed one by one; and a CUDA graph must not record
# what is decided anew in each step.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)

_library = torch.library.Library("lockstep", "DEF")
_library.define("launch(Tensor[] grads, Tensor[] parameters, int group) -> Tensor", tags=_TAGS)


# Where a backward is called by compiled code, or by compiled autograd, the compiler watches while these run; there is
# nothing in them for it.
@torch.library.impl(_library, "launch", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _launch(grads: list[Tensor], parameters: list[Tensor], group: int) -> Tensor:
    return feeder.deliver(grads, parameters, group)


@torch.library.register_fake("lockstep::launch", lib=_library)
def _fake_launch(grads: list[Tensor], parameters: list[Tensor], group: int) -> Tensor:
    first = parameters[0]
    return torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)


# A mark that is taken out of the graph again, see ddp/dispatch.py.
_library.define("forward_of(int serial, bool is_training) -> ()")


@torch.library.impl(_library, "forward_of", "CompositeExplicitAutograd")
def _forward_of(serial: int, is_training: bool) -> None:
    raise RuntimeError("A compiled graph calls a wrapper's forward, but was not compiled by Lockstep.")


@torch.library.register_fake("lockstep::forward_of", lib=_library)
def _fake_forward_of(serial: int, is_training: bool) -> None:
    return None


# Of compiled autograd, see engine/feeders/compiled_autograd.py.  Two only tell something; they return an empty tensor,
# which the next one takes: what has no result is dropped from a graph, and what shares no argument may be reordered.
_library.define("output_reached(Tensor parameter) -> Tensor", tags=_TAGS)
_library.define("accumulated(Tensor grad, Tensor parameter, Tensor[] after) -> Tensor", tags=_TAGS)
_library.define("finish(Tensor(a!)[] grads, Tensor[] after, Tensor[] parameters) -> ()", tags=_TAGS)


@torch.library.impl(_library, "output_reached", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _output_reached(parameter: Tensor) -> Tensor:
    return compiled_autograd.note_output_reached(parameter)


@torch.library.impl(_library, "accumulated", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _accumulated(grad: Tensor, parameter: Tensor, after: list[Tensor]) -> Tensor:
    return compiled_autograd.bring(grad, parameter)


@torch.library.impl(_library, "finish", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _finish(grads: list[Tensor], after: list[Tensor], parameters: list[Tensor]) -> None:
    compiled_autograd.finish(grads, parameters)


@torch.library.register_fake("lockstep::output_reached", lib=_library)
def _fake_output_reached(parameter: Tensor) -> Tensor:
    return parameter.new_empty(0)


@torch.library.register_fake("lockstep::accumulated", lib=_library)
def _fake_accumulated(grad: Tensor, parameter: Tensor, after: list[Tensor]) -> Tensor:
    return grad.new_empty(0)


@torch.library.register_fake("lockstep::finish", lib=_library)
def _fake_finish(grads: list[Tensor], after: list[Tensor], parameters: list[Tensor]) -> None:
    return None


launch = torch.ops.lockstep.launch.default
