"""Gradients that are products of two matrices, made where they will travel: in the flat buffer of their bucket.

    program_product(left, right, program, bucket, position) -> token

The gradient of a linear layer's weight is one, and most of a model's gradients are such.  A program that returned it
would write it down, and the reducer would read it and write it down once more, scaled: on a CPU that is a part of the
step that shows.  Here the product is scaled and written once, and no gradient lies anywhere else.

Only on a CPU, where the compiler calls a library for such a product anyhow; a product that it would rather make itself
(``max_autotune``), or that anything else reads, is left alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import Slot
from lockstep.engine.grad_memory import GradMemory
from lockstep.program.deliver import TAGS, Delivery, library, running, trained

library.define("program_product(Tensor left, Tensor right, int program, int bucket, int position) -> Tensor", tags=TAGS)

_aten = torch.ops.aten


def multiply_in_place(graph: Any, delivery: Delivery) -> None:
    """Let every gradient that is a product, and nothing else's business, be made in the buffer of its bucket."""
    reducer = delivery.step.reducer
    makes_its_own = any(torch_private.inductor_setting(n, {}) for n in ("max_autotune", "max_autotune_gemm"))
    if makes_its_own or not isinstance(reducer.memory, GradMemory):
        return
    for launch in graph.graph.find_nodes(op="call_function", target=torch.ops.lockstep.program_launch.default):
        gradients, after, program, index = launch.args
        bucket = reducer.buckets[index]
        kept, tokens, gone = [], list(after), []
        for position, (slot, gradient) in enumerate(zip(trained(bucket), gradients, strict=True)):
            product = _product_of(gradient, launch) if gradients.count(gradient) == 1 else None
            if product is None or not _fits(slot, product, reducer.memory.travel_dtype(bucket)):
                kept.append(gradient)
                continue
            with graph.graph.inserting_after(product):
                token = graph.graph.call_function(
                    torch.ops.lockstep.program_product.default, (*product.args[:2], program, index, position)
                )
            token.meta.update({name: product.meta[name] for name in ("stack_trace",) if name in product.meta})
            tokens.append(token)
            gone.append(gradient)
        launch.args = (kept, tokens, program, index)
        for node in gone:
            _erase(graph.graph, node)
    graph.recompile()


def _erase(graph: Any, node: Any) -> None:
    """Take out what nobody reads any more, down to the product."""
    while not node.users and node.target in (_aten.t.default, _aten.detach.default, _aten.mm.default):
        is_product, before = node.target is _aten.mm.default, node.args[0]
        graph.erase_node(node)
        if is_product:
            return
        node = before


def _product_of(node: Any, launch: Any) -> Any:
    """The product that this gradient is, turned over and back perhaps; None if it is none, or others read it too."""
    num_turns, reader = 0, launch
    while True:
        if set(node.users) != {reader}:
            return None
        if node.target is _aten.mm.default:
            return node if num_turns % 2 == 0 else None
        if node.target not in (_aten.t.default, _aten.detach.default):
            return None
        num_turns += node.target is _aten.t.default
        node, reader = node.args[0], node


def _fits(slot: Slot, product: Any, travels_in: torch.dtype) -> bool:
    value = product.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.dtype == travels_in == slot.parameter.dtype
        and tuple(value.shape) == slot.shape
        and slot.is_dense_row_major
        and not slot.is_dtensor
    )


def _multiply(delivery: Delivery, index: int, position: int, left: Tensor, right: Tensor) -> None:
    """Take a product as the gradient of a parameter."""
    delivery.begin()
    step = delivery.step
    reducer, bucket = step.reducer, step.reducer.buckets[index]
    slot = delivery.trained[index][position]
    delivery.made_in_place.add(slot)
    if (
        slot.is_taken
        or slot.parameter.grad is not None
        or reducer.memory.travel_dtype(bucket) != left.dtype
        or not isinstance(reducer.memory, GradMemory)
    ):
        reducer.absorb(bucket, [slot], [torch.mm(left, right)])  # it is added to what is there, or cast
    else:
        scale, room = reducer.scale_of(bucket), reducer.memory.room_for(slot)
        if math.frexp(scale)[0] == 0.5:  # to scale by a power of two is exact, whenever it is done
            torch.addmm(room, left, right, beta=0, alpha=scale, out=room)
        else:
            torch.mm(left, right, out=room).mul_(scale)
        bucket.mark_taken([slot])
    slot.dirty = True


@torch.library.impl(library, "program_product", "CompositeExplicitAutograd")
@torch_private.leave_to_python
def _product(left: Tensor, right: Tensor, program: int, bucket: int, position: int) -> Tensor:
    delivery = running(program)
    assert isinstance(delivery, Delivery)
    _multiply(delivery, bucket, position, left, right)
    return left.new_empty(0)


@torch.library.register_fake("lockstep::program_product", lib=library)
def _fake_product(left: Tensor, right: Tensor, program: int, bucket: int, position: int) -> Tensor:
    return left.new_empty(0)
