"""What ``ddp.reducer`` is: names of torch's own reducer that libraries and algorithms call, each with its meaning.

torch's reducer plans its buckets after the first backward; here they are fixed before it, so what prepares or rebuilds
them has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ddp.finalization import ManualFinalization
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.exchange import HookExchange
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.grad_bucket import GradBucket
from lockstep.engine.grads import set_gradient
from lockstep.engine.step import SyncStep
from lockstep.engine.transport import Transport
from lockstep.plan import Plan


class TorchReducer:
    """A thin face over one step and its parts."""

    def __init__(
        self,
        step: SyncStep,
        feeder: HookFeeder,
        logger: Any,
        finalization: ManualFinalization,
        update_process_group: Callable[[Any], None],
    ) -> None:
        self._finalization = finalization
        self._step = step
        self._feeder = feeder
        self._logger = logger
        self._update_group = update_process_group

    # ---------------------------------------------------------------- the parts

    @property
    def plan(self) -> Plan:
        return self._step.reducer.plan

    @property
    def buckets(self) -> list[LiveBucket]:
        return self._step.reducer.buckets

    @property
    def slots(self) -> list[Slot]:
        return self._step.reducer.slots

    @property
    def transport(self) -> Transport:
        return self._step.reducer.transport

    @property
    def num_buckets_reduced(self) -> int:
        return self._step.reducer.num_buckets_reduced

    # ---------------------------------------------------------------- nothing to do: the plan is fixed, hooks are on

    def prepare_for_forward(self) -> None:
        """Nothing to prepare: hooks are always on."""

    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor = ()) -> None:
        """Say that the backward to come belongs to these outputs, as a forward of the wrapper would.

        Libraries call it where they run the module around the wrapper's forward.
        """
        self._step.note_forward()
        self._feeder.watch_outputs(outputs)

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were laid out anew: never, the plan was fixed before."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Nothing to record: the plan is not made from the order of the first backward."""

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool = True) -> None:
        """Nothing to set: under join() the wrapper asks itself how many ranks still have data."""

    def _delay_all_reduce(self) -> None:
        """Nothing to do: the backward has reduced what it brought, also with static_graph=True."""

    def _set_optimizer_in_backward(self) -> None:
        """Nothing to set: optimizers in the backward are found in the first forward."""

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Nothing to set: the wrapper's ``mixed_precision=`` says it."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._logger.sample_rate = sample_rate

    def set_logger(self, logger: Any) -> None:
        """Nothing to set: the wrapper logs by itself, see ``_get_ddp_logging_data``."""

    def _set_grads_to_none(self) -> None:
        """Drop all gradients."""
        for slot in self.slots:
            set_gradient(slot.parameter, None)

    # ---------------------------------------------------------------- questions

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last window, in declaration order."""
        counts = self._step.closing.used_counts
        counts = self._step.closing.local_used_counts() if counts is None else counts
        return torch.tensor(counts, dtype=torch.int32, device=self.slots[0].parameter.device)

    def get_backward_stats(self) -> list[int]:
        """Return, by parameter in declaration order, the nanoseconds from the start of the last backward to its launch.

        torch gives the time until each gradient was ready, which is not recorded here.
        """
        steps = self._step.reducer.timeline.steps
        if not steps:
            return [0] * len(self.slots)
        start = min((i.start_ns for i in steps[-1].intervals if i.name == "backward"), default=0)
        left = {i.bucket: max(0, i.end_ns - start) for i in steps[-1].intervals if i.name == "launch"}
        return [left.get(slot.bucket.index, 0) for slot in self.slots]

    def _ddp_graph_static(self) -> bool:
        return not self._step.unused_changed

    def _check_reducer_finalized(self) -> None:
        self._step.require_finished()

    # ---------------------------------------------------------------- what algorithms do with buckets

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Sum the bucket over the group, in place and without dividing."""
        return self.transport.start_all_reduce(bucket.buffer(), mean=False).future()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """What a bucket goes through in a backward: the registered hook, or the mean over the group."""
        exchange = self._step.reducer.exchange
        if isinstance(exchange, HookExchange):
            return exchange.hook(exchange.state, bucket)
        divisor = self._step.reducer.mean.divisor
        bucket.buffer().div_(self.transport.world if divisor is None else divisor)
        return self._run_allreduce_hook(bucket)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = self.buckets[-1]
        return [
            GradBucket(bucket, bucket.slots[0].parameter.new_zeros(bucket.spec.num_elements), is_last=bucket is last)
            for bucket in self.buckets
            if not bucket.spec.sparse
        ]

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        self._step.add_post_backward_futures(futures)

    # ---------------------------------------------------------------- life cycle

    def _remove_autograd_hooks(self) -> None:
        self._feeder.detach()

    def _reset_state(self) -> None:
        """Forget the window in progress, on this rank."""
        self._step.reset()

    def _update_process_group(self, new_process_group: Any) -> None:
        self._update_group(new_process_group)

    def _set_static_graph(self) -> None:
        self._step.static.is_on = True

    def _set_sparse_metadata(self, metadata: dict[str, Tensor]) -> None:
        self._step.reducer.mean.sparse_rows = dict(metadata)

    # ---------------------------------------------------------------- the end of a backward by hand

    def _set_manual_finalization_required(self, required: bool) -> None:
        self._finalization.require(required)

    def _should_finalize_after_backward(self) -> bool:
        return self._finalization.only_after_backward

    def _finalize_backward_manual(self) -> None:
        self._finalization.finalize()
