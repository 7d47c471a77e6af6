"""Names that torch's own algorithms and tests call on ``ddp.reducer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engine.grad_bucket import GradBucket

if TYPE_CHECKING:
    from lockstep.engine.eager import EagerBackward


class ReducerTorchNames:
    """Mixed into the reducer; ``caller`` is the eager caller that drives it."""

    caller: EagerBackward

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last window, in declaration order."""
        caller = self.caller
        return caller.local_used_map() if caller.used_map is None else caller.used_map

    def _ddp_graph_static(self) -> bool:
        return not self.caller.unused_changed

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Sum the bucket over the group, in place and without dividing."""
        reducer: Any = self
        work = dist.all_reduce(bucket.buffer(), group=reducer.process_group, async_op=True)
        return work.get_future()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """What a bucket goes through in a backward: the registered hook, or the mean over the group."""
        reducer: Any = self
        if reducer.comm_hook is not None:
            return reducer.comm_hook(reducer.comm_hook_state, bucket)
        bucket.buffer().div_(reducer.world if reducer.divisor is None else reducer.divisor)
        return self._run_allreduce_hook(bucket)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        reducer: Any = self
        last = reducer.buckets[-1]
        return [
            GradBucket(bucket, bucket.slots[0].parameter.new_zeros(bucket.spec.num_elements), is_last=bucket is last)
            for bucket in reducer.buckets
            if not bucket.spec.sparse
        ]

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        self.caller.add_post_backward_futures(futures)

    def _check_reducer_finalized(self) -> None:
        self.caller.require_finished()

    def _remove_autograd_hooks(self) -> None:
        self.caller.detach()
