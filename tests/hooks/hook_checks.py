"""What each rank does for the hook tests; run by ``hook_world.py``, judged in the test files."""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.hooks import Bf16State, Int8State, TopKState, bf16_hook, int8_hook, topk_hook

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = (1, 7, 1024, 5003)
NUM_STEPS = 40


class PlainBucket:
    """A bucket with torch's interface around one tensor, for hooks without a wrapped model."""

    def __init__(self, buffer: torch.Tensor, parameter: torch.Tensor, index: int = 0) -> None:
        self._buffer, self._parameter, self._index = buffer, parameter, index

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]

    def is_last(self) -> bool:
        return True

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor


HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bf16": (bf16_hook, Bf16State),
    "int8": (int8_hook, lambda group=None: Int8State(group, chunk_size=256)),
    "int8_all_gather": (int8_hook, lambda group=None: Int8State(group, chunk_size=256, scheme="all_gather")),
    "topk": (topk_hook, lambda group=None: TopKState(group, ratio=0.1)),
    "topk_all": (topk_hook, lambda group=None: TopKState(group, ratio=1.0)),
}
WITH_RESIDUAL = ("int8", "int8_all_gather", "topk")


def gradient(seed: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def true_mean(seed: int, num_ranks: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(gradient(seed, r, size, dtype).double() for r in range(num_ranks)) / num_ranks


def step(hook: Any, state: Any, buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return hook(state, PlainBucket(buffer.clone(), parameter)).wait().clone()


def one_reduction_each(rank: int, num_ranks: int) -> dict[Any, Any]:
    results = {}
    for name, (hook, make) in HOOKS.items():
        for dtype in DTYPES:
            for size in SIZES:
                state = make()
                out = step(hook, state, gradient(1, rank, size, dtype), torch.zeros(size))
                results[name, dtype, size] = (out, state.bytes_on_wire, state.bytes_uncompressed)
    return results


def running_sums(rank: int, num_ranks: int) -> dict[str, Any]:
    """Sum of what the hook gave over the steps, and what the mean of the ranks' residuals still owes."""
    results = {}
    for name in WITH_RESIDUAL:
        hook, make = HOOKS[name]
        state, parameter = make(), torch.zeros(5003)
        total, errors = torch.zeros(5003, dtype=torch.float64), []
        truth = torch.zeros(5003, dtype=torch.float64)
        for seed in range(NUM_STEPS):
            total += step(hook, state, gradient(seed, rank, 5003), parameter).double()
            truth += true_mean(seed, num_ranks, 5003)
            errors.append(float((total - truth).norm()))
        owed = state.residuals[0].tensors[{"topk": "left_out"}.get(name, "own")].clone()
        dist.all_reduce(owed)
        results[name] = {"errors": errors, "total": total, "truth": truth, "owed": owed / num_ranks}
    return results


def resumed(rank: int, num_ranks: int) -> dict[str, Any]:
    results = {}
    for name in WITH_RESIDUAL:
        hook, make = HOOKS[name]
        parameter = torch.zeros(5003)
        state = make()
        straight = [step(hook, state, gradient(seed, rank, 5003), parameter) for seed in range(6)]
        first = make()
        for seed in range(3):
            step(hook, first, gradient(seed, rank, 5003), parameter)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = make()
        second.load_state_dict(torch.load(file, weights_only=True))
        other_parameter = torch.zeros(5003)  # a new process has new objects
        again = [step(hook, second, gradient(seed, rank, 5003), other_parameter) for seed in range(3, 6)]
        results[name] = {
            "straight": straight[3:],
            "resumed": again,
            "bytes": (state.bytes_on_wire, second.bytes_on_wire),
            "resets": second.num_residual_resets,
        }
    return results


def not_finite(rank: int, num_ranks: int) -> dict[Any, Any]:
    results = {}
    for name, (hook, make) in HOOKS.items():
        for bad in (float("nan"), float("inf"), float("-inf")):
            state, parameter = make(), torch.zeros(5003)
            step(hook, state, gradient(0, rank, 5003), parameter)
            kept = {k: t.clone() for k, t in state.residuals[0].tensors.items()} if name in WITH_RESIDUAL else {}
            poisoned = gradient(1, rank, 5003)
            if rank == num_ranks - 1:
                poisoned[17] = bad
            during = step(hook, state, poisoned, parameter)
            held = all(torch.equal(state.residuals[0].tensors[k], t) for k, t in kept.items())
            after = step(hook, state, gradient(2, rank, 5003), parameter)
            results[name, bad] = {"during": during, "after": after, "residual_held": held}
    return results


def unusual_buckets(rank: int, num_ranks: int) -> dict[Any, Any]:
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    results: dict[Any, Any] = {}
    for name, (hook, make) in HOOKS.items():
        own = gradient(3, rank, 100)
        state = make(alone)
        results[name, "alone"] = (
            torch.equal(step(hook, state, own, torch.zeros(100)), own),
            state.bytes_on_wire,
        )
        state = make()
        results[name, "empty"] = (
            step(hook, state, torch.empty(0), torch.zeros(0)).numel(),
            state.bytes_on_wire,
        )
        complex_gradient = torch.complex(gradient(4, rank, 50), gradient(5, rank, 50))
        results[name, "complex"] = step(hook, make(), complex_gradient, torch.zeros(50))
        sparse = torch.sparse_coo_tensor([[rank, 7]], [1.0, 2.0], (10,), check_invariants=True)
        results[name, "sparse"] = hook(make(), PlainBucket(sparse, torch.zeros(10))).wait().to_dense()
        try:
            hook(make(), PlainBucket(torch.ones(3, dtype=torch.int64), torch.zeros(3)))
            results[name, "integer"] = "accepted"
        except TypeError as error:
            results[name, "integer"] = str(error)
    return results


def many_in_flight(rank: int, num_ranks: int) -> dict[str, list[torch.Tensor]]:
    """Several buckets under way at once, with ranks out of step in time."""
    results = {}
    jitter = random.Random(rank)
    for name, (hook, make) in HOOKS.items():
        state, sizes = make(), (3000, 10, 5003, 1, 700, 20000)
        parameters = [torch.zeros(size) for size in sizes]
        outs = []
        for round_index in range(8):
            futures = []
            for index, size in enumerate(sizes):
                time.sleep(jitter.random() * 0.003)
                bucket = PlainBucket(gradient(10 * round_index + index, rank, size), parameters[index], index)
                futures.append(hook(state, bucket))
            outs = [future.wait().clone() for future in futures]
        results[name] = outs
    return results


def changed_layout(rank: int, num_ranks: int) -> dict[str, Any]:
    state, hook = TopKState(ratio=0.1), topk_hook
    step(hook, state, gradient(0, rank, 64), torch.zeros(64))
    step(hook, state, gradient(1, rank, 32), torch.zeros(32))
    saved = state.state_dict()
    wrong_rank = {**saved, "rank": (rank + 1) % num_ranks}
    try:
        TopKState().load_state_dict(wrong_rank)
        message = ""
    except ValueError as error:
        message = str(error)
    return {"resets": state.num_residual_resets, "message": message}


def trained_model(rank: int, num_ranks: int) -> dict[Any, Any]:
    """A small model under torch's wrapper and under ours, with each hook."""
    wrappers: dict[str, Any] = {"torch": TorchDDP}
    try:
        import lockstep

        wrappers["lockstep"] = lockstep.DistributedDataParallel
    except (ImportError, AttributeError):
        pass
    results = {}
    for wrapper_name, wrapper in wrappers.items():
        for name, (hook, make) in HOOKS.items():
            torch.manual_seed(0)
            layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
            model = wrapper(nn.Sequential(*layers), bucket_cap_mb=0.01)
            state = make()
            model.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            losses = []
            for seed in range(30):
                inputs = gradient(seed % 4, rank, 32 * 16).view(32, 16)
                loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            results[wrapper_name, name] = {"losses": losses, "weights": weights, "bytes": state.bytes_on_wire}
    return results


CHECKS = (
    one_reduction_each,
    running_sums,
    resumed,
    not_finite,
    unusual_buckets,
    many_in_flight,
    changed_layout,
    trained_model,
)


def main() -> None:
    num_ranks, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    results = {check.__name__: check(rank, num_ranks) for check in CHECKS}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
