"""The hooks between real ranks on gloo, in worlds of two and three."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hook_checks
import pytest
import torch
from hook_world import run_checks

from lockstep.hooks.wire import all_gather_bytes, all_reduce_bytes, all_to_all_bytes

pytestmark = pytest.mark.multirank

ALL_HOOKS = sorted(hook_checks.HOOKS)


@pytest.fixture(scope="module", params=[2, 3], ids=["world2", "world3"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp(f"hooks{request.param}")
    return run_checks(request.param, folder)


def test_all_ranks_get_the_same_bits_in_the_buckets_dtype(ranks: list[dict[str, Any]]) -> None:
    for key, (first, *_) in ranks[0]["one_reduction_each"].items():
        assert first.dtype == key[1], key
        for other in ranks[1:]:
            assert torch.equal(other["one_reduction_each"][key][0], first), key


def test_buckets_in_flight_together_do_not_mix(ranks: list[dict[str, Any]]) -> None:
    num_ranks = len(ranks)
    for name in ALL_HOOKS:
        results = [rank["many_in_flight"][name] for rank in ranks]
        for index, first in enumerate(results[0]):
            assert all(torch.equal(first, other[index]) for other in results[1:]), (name, index)
            if name != "topk":  # what top-k leaves out makes its last round alone uninformative
                truth = hook_checks.true_mean(70 + index, num_ranks, first.numel())
                assert (first - truth).abs().max() < 0.1, (name, index)


def test_bf16_is_the_mean_within_bf16_rounding(ranks: list[dict[str, Any]]) -> None:
    for (name, dtype, size), (out, *_) in ranks[0]["one_reduction_each"].items():
        if name == "bf16":
            truth = hook_checks.true_mean(1, len(ranks), size, dtype)
            largest_summand = max(hook_checks.gradient(1, rank, size, dtype).abs().max() for rank in range(len(ranks)))
            # Each input and each partial sum is rounded to 8 bits.
            assert (out.double() - truth).abs().max() <= len(ranks) * 2**-8 * largest_summand


def test_int8_is_the_mean_within_one_level_per_quantisation(ranks: list[dict[str, Any]]) -> None:
    for (name, dtype, size), (out, *_) in ranks[0]["one_reduction_each"].items():
        if name.startswith("int8"):
            truth = hook_checks.true_mean(1, len(ranks), size, dtype)
            largest = max(hook_checks.gradient(1, rank, size, dtype).abs().max() for rank in range(len(ranks)))
            half_level = float(largest) / 127 / 2
            rounding_of_result = torch.finfo(dtype).eps * float(largest)
            assert (out.double() - truth).abs().max() <= 2.01 * half_level + rounding_of_result


def test_topk_of_everything_is_the_mean(ranks: list[dict[str, Any]]) -> None:
    for (name, dtype, size), (out, *_) in ranks[0]["one_reduction_each"].items():
        if name == "topk_all":
            truth = hook_checks.true_mean(1, len(ranks), size, dtype)
            torch.testing.assert_close(out.double(), truth, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_topk_sends_each_ranks_largest(ranks: list[dict[str, Any]]) -> None:
    out = ranks[0]["one_reduction_each"]["topk", torch.float32, 5003][0]
    expected = torch.zeros(5003)
    for rank in range(len(ranks)):
        gradient = hook_checks.gradient(1, rank, 5003)
        for chunk, start in zip(gradient.split(1024), range(0, 5003, 1024), strict=True):
            places = chunk.abs().topk(102).indices
            expected[start + places] += chunk[places]
    torch.testing.assert_close(out, expected / len(ranks))


def test_error_feedback_owes_only_the_residual(ranks: list[dict[str, Any]]) -> None:
    """After any number of steps: sum of results = sum of true means - mean of what the ranks still hold."""
    for name in ("topk", "int8_all_gather"):
        seen = ranks[0]["running_sums"][name]
        torch.testing.assert_close(seen["total"] + seen["owed"].double(), seen["truth"], rtol=0, atol=1e-3)


def test_error_feedback_keeps_the_error_from_growing(ranks: list[dict[str, Any]]) -> None:
    for name in hook_checks.WITH_RESIDUAL:
        seen = ranks[0]["running_sums"][name]
        errors = seen["errors"]
        # Without feedback the error of independent steps grows with the root of their number: 2.0 times here.
        assert max(errors[-5:]) < 1.25 * max(errors[5:10]), name
        assert errors[-1] / seen["truth"].norm() < {"topk": 0.2}.get(name, 0.005), name


def test_a_resumed_state_continues_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, seen in rank["resumed"].items():
            for straight, resumed in zip(seen["straight"], seen["resumed"], strict=True):
                assert torch.equal(straight, resumed), name
            assert seen["bytes"][0] == seen["bytes"][1]
            assert seen["resets"] == 0


def test_what_is_not_finite_stays_so_on_all_ranks_and_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for key, seen in rank["not_finite"].items():
            assert not torch.isfinite(seen["during"][17]), key
            assert torch.isfinite(seen["after"]).all(), key
            assert seen["residual_held"], key


def test_a_world_of_one_and_empty_buckets_send_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in ALL_HOOKS:
            assert rank["unusual_buckets"][name, "alone"] == (True, 0)
            assert rank["unusual_buckets"][name, "empty"] == (0, 0)


def test_complex_and_sparse_buckets_are_averaged_exactly(ranks: list[dict[str, Any]]) -> None:
    num_ranks = len(ranks)
    real, imaginary = (hook_checks.true_mean(seed, num_ranks, 50) for seed in (4, 5))
    sparse = torch.zeros(10)
    sparse[:num_ranks] += 1 / num_ranks
    sparse[7] = 2.0
    for rank in ranks:
        for name in ALL_HOOKS:
            seen = rank["unusual_buckets"]
            torch.testing.assert_close(seen[name, "complex"], torch.complex(real, imaginary).to(torch.complex64))
            torch.testing.assert_close(seen[name, "sparse"], sparse)


def test_an_integer_bucket_is_refused_with_its_dtype(ranks: list[dict[str, Any]]) -> None:
    for name in ALL_HOOKS:
        assert "torch.int64" in ranks[0]["unusual_buckets"][name, "integer"]


def test_a_changed_layout_drops_the_residual_and_counts_it(ranks: list[dict[str, Any]]) -> None:
    seen = ranks[0]["changed_layout"]
    assert seen["resets"] == 1
    assert f"rank 1 of {len(ranks)}" in seen["message"]


def test_bytes_are_counted_by_the_formulas(ranks: list[dict[str, Any]]) -> None:
    num_ranks, size = len(ranks), 5003
    plain = all_reduce_bytes(size * 4, num_ranks)
    num_chunks = math.ceil(math.ceil(size / num_ranks) / 256)  # per shard
    shard = num_chunks * (256 + 4)
    row = -(-5 * 102 * 6 // 16) * 16  # 5 chunks, a tenth of each, 4 bytes of value and 2 of place
    expected = {
        "bf16": all_reduce_bytes(size * 2, num_ranks),
        "int8": all_to_all_bytes(shard * num_ranks, num_ranks) + all_gather_bytes(shard, num_ranks),
        "int8_all_gather": all_gather_bytes(shard * num_ranks, num_ranks),
        "topk": all_gather_bytes(row, num_ranks),
    }
    for name, on_wire in expected.items():
        _, seen_on_wire, seen_plain = ranks[0]["one_reduction_each"][name, torch.float32, size]
        assert (seen_on_wire, seen_plain) == (on_wire, plain), name


def test_models_train_alike_on_all_ranks_under_torch_and_lockstep(ranks: list[dict[str, Any]]) -> None:
    for key, first in ranks[0]["trained_model"].items():
        for other in ranks[1:]:
            assert torch.equal(first["weights"], other["trained_model"][key]["weights"]), key
        assert first["losses"][-1] < first["losses"][0], key
        assert first["bytes"] > 0, key
