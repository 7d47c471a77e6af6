"""What compression left out of each bucket, kept to be added to the next step's gradient (error feedback).

A residual belongs to a bucket layout. It is dropped, and the drop is counted, when the bucket's parameters
change: torch's DDP lays its buckets out anew after the first step, lockstep's layout stays.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.hooks.state import Bucket, CompressionState


@dataclass
class Residual:
    shapes: list[list[int]]
    """Shapes of the bucket's parameters in order: what can still be compared after a resume."""
    parameters: list[weakref.ref[torch.Tensor]] | None
    """The same parameters themselves, within this process; None when just loaded.

    Weak references and not ``id``: the id of a parameter that was freed may be given to another one.
    """
    tensors: dict[str, torch.Tensor]


class ErrorFeedbackState(CompressionState):
    """A compression state that carries residuals from one step to the next."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.residuals: dict[int, Residual] = {}
        self.num_residual_resets = 0

    def residual_of(self, bucket: Bucket, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The tensors kept for this bucket, made by ``make`` when the bucket is new or has changed."""
        parameters = bucket.parameters()
        kept = self.residuals.get(bucket.index())
        if kept is not None and kept.parameters is None:
            self._adopt_loaded(kept, bucket, parameters)
        if kept is not None and _same_objects(kept.parameters, parameters):
            return kept.tensors
        if kept is not None:
            self.num_residual_resets += 1
        shapes = [list(parameter.shape) for parameter in parameters]
        fresh = Residual(shapes, [weakref.ref(parameter) for parameter in parameters], make())
        self.residuals[bucket.index()] = fresh
        return fresh.tensors

    def _adopt_loaded(self, kept: Residual, bucket: Bucket, parameters: list[torch.Tensor]) -> None:
        shapes = [list(parameter.shape) for parameter in parameters]
        if shapes == kept.shapes:
            device = bucket.buffer().device
            kept.tensors = {name: tensor.to(device) for name, tensor in kept.tensors.items()}
            kept.parameters = [weakref.ref(parameter) for parameter in parameters]
            return
        warnings.warn(
            f"the saved residual of bucket {bucket.index()} is for parameters of shapes {kept.shapes}, but "
            f"the bucket now holds {shapes}: it starts from zero, so this run is not bitwise equal to one "
            "that was not interrupted. Use the bucket layout of the saved run (same model, same "
            "bucket_cap_mb).",
            stacklevel=3,
        )

    @property
    def residual_bytes(self) -> int:
        """Memory this rank holds for residuals."""
        return sum(t.numel() * t.element_size() for kept in self.residuals.values() for t in kept.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """Counters and residuals of this rank; every rank saves its own, for they differ between ranks."""
        return {
            **super().state_dict(),
            "num_ranks": self.num_ranks,
            "rank": self.rank,
            "residuals": {
                index: {
                    "shapes": kept.shapes,
                    "tensors": {name: tensor.detach().clone() for name, tensor in kept.tensors.items()},
                }
                for index, kept in self.residuals.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.is_initialized():
            saved, now = (state["rank"], state["num_ranks"]), (self.rank, self.num_ranks)
            if saved != now:
                raise ValueError(
                    f"this residual was saved by rank {saved[0]} of {saved[1]}, but is loaded by rank "
                    f"{now[0]} of {now[1]}. Load each rank's own file, or start with a fresh state when the "
                    "world changed."
                )
        super().load_state_dict(state)
        self.residuals = {
            int(index): Residual(
                [list(shape) for shape in kept["shapes"]],
                None,
                {name: tensor.clone() for name, tensor in kept["tensors"].items()},
            )
            for index, kept in state["residuals"].items()
        }


def _same_objects(kept: list[weakref.ref[torch.Tensor]] | None, now: list[torch.Tensor]) -> bool:
    return (
        kept is not None
        and len(kept) == len(now)
        and all(reference() is parameter for reference, parameter in zip(kept, now, strict=True))
    )


def commit_if_finite(result: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Keep each new residual only if the reduced bucket is finite; otherwise leave the old one as it was.

    An overflow (a GradScaler step that will be skipped) would otherwise stay in the residual for ever. The
    result is the same on all ranks, so all ranks decide alike, and the decision stays on the device.
    """
    finite = torch.isfinite(result).all()
    for kept, new in pairs:
        torch.where(finite, new, kept, out=kept)
