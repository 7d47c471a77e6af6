"""The dictionary behind ``_get_ddp_logging_data()``, with the keys that tools know from torch's DDP.

Times are nanoseconds.  Runtime values are sampled: the first ten iterations, then one in ``sample_rate``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.observe.timeline import StepRecord

_ALWAYS_SAMPLED = 10
_DTYPE_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}
_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
_BACKEND_ENVIRONMENT = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}


class LoggingData:
    """Facts and sampled timings of one wrapper."""

    def __init__(self) -> None:
        self.values: dict[str, str | int] = {"iteration": 0}
        self.sample_rate = 100
        self._num_iterations = 0
        self._totals: dict[str, int] = {}
        self._num_samples = 0

    def set_construction(self, facts: Mapping[str, Any], dtypes: Sequence[str], backend: str) -> None:
        for key, value in facts.items():
            self.values[key] = int(value) if isinstance(value, bool) else value
        self.values["dtypes"] = ", ".join(sorted({_DTYPE_NAMES.get(d, d) for d in dtypes}))
        self.values["backend_name"] = backend
        for key, variable in {**_ENVIRONMENT, **_BACKEND_ENVIRONMENT.get(backend, {})}.items():
            self.values[key] = os.environ.get(variable, "N/A")
        if backend == "gloo":
            self.values["gloo_num_threads"] = 2

    def set_error_and_log(self, text: str) -> None:
        self.values["has_error"] = 1
        self.values["error"] = text

    def begin_iteration(self) -> bool:
        """Count an iteration; says whether the runtime values of the one before it are sampled now."""
        iteration = self._num_iterations
        self._num_iterations += 1
        if iteration >= _ALWAYS_SAMPLED and iteration % self.sample_rate:
            return False
        self.values["iteration"] = iteration
        return True

    def sample(self, step: StepRecord, facts: Mapping[str, str | int]) -> None:
        """Take the timings of a finished step."""
        self.values.update(facts)
        forward, backward, travel = (_bounds(step, name) for name in ("forward", "backward", "travel"))
        if forward is None or backward is None or travel is None:
            return
        overlap = max(0, min(backward[1], travel[1]) - max(backward[0], travel[0]))
        # Compute of the forward lasts until the backward begins: the loss belongs to it.
        times = {
            "forward_compute_time": backward[0] - forward[0],
            "backward_compute_time": backward[1] - backward[0],
            "backward_comm_time": travel[1] - travel[0],
            "backward_compute_comm_overlap_time": overlap,
        }
        self._num_samples += 1
        for key, value in times.items():
            self._totals[key] = self._totals.get(key, 0) + value
            self.values[key] = value
            self.values[f"avg_{key}"] = self._totals[key] // self._num_samples
        self.values["forward_compute_time_start"] = forward[0]
        self.values["backward_compute_time_start"] = backward[0]
        self.values["backward_compute_time_end"] = backward[1]
        self.values["backward_comm_time_start"] = travel[0]
        self.values["backward_comm_time_end"] = travel[1]


def _bounds(step: StepRecord, name: str) -> tuple[int, int] | None:
    intervals = [i for i in step.intervals if i.name == name]
    if not intervals:
        return None
    return min(i.start_ns for i in intervals), max(i.end_ns for i in intervals)
