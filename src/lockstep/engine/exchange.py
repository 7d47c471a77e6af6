"""The exchange: what ranks do with the content of a bucket.

    MeanExchange     the mean over the ranks, by one all-reduce
    HookExchange     whatever the user's communication hook makes of it

A sparse bucket has its own ways to a mean (``sparse.py``).  Everything else (who packs, when and in which order)
is the same for all of them, and lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from lockstep import errors
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.flight import Flight, HookFlight, Landed
from lockstep.engine.grad_bucket import GradBucket
from lockstep.engine.sparse import start_sparse
from lockstep.engine.transport import Transport

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

# torch's hooks that start one collective and nothing after it.  They are linear: two parts may be sent one by one.
_ONE_COLLECTIVE = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
)


def has_one_collective(hook: CommHook) -> bool:
    """Whether this is one of torch's hooks that start one collective, and keep nothing from step to step."""
    return any(hook is known for known in _ONE_COLLECTIVE)


def _reduces(hook: CommHook) -> bool:
    """Whether this is known to be a hook that gives the same to all who take part."""
    if hook is debugging_hooks.noop_hook:
        return False  # measures a step without communication
    return has_one_collective(hook) or str(getattr(hook, "__module__", "")).startswith("lockstep.hooks")


def _is_with_all(state: Any, ranks: Any) -> bool:
    """Whether all ranks of a group take part where a hook has this state: it may be a smaller group, or hold one."""
    group = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    if group is None or group is ranks:
        return True
    try:
        return set(dist.get_process_group_ranks(ranks)) <= set(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):
        return False  # a group that torch does not know


class Exchange(Protocol):
    # Whether the exchange of a sum is the sum of the exchanges: what came late may then be exchanged by itself.
    is_linear: bool
    # Whether all ranks are known to be given the same result.
    is_same_on_all: bool

    @property
    def keeps_order(self) -> bool:
        """Whether all collectives are issued when the exchange is started, and none when another one has ended."""

    @property
    def name(self) -> str: ...

    def scale(self, like: Tensor) -> float:
        """What gradients like this are multiplied with before they leave."""

    def start(self, bucket: LiveBucket, flat: Tensor, *, is_last: bool) -> Flight: ...


class MeanExchange:
    """The mean over the ranks."""

    is_linear = keeps_order = is_same_on_all = True
    name = ""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # None: the mean over the group. A number (set by join): what to divide by instead.
        self.divisor: float | None = None
        self.sparse_rows: dict[str, Tensor] = {}

    def scale(self, like: Tensor) -> float:
        if self.divisor is None and self._transport.averages(like):
            return 1.0
        return self._factor

    @property
    def _factor(self) -> float:
        return 1.0 / (self._transport.world if self.divisor is None else self.divisor)

    def start(self, bucket: LiveBucket, flat: Tensor, *, is_last: bool) -> Flight:
        name = f"bucket {bucket.index}"
        if flat.is_sparse:
            rows = self.sparse_rows.get(bucket.slots[0].name)
            return start_sparse(flat, self._transport, factor=self._factor, known_rows=rows, name=name)
        if flat.numel() == 0 or self._transport.is_alone:
            return Landed()  # the mean over one rank is there already
        mean = self.divisor is None and self._transport.averages(flat)
        return self._transport.start_all_reduce(flat, mean=mean, name=name)


class HookExchange:
    """A user's communication hook; it gets gradients as they are, and divides itself if it wants a mean."""

    def __init__(self, transport: Transport, state: Any, hook: CommHook, name: str) -> None:
        self._transport = transport
        self.state, self.hook, self.name = state, hook, name
        self.keeps_order = bool(getattr(hook, "keeps_order", False)) or has_one_collective(hook)
        self.is_linear = bool(getattr(hook, "is_linear", False)) or has_one_collective(hook)
        self.is_same_on_all = _reduces(hook) and _is_with_all(state, transport.process_group)

    def scale(self, like: Tensor) -> float:
        return 1.0

    def start(self, bucket: LiveBucket, flat: Tensor, *, is_last: bool) -> Flight:
        ended = self._transport.announce_hook(f"bucket {bucket.index} by the hook {self.name}", flat)
        try:
            future = self.hook(self.state, GradBucket(bucket, flat, is_last=is_last))
        except Exception as error:
            if ended is not None:
                ended(None)
            names, rank = bucket.spec.names, self._transport.shown_rank
            error.add_note(
                f"lockstep: raised by the communication hook {self.name} on rank {rank} for bucket "
                f"{bucket.index} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})."
            )
            raise
        if not (callable(getattr(future, "wait", None)) and callable(getattr(future, "then", None))):
            if ended is not None:
                ended(None)
            raise errors.bad_hook_result(self.name, type(future).__name__)
        if ended is not None:
            future.then(ended)
        return HookFlight(future, self.name, self._transport.on_stream(flat.device))
