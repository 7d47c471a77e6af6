"""A parameter of a compiled model that is used outside of its graph as well, or by a second graph.

Such a use may find the bucket travelling; what it brings is reduced by itself then.  See [Note: what comes late] in
engine/step.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import MLP, squared_error
from multirank.test_compiled_features import DTYPE, ONE_EACH, PRELOAD, VIEWS, Pair, SharedAcrossBreak, Stack

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


LATE = {
    "breaks": ["layers.0.weight", "layers.2.weight", "layers.4.bias", "reuses"],
    "blocks": ["layers.0.qkv.weight", "layers.1.qkv.weight", "layers.2.norm2.bias"],
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


def begin_late(name: str, use: str, first: int, ranks: tuple[int, ...], **options: Any) -> None:
    pair = late_pair(name, **options)
    share = len(ranks) / dist.get_world_size()
    for step in pair.each(first + 4):
        if step < first:
            pair.backward(step)
            continue
        whole = pair.case.batch(step, DTYPE)
        plain = late_loss(pair.plain, pair.plain, whole, use)
        if use != "reuses":
            plain = squared_error(pair.plain, whole) + share * 0.3 * pair.plain.get_parameter(use).pow(2).sum()
        plain.backward()
        is_late = dist.get_rank() in ranks
        loss = late_loss(pair.model, pair.module, pair.mine(step), use) if is_late else pair.losses(step)[0]
        loss.backward()


def begin_late_in_every_way(name: str) -> None:
    """In step 5, gradients were zeroed in place; in step 3, they are None."""
    for use in LATE[name]:
        for options in VIEWS:
            begin_late(name, use, 5, (0, 1), **options)
        begin_late(name, use, 3, (0, 1), find_unused_parameters=True)


@pytest.mark.parametrize("name", LATE)
def test_a_use_that_begins_late_beside_several_graphs(name: str) -> None:
    run_ranks(2, begin_late_in_every_way, name, preload=PRELOAD)


def begin_late_on_one_rank(name: str, use: str) -> None:
    for options in VIEWS:
        begin_late(name, use, 3, (1,), **options)


@pytest.mark.parametrize(("name", "use"), [("breaks", "layers.2.weight"), ("blocks", "layers.2.norm2.bias")])
def test_a_use_that_begins_late_on_one_rank(name: str, use: str) -> None:
    run_ranks(2, begin_late_on_one_rank, name, use, preload=PRELOAD)


def hook_of_a_user(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


def begin_late_under_a_hook(use: str) -> None:
    pair = late_pair("breaks")
    pair.ddp.register_comm_hook(None, hook_of_a_user)
    for step in range(8):
        pair.module.zero_grad()
        is_late = step >= 3 and dist.get_rank() == 1
        loss = late_loss(pair.model, pair.module, pair.mine(step), use) if is_late else pair.losses(step)[0]
        loss.backward()


def test_what_comes_late_is_an_error_on_all_ranks_under_a_hook_that_need_not_be_linear() -> None:
    for error in expect_errors(2, [0, 1], begin_late_under_a_hook, "layers.2.weight", preload=PRELOAD).values():
        assert error.type_name == "LateGradient"
        assert "layers.2.weight" in error.text
        assert "hook_of_a_user" in error.text


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
