"""A parameter of a compiled model that is used outside of its graph as well, or by a second graph.

Beside several graphs, a use that begins late may find the bucket travelling; then the step is lost with an error on all
ranks, and the steps after it are right again.  See [Note: an addition that comes later] in engine/delivery.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import MLP, squared_error
from multirank.test_compiled_features import DTYPE, MODES, ONE_EACH, PRELOAD, VIEWS, Pair, SharedAcrossBreak, Stack

pytestmark = [pytest.mark.multirank, lockstep_only]


class Chain(MLP):
    """Three graphs; from some step on, the last may use the first one's weight as well."""

    reuses = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        h = torch.tanh(self.layers[2](h))
        torch._dynamo.graph_break()
        if self.reuses:
            h = h + h @ self.layers[0].weight @ self.layers[0].weight.t()
        return self.layers[4](h)


# Whether the step is lost. What the last graph of the backward delivers has arrived when autograd adds the rest to it.
LATE = {
    "breaks": {"layers.0.weight": False, "layers.2.weight": True, "layers.4.bias": True, "reuses": True},
    "blocks": {"layers.0.qkv.weight": False, "layers.1.qkv.weight": True, "layers.2.norm2.bias": True},
}


def late_pair(name: str, **options: Any) -> Pair:
    torch._dynamo.reset()
    if name == "blocks":
        return Pair(Stack, "wrap_then_blocks", bucket_cap_mb=ONE_EACH, **options)
    return Pair(Chain, bucket_cap_mb=ONE_EACH, compile_options={"fullgraph": False}, **options)


def late_loss(model: Any, module: Any, batch: Any, use: str) -> Tensor:
    """With a penalty on a parameter; or with the model's switch set."""
    if use == "reuses":
        module.reuses = True
        return squared_error(model, batch)
    return squared_error(model, batch) + 0.3 * module.get_parameter(use).pow(2).sum()


def memory_of(tensors: Iterable[Tensor | None]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}


def begin_late(name: str, use: str, first: int, **options: Any) -> list[int]:
    """The steps that were lost, each of which is repeated."""
    import lockstep

    pair, lost = late_pair(name, **options), []
    for step in pair.each(first + 4):
        if step < first:
            pair.backward(step)
            continue
        late_loss(pair.plain, pair.plain, pair.case.batch(step, DTYPE), use).backward()
        try:
            late_loss(pair.model, pair.module, pair.mine(step), use).backward()
        except lockstep.errors.LockstepError as error:
            if ("layers.0.weight" if use == "reuses" else use) not in str(error):
                raise
            lost.append(step)
            travelling = [bucket.flat for bucket in pair.ddp.reducer.buckets if bucket.flight is not None]
            pair.ddp.reset_sync_window()
            assert not memory_of(travelling) & memory_of(p.grad for p in pair.module.parameters())
            pair.module.zero_grad(set_to_none=step % 3 != 2)
            dist.barrier()
            late_loss(pair.model, pair.module, pair.mine(step), use).backward()
    return lost


def begin_late_in_every_way(name: str) -> dict[str, list[list[int]]]:
    """In step 5, gradients were zeroed in place; in step 3, they are None."""
    return {
        use: [begin_late(name, use, 5, **some) for some in VIEWS] + [begin_late(name, use, 3, **some) for some in MODES]
        for use in LATE[name]
    }


@pytest.mark.parametrize("name", LATE)
def test_a_use_that_begins_late_beside_several_graphs(name: str) -> None:
    expected = {use: [[5]] * 3 + [[3]] * 2 if is_lost else [[]] * 5 for use, is_lost in LATE[name].items()}
    assert run_ranks(2, begin_late_in_every_way, name, preload=PRELOAD) == [expected] * 2


def begin_late_on_one_rank(name: str, use: str) -> None:
    pair = late_pair(name)
    for step in range(8):
        pair.module.zero_grad()
        is_late = step >= 3 and dist.get_rank() == 1
        loss = late_loss(pair.model, pair.module, pair.mine(step), use) if is_late else pair.losses(step)[0]
        loss.backward()


@pytest.mark.parametrize(("name", "use"), [("breaks", "layers.2.weight"), ("blocks", "layers.2.norm2.bias")])
def test_a_use_that_begins_late_on_one_rank(name: str, use: str) -> None:
    for error in expect_errors(2, [0, 1], begin_late_on_one_rank, name, use, preload=PRELOAD).values():
        assert f"Parameter {use} " in error.text


def come_twice() -> None:
    """From two graphs, and from one graph that ran twice: the second must not be packed over the first."""
    for options in VIEWS:
        pair = Pair(SharedAcrossBreak, bucket_cap_mb=ONE_EACH, compile_options={"fullgraph": False}, **options)
        pair.steps(4).require_delivered(4, "head.weight")
        pair = Pair(**options)
        for step in pair.each(4):
            for first, second in zip(pair.losses(step), pair.losses(step + 20), strict=True):
                (first + 0.5 * second).backward()


def test_a_bucket_that_comes_twice_in_a_backward() -> None:
    run_ranks(2, come_twice, preload=PRELOAD)
