"""Each mistake's message names the parameter (or option), says the cause and gives the fix, on the right ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from multirank import error_scripts as scripts
from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]


@dataclass(frozen=True)
class Entry:
    """What a message must contain: the type, the name, the cause, the fix."""

    script: Callable[[], object]
    error: str
    name: str
    cause: str
    fix: str
    also: tuple[str, ...] = field(default=())


CATALOGUE = [
    Entry(
        scripts.unused_parameter,
        "UnfinishedReduction",
        "head_b.weight (Linear), bucket 0",
        "The forward pass did not use them",
        "find_unused_parameters=True",
        ("Expected to have finished reduction in the prior iteration", "2 of 6 parameters"),
    ),
    Entry(
        scripts.unused_parameter_before_the_optimizer,
        "UnreducedGradients",
        "head_b.bias (Linear)",
        "received no gradient in the last backward",
        "find_unused_parameters=True",
        ("stopped before any weight changed",),
    ),
    Entry(
        scripts.output_not_in_loss,
        "UnfinishedReduction",
        "head_b.weight",
        "not in the loss",
        "outputs participate in calculating loss",
    ),
    Entry(
        scripts.static_graph_grows,
        "GraphChanged",
        "head_b",
        "Your training graph has changed",
        "find_unused_parameters=True instead of static_graph=True",
    ),
    Entry(
        scripts.static_graph_shrinks,
        "UnfinishedReduction",
        "head_b.weight",
        "training graph has changed",
        "find_unused_parameters=True instead of static_graph=True",
    ),
    Entry(
        scripts.static_graph_set_too_late, "RuntimeError", "_set_static_graph", "before the first backward", "before"
    ),
    Entry(
        scripts.hook_returns_a_tensor,
        "BadHookResult",
        "hook_returns_a_tensor",
        "got Tensor",
        "set_result(bucket.buffer())",
    ),
    Entry(
        scripts.hook_returns_too_little,
        "BadHookResult",
        "my_hook",
        "returned 1 elements for bucket 0, which holds 10",
        "must return as many",
    ),
    Entry(
        scripts.hook_sets_a_short_buffer,
        "BadHookResult",
        "set on bucket 0",
        "has shape (1,) and strides (1,)",
        "needs 10 elements in a row",
    ),
    Entry(
        scripts.hook_registered_twice,
        "RuntimeError",
        "allreduce_hook",
        "can only be called once",
        "write one hook that does both",
    ),
    Entry(scripts.parameter_replaced, "LockstepError", "head_a.weight", "added or replaced", "wrap it again"),
    Entry(scripts.parameter_added, "LockstepError", "adapter.weight", "added or replaced", "wrap it again"),
    Entry(
        scripts.backward_raised, "UnfinishedReduction", "trunk.weight", "raised and was caught", "reset_sync_window()"
    ),
    Entry(scripts.different_order, "Disagreement", "first at a.weight", "order of parameters differs", "Fix:"),
    Entry(scripts.different_dtype, "Disagreement", "weight differs", "float64", "Fix:", ("rank 1",)),
    Entry(scripts.different_option, "Disagreement", "bucket_cap_mb", "rank 1 | 2", "same options"),
    Entry(scripts.different_ignored, "Disagreement", "ignored parameters and buffers", "['bias']", "Fix:"),
    Entry(scripts.module_on_meta, "ValueError", "weight", "meta device", "to_empty"),
    Entry(scripts.nothing_to_train, "RuntimeError", "not needed", "any parameter that requires a gradient", ""),
    Entry(scripts.lazy_module, "RuntimeError", "weight", "uninitialized parameters", "dummy forward"),
    Entry(scripts.zero_bucket_cap, "ValueError", "bucket_cap_mb", "got 0", "positive number of MiB"),
    Entry(scripts.unknown_bucket_order, "ValueError", "bucket_order", "'random'", '"declared" or "observed"'),
    Entry(scripts.plan_of_another_model, "ValueError", "weight", "does not fit this module", "plan=None"),
    Entry(scripts.sync_batch_norm_on_cpu, "ValueError", "SyncBatchNorm", "only work with GPU modules", ""),
    Entry(
        scripts.half_a_delay,
        "ValueError",
        "delay_all_reduce_named_params",
        "at the same time",
        "param_to_hook_all_reduce",
    ),
]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.script.__name__)
def test_message_names_the_parameter_the_cause_and_the_fix(entry: Entry) -> None:
    errors = expect_errors(2, [0, 1], entry.script)
    for rank, error in errors.items():
        assert error.type_name == entry.error, f"rank {rank} raised {error.type_name}: {error.text}"
        for part in (entry.name, entry.cause, entry.fix, *entry.also):
            assert part in error.text, f"rank {rank}: {part!r} is missing from:\n{error.text}"


def test_the_catalogue_is_long_enough() -> None:
    assert len(CATALOGUE) >= 20


def test_a_hook_that_raises_on_one_rank_is_heard_on_all() -> None:
    errors = expect_errors(2, [0, 1], scripts.hook_raises)
    assert errors[1].type_name == "ZeroDivisionError"
    assert "my_hook" in errors[1].traceback
    assert "bucket 0 (bias, weight)" in errors[1].traceback
    assert errors[0].type_name == "PeerFailed"
    assert "Rank 1 failed" in errors[0].text
    assert "ZeroDivisionError: in my hook" in errors[0].text


def test_a_parameter_unused_on_one_rank_stops_both_before_they_drift() -> None:
    errors = expect_errors(2, [0, 1], scripts.unused_on_one_rank_only)
    assert errors[1].type_name == "UnreducedGradients"
    assert "head_b.weight" in errors[1].text
    assert errors[0].type_name == "PeerFailed"
    assert "head_b.weight" in errors[0].text
    assert "find_unused_parameters=True" in errors[0].text


def test_stepping_on_local_gradients_is_a_warning_that_names_them() -> None:
    for messages in run_ranks(2, scripts.step_inside_no_sync):
        (message,) = messages
        assert "weight" in message
        assert "no_sync()" in message


def test_the_way_back_after_an_error_works() -> None:
    first, second = run_ranks(2, scripts.reset_after_an_error)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
