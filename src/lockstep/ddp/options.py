"""The constructor's arguments: their types, what is wrong with them by themselves, and what ranks compare.

Where torch's DistributedDataParallel has a well-known error for a bad argument, the same type and words are used,
since scripts and tests match on them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.memory import GradOwnership
from lockstep.engine.nonfinite import Policy
from lockstep.engine.union import Check
from lockstep.graph.backend import STRATEGIES
from lockstep.plan import BucketCaps, Plan

BucketOrder = Literal["declared", "observed"]
Overlap = Literal["graph", "split", "none"]
Device: TypeAlias = int | str | torch.device


@dataclass(frozen=True, kw_only=True)
class Options:
    """All arguments but the module, checked."""

    device_ids: Sequence[Device] | None
    output_device: Device | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool | None
    static_graph: bool
    delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None
    param_to_hook_all_reduce: nn.Parameter | None
    mixed_precision: Any
    device_mesh: DeviceMesh | None
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: Sequence[float] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None
    lazy_bucket_allocation: bool
    plan: Plan | str | None
    bucket_order: BucketOrder
    overlap: Overlap | None
    check: Check
    late_timeout: float | None
    nonfinite: Policy

    def __post_init__(self) -> None:
        self._check_words()
        if self.bucket_order == "observed" and self.find_unused_parameters and not self.static_graph:
            raise ValueError(
                'bucket_order="observed" needs a step in which every parameter is used, or static_graph=True; it does '
                "not go with find_unused_parameters=True."
            )
        if self.gradient_as_bucket_view not in (None, True, False):
            raise ValueError(
                f"gradient_as_bucket_view must be None, True or False, got {self.gradient_as_bucket_view!r}."
            )
        if not isinstance(self.lazy_bucket_allocation, int | None):
            raise TypeError(f"lazy_bucket_allocation must be True or False, got {self.lazy_bucket_allocation!r}.")
        if (self.delay_all_reduce_named_params is None) != (self.param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self._check_late_timeout()
        self._check_group()
        self._warn_deprecated(stacklevel=5)  # whoever called the wrapper: over this, __init__ here, __init__ there

    def _check_words(self) -> None:
        if self.bucket_order not in get_args(BucketOrder):
            raise ValueError(f'bucket_order must be "declared" or "observed", got {self.bucket_order!r}.')
        if self.check not in get_args(Check):
            raise ValueError(f'check must be "step", "collective" or "off", got {self.check!r}.')
        if self.nonfinite not in get_args(Policy):
            raise ValueError(f'nonfinite must be "warn", "raise", "skip" or "ignore", got {self.nonfinite!r}.')
        if self.overlap not in (None, *STRATEGIES):
            raise ValueError(f"overlap must be one of {', '.join(STRATEGIES)} or None, got {self.overlap!r}.")

    def _check_late_timeout(self) -> None:
        seconds = self.late_timeout
        if seconds is None:
            return
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(
                "late_timeout must be None or a number of seconds, 0 or more (0: the process group's timeout), got "
                f"{seconds!r}."
            )

    def _check_group(self) -> None:
        group = self.process_group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group that this rank belongs to, got {group!r}. "
                "(dist.new_group() returns no group on ranks that are not in it.)"
            )
        if self.device_mesh is None:
            return
        if group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if self.device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {self.device_mesh}. Pass the data-parallel axis, for "
                'example device_mesh=mesh["dp"].'
            )

    def _warn_deprecated(self, stacklevel: int) -> None:
        if self.broadcast_buffers is not None and self.forward_sync_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is "
                "deprecated and its value is ignored.",
                FutureWarning,
                stacklevel=stacklevel,
            )
        elif self.broadcast_buffers is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; note that "
                "`forward_sync_buffers=False` still makes buffers equal once, when the model is wrapped.",
                FutureWarning,
                stacklevel=stacklevel,
            )
        if self.check_reduction:
            warnings.warn(
                "check_reduction is deprecated and does nothing: each window proves that all were reduced.",
                FutureWarning,
                stacklevel=stacklevel,
            )

    # ---------------------------------------------------------------- what they come to

    @property
    def syncs_buffers_in_forward(self) -> bool:
        if self.forward_sync_buffers is not None:
            return self.forward_sync_buffers
        return True if self.broadcast_buffers is None else self.broadcast_buffers

    @property
    def syncs_buffers_at_wrap(self) -> bool:
        return True if self.forward_sync_buffers is not None else self.syncs_buffers_in_forward

    @property
    def ownership(self) -> GradOwnership:
        """Whose memory ``.grad`` is; what is allocated anew in each step cannot be kept at one address."""
        if self.gradient_as_bucket_view is None:
            return GradOwnership.ALIAS
        if not self.gradient_as_bucket_view:
            return GradOwnership.OWN
        return GradOwnership.ALIAS if self.lazy_bucket_allocation else GradOwnership.PERSISTENT

    @property
    def delayed_names(self) -> list[str]:
        return [name for name, _ in self.delay_all_reduce_named_params or ()]

    # The next two may differ between ranks by accident (a file that one of them cannot read), so they are looked at
    # where a failure is told to the others.

    def caps(self) -> BucketCaps:
        """Read the sizes of buckets."""
        return BucketCaps.from_megabytes(self.bucket_cap_mb, self.bucket_cap_mb_list)

    def given_plan(self) -> Plan | None:
        """Read the plan, if one was given."""
        if self.plan is None or isinstance(self.plan, Plan):
            return self.plan
        takes = "plan= takes a lockstep.Plan or the text that plan.to_json() returned"
        if not isinstance(self.plan, str):
            raise TypeError(f"{takes}, got {type(self.plan).__name__}.")
        try:
            return Plan.from_json(self.plan)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # A plain ValueError says by itself what is wrong with the plan: its format, or that it was changed.
            what = str(error) if type(error) is ValueError else f"Got {_shortened(self.plan)} ({error!r})."
            raise ValueError(f"{takes}. {what}") from None

    def compared(self, ignored: set[str], device_type: str, world_size: int) -> dict[str, Any]:
        """Name what must be the same on all ranks."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "forward_sync_buffers": self.syncs_buffers_in_forward,
            "bucket_cap_mb": self.bucket_cap_mb,
            "bucket_cap_mb_list": None if self.bucket_cap_mb_list is None else list(self.bucket_cap_mb_list),
            "bucket_order": self.bucket_order,
            "overlap": self.overlap,
            "check": self.check,
            "nonfinite": self.nonfinite,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "mixed_precision": self.mixed_precision,
            "delay_all_reduce_named_params": self.delayed_names,
            "ignored parameters and buffers": sorted(ignored),
            "device_type": device_type,
            "world_size": world_size,
        }


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
