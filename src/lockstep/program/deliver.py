"""How a program of the whole step reaches the reducer: one operator per bucket on the way out, one on the way back.

    program_launch(grads, after, program, bucket) -> token   the gradients of a bucket are there
    program_collect(tokens, program) -> flats                ranks compare the window; the reduced buckets

They are opaque to the compiler, and feed the same step as everything else: buckets leave in plan order, ranks compare
their stamps, communication hooks run.  What comes back is the reducer's own buffers, which the program uses up; so
``.grad`` stays empty.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.step_guard import before_update

TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
library = torch.library.Library("lockstep", "FRAGMENT")
library.define("program_launch(Tensor[] grads, Tensor[] after, int program, int bucket) -> Tensor", tags=TAGS)
library.define("program_collect(Tensor[] tokens, int program) -> Tensor[]", tags=TAGS)

# To whom a program delivers: there is one wrapper in a model, or one sharded model.  The number stands in the program,
# which another process may load: so it names no wrapper of this process, but whichever step runs (see ``let_in``).
_THE_WRAPPER, THE_SHARDS = 0, 1


class Receiver(Protocol):
    """Whoever the operators come to."""

    def launch(self, index: int, gradients: Sequence[Tensor]) -> None: ...

    def collect(self) -> list[Tensor]: ...

    def empty_flats(self) -> list[Tensor]: ...


_deliveries: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()


def let_in(serial: int, receiver: Receiver) -> None:
    """Before a program is made or run: what it delivers to this number comes here."""
    _deliveries[serial] = receiver


def running(serial: int) -> Receiver:
    """To whom a program delivers that runs now."""
    return _deliveries[serial]


def trained(bucket: LiveBucket) -> list[Slot]:
    """What of a bucket is not frozen: a program is made for that, and brings nothing else."""
    return [slot for slot in bucket.slots if slot.parameter.requires_grad]


class Delivery:
    """The way of one wrapped model's gradients out of a program, and back into it."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.serial = _THE_WRAPPER
        self._flats: list[Tensor] = []
        self.trained: dict[int, list[Slot]] = {}  # in this pass, by bucket
        self.made_in_place: set[Slot] = set()  # in this pass; see products.py

    def enter(self) -> None:
        """Before a program is made or run: what it delivers comes here."""
        let_in(self.serial, self)

    @property
    def is_needed(self) -> bool:
        """Whether anything is to be sent: not by a rank that is alone."""
        reducer = self.step.reducer
        return not (reducer.transport.is_alone and reducer.exchange is reducer.mean)

    # ---------------------------------------------------------------- in the trace

    def reduced(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Put the reduction into a program: gradients by ``id`` of their parameter, local ones in, the mean out."""
        buckets = self.step.reducer.buckets
        tokens = [
            torch.ops.lockstep.program_launch(
                [gradients[id(slot.leaf)] for slot in trained(bucket)], [], self.serial, bucket.index
            )
            for bucket in buckets
            if trained(bucket)
        ]
        flats = torch.ops.lockstep.program_collect(tokens, self.serial)
        found: dict[int, Tensor] = {}
        for bucket, flat in zip(buckets, flats, strict=True):
            for slot in trained(bucket):
                part = flat.as_strided(slot.shape, slot.stride, slot.offset)
                found[id(slot.leaf)] = part.to(slot.parameter.dtype)
        return found

    def empty_flats(self) -> list[Tensor]:
        """What ``program_collect`` will return, without content."""
        memory = self.step.reducer.memory
        return [
            torch.empty(b.spec.num_elements, dtype=memory.travel_dtype(b), device=b.parameters[0].device)
            for b in self.step.reducer.buckets
        ]

    # ---------------------------------------------------------------- when the program runs

    def begin(self) -> None:
        """The first gradient of a pass is there: all of them will be delivered."""
        step = self.step
        if not step.is_in_pass:
            self.made_in_place.clear()
            self.trained = {bucket.index: trained(bucket) for bucket in step.reducer.buckets}
            step.begin_pass()
            for due in step.reducer.buckets:
                if self.trained[due.index]:
                    step.intake.expect_delivery(due, self.trained[due.index])

    def launch(self, index: int, gradients: Sequence[Tensor]) -> None:
        """Take a bucket's gradients, those that do not lie in its buffer yet; it leaves when those before it have."""
        self.begin()
        bucket: LiveBucket = self.step.reducer.buckets[index]
        slots = [slot for slot in self.trained[index] if slot not in self.made_in_place]
        self.step.intake.take_delivery(bucket, slots, gradients)

    def collect(self) -> list[Tensor]:
        """End the window: compare with the other ranks, and take the reduced buckets."""
        step = self.step
        step.before_hand_out = self._take_flats
        try:
            step.settle_pass(is_inner=False)
            if step.missing:
                raise step.unfinished(step.missing)
            step.end_pass(is_inner=False)
        finally:
            step.before_hand_out = None
            step.forget_pass()
        self._add_remainders()
        before_update(step, set, in_program=True)
        flats, self._flats = self._flats, []
        return flats

    def _take_flats(self) -> None:
        """All buckets have landed: take their buffers before anything is handed out in ``.grad``."""
        self._flats = []
        for bucket in self.step.reducer.buckets:
            assert bucket.flat is not None
            self._flats.append(bucket.flat)
            for slot in bucket.slots:
                slot.dirty = False
            bucket.forget_buffer()

    def _add_remainders(self) -> None:
        """What another rank sent late was reduced by itself, and lies in ``.grad``."""
        for bucket, flat in zip(self.step.reducer.buckets, self._flats, strict=True):
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    torch_private.alias(flat, slot.shape, slot.stride, slot.offset).add_(slot.parameter.grad)
                    slot.parameter.grad = None


@torch.library.impl(library, "program_launch", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _launch(grads: list[Tensor], after: list[Tensor], program: int, bucket: int) -> Tensor:
    _deliveries[program].launch(bucket, grads)
    return (grads or after)[0].new_empty(0)


@torch.library.impl(library, "program_collect", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _collect(tokens: list[Tensor], program: int) -> list[Tensor]:
    return _deliveries[program].collect()


@torch.library.register_fake("lockstep::program_launch", lib=library)
def _fake_launch(grads: list[Tensor], after: list[Tensor], program: int, bucket: int) -> Tensor:
    return (grads or after)[0].new_empty(0)


@torch.library.register_fake("lockstep::program_collect", lib=library)
def _fake_collect(tokens: list[Tensor], program: int) -> list[Tensor]:
    return _deliveries[program].empty_flats()


def launch_early(graph: Any) -> None:
    """Move every launch to where its last gradient is made, so that it travels while the rest is computed."""
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.lockstep.program_launch.default):
        given = node.args[0]
        node.args = ([_made_by(gradient) for gradient in given], *node.args[1:])
        for detached in given:
            while detached.target is torch.ops.aten.detach.default and not detached.users:
                made_of = detached.args[0]
                graph.graph.erase_node(detached)
                detached = made_of
        last = max(node.all_input_nodes, key=order.__getitem__)
        last.append(node)
    graph.recompile()


def _made_by(node: Any) -> Any:
    """What is the same gradient, and is there earlier: all of them are detached when the backward is over."""
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]
    return node
