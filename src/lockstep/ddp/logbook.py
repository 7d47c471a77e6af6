"""What the wrapper writes into ``_get_ddp_logging_data()``: how it was made, and samples of its steps."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from lockstep.ddp.options import Options
from lockstep.ddp.peers import Peers
from lockstep.ddp.setup import Placement, has_sync_batch_norm
from lockstep.engine.step import SyncStep
from lockstep.observe.logging_data import LoggingData
from lockstep.plan import BucketCaps


class Logbook:
    """Writes for one wrapper."""

    def __init__(
        self,
        data: LoggingData,
        step: SyncStep,
        peers: Peers,
        module: nn.Module,
        placement: Placement,
        options: Options,
        caps: BucketCaps,
    ) -> None:
        self.data = data
        self._step = step
        self._peers = peers
        self._facts = {
            "module_name": type(module).__name__,
            "device_ids": "" if placement.device_ids is None else ", ".join(map(str, placement.device_ids)),
            "output_device": -1 if placement.output_device is None else placement.output_device,
            "broadcast_buffers": options.syncs_buffers_in_forward,
            "has_sync_bn": has_sync_batch_norm(module),
            "bucket_cap_bytes": caps.cap_bytes,
            "gradient_as_bucket_view": bool(options.gradient_as_bucket_view),
            "is_multi_device_module": placement.is_multi_device,
        }

    def note_plan(self) -> None:
        """Write down how the wrapper is made, with the plan it has now."""
        plan = self._step.reducer.plan
        self.data.set_construction(
            {
                **self._facts,
                "world_size": self._peers.world,
                "rank": self._peers.rank,
                "bucket_sizes": ", ".join(str(bucket.num_bytes) for bucket in plan),
                "find_unused_parameters": self._step.finds_unused,
                "num_parameter_tensors": len(plan.parameters),
                "total_parameter_size_bytes": plan.num_bytes,
                "plan_digest": plan.digest,
            },
            [spec.dtype for spec in plan.parameters],
            dist.get_backend(self._peers.group),
        )

    def begin_iteration(self) -> None:
        """Count an iteration; sample the step before it, if it is its turn."""
        steps = self._step.reducer.timeline.steps
        if self.data.begin_iteration() and steps:
            self.data.sample(steps[-1], self._runtime_facts())

    def _runtime_facts(self) -> dict[str, str | int]:
        step, reducer = self._step, self._step.reducer
        by_name = {slot.name: slot.position for slot in reducer.slots}
        unused = [slot for slot in reducer.slots if slot.found_unused]
        return {
            # The layout is fixed before the first backward; torch's users read here whether it may still change.
            "has_rebuilt_buckets": int(not step.finds_unused or step.static.is_on),
            "rebuilt_bucket_sizes": ", ".join(str(bucket.num_bytes) for bucket in reducer.plan),
            "rebuilt_per_bucket_param_indices": ", ".join(
                " ".join(str(by_name[name]) for name in bucket.names) for bucket in reducer.plan
            ),
            "num_buckets_reduced": reducer.num_buckets_reduced,
            "unused_parameter_size": sum(slot.num_elements * slot.parameter.element_size() for slot in unused),
            "prev_iteration_grad_ready_order_indices": ", ".join(str(slot.position) for slot in step.ready_order),
            "can_set_static_graph": int(not step.unused_changed),
        }

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample one iteration in ``sample_rate``, after the first ten."""
        if sample_rate < 1:
            throw(
                self.data,
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1, got " + str(sample_rate),
            )
        self.data.sample_rate = sample_rate


def throw(data: LoggingData, kind: type[Exception], text: str) -> NoReturn:
    """Raise an error, and leave it in the logging data."""
    data.set_error_and_log(f"{kind}: {text}")
    raise kind(text)


def note_engine_errors(data: LoggingData, step: SyncStep) -> None:
    """Leave the engine's errors in the logging data."""

    def note(error: Any) -> None:
        data.set_error_and_log(f"{type(error)}: {error}")

    step.on_error = note
