"""NaN and Inf in gradients: each rank looks at what it sends, and all ranks hear of it at the end of the window.

One pass over each bucket before it leaves, and one number in the exchange that ends the window anyway; so all ranks
know in the same window which of them had it, and do the same about it.

    warn     say once per episode which rank had it and in which parameters
    raise    an error on all ranks, before an optimizer has used it
    skip     no gradients on any rank, so that the optimizer's next step changes nothing
    ignore   do not look

On a GPU the look is a kernel per bucket whose result is read when it has run, without waiting: a warning may come a
step or two late.  To raise or skip in time the host must know before the optimizer runs, so these two wait for the GPU
at the end of each window.  Infinities of a GradScaler are its own business, and left to it.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.grads import set_gradient
from lockstep.errors import NonFinite

if TYPE_CHECKING:
    from lockstep.engine.transport import Transport

logger = logging.getLogger("lockstep")

Policy = Literal["warn", "raise", "skip", "ignore"]
_MOST_NAMES = 8
# A mark that travels: 0, or these parts.
_SEEN, _SCALED = 1, 2
_BUCKET_SHIFT, _LAG_SHIFT = 2, 32
_MAX_PENDING = 64
# Types in which a sum is as wide as in single precision; torch adds up in that anyway, and faster if not asked to.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class Finiteness:
    """Looks at the buckets of one model, and does what the policy says."""

    def __init__(self, policy: Policy = "warn") -> None:
        self.policy: Policy = policy
        self.drops = False  # the gradients of this window are not to be used
        self.is_episode = False
        self._bad: list[int] = []  # buckets of this window in which this rank saw it
        self._is_scaled: bool | None = None  # whether this process has a scaler; asked once in a row of bad windows
        self._late: tuple[int, list[int]] | None = None  # of an earlier window, which nobody told yet
        self._sums: Tensor | None = None  # of this window, on the device
        self._captured: Tensor | None = None  # where captured programs write theirs
        self._pending: deque[tuple[int, Tensor, Any]] = deque()  # window, sums on the host, the event they come with

    @property
    def waits(self) -> bool:
        """Whether it must be known before the window ends."""
        return self.policy in ("raise", "skip")

    def open(self) -> None:
        """A window begins."""
        self.drops = False
        self._bad.clear()
        self._sums = None

    # ---------------------------------------------------------------- what this rank sends

    def look(self, bucket: LiveBucket, num_buckets: int) -> None:
        """Look at a bucket that is about to leave."""
        flat = bucket.flat
        if self.policy == "ignore" or flat is None:
            return
        if flat.dtype in _WIDE and flat.is_cpu and flat.layout is torch.strided:
            # Nearly always, so it is one call: a sum is an order of magnitude faster than isfinite, and only one that
            # is not finite needs the latter.
            if not math.isfinite(flat.sum().item()) and not bool(flat.isfinite().all()):
                self._bad.append(bucket.index)
            return
        if flat.numel() == 0:
            return
        values = _plain(flat)
        if values.device.type == "cpu" or (self.waits and values.device.type != "cuda"):
            if not math.isfinite(_sum(values)) and not bool(values.isfinite().all()):
                self._bad.append(bucket.index)
        elif values.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if self._captured is not None:
                torch.sum(values, dim=0, dtype=torch.float32, out=self._captured[bucket.index])
        elif values.device.type == "cuda":
            if self._sums is None or self._sums.device != values.device:
                self._sums = torch.zeros(num_buckets, dtype=torch.float32, device=values.device)
            torch.sum(values, dim=0, dtype=torch.float32, out=self._sums[bucket.index])

    def prepare_capture(self, num_buckets: int, device: torch.device) -> None:
        """Make room for what a captured program sees."""
        if self.policy == "ignore" or device.type != "cuda":
            return
        if self._captured is None or len(self._captured) != num_buckets:
            self._captured = torch.zeros(num_buckets, dtype=torch.float32, device=device)

    def note_replay(self, window: int) -> None:
        """A captured program has been launched: what it sees is read when it is there."""
        if self._captured is not None:
            self._queue(window, self._captured)

    def tell_later(self, window: int) -> None:
        """The window that just ended was compared before it began: what was seen in it is told with the next one."""
        if self._bad:
            self._late, self._bad = (window, self._bad), []

    def mark(self, window: int) -> int:
        """What this rank tells the others at the end of a window: a number, 0 where there is nothing to tell."""
        bad, lag = self._bad, 0
        self._bad = []
        if self._late is not None:
            bad, lag = self._late[1], max(0, window - self._late[0])
            self._late = None
        if self._sums is not None or self._pending:
            bad, lag = self._read_device(window, bad)
        if not bad:
            self._is_scaled = None
            return 0
        if self._is_scaled is None:
            self._is_scaled = _has_scaler()
        return _SEEN | (_SCALED * self._is_scaled) | (bad[0] << _BUCKET_SHIFT) | (lag << _LAG_SHIFT)

    def _read_device(self, window: int, bad: list[int]) -> tuple[list[int], int]:
        if self._sums is not None:
            self._queue(window, self._sums)
            self._sums = None
        if self.waits or len(self._pending) > _MAX_PENDING:
            self._pending[-1][2].synchronize()
        while self._pending and self._pending[0][2].query():
            number, host, _ = self._pending.popleft()
            found = [index for index, value in enumerate(host.tolist()) if not math.isfinite(value)]
            if found:
                return found, max(0, window - number)
        return bad, 0

    def _queue(self, window: int, sums: Tensor) -> None:
        host = torch.empty(sums.shape, dtype=torch.float32, device="cpu", pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(sums.device))
        self._pending.append((window, host, event))

    # ---------------------------------------------------------------- what all ranks do about it

    def judge(self, marks: Sequence[int], transport: Transport, step: int, buckets: Sequence[LiveBucket]) -> None:
        """After the window's gradients are there: warn, raise or drop them, by what all ranks have told."""
        ranks = [r for r, mark in enumerate(marks) if mark & _SEEN]
        if not ranks or any(mark & _SCALED for mark in marks):
            self.is_episode = self.is_episode and bool(ranks)
            return
        first = marks[ranks[0]]
        lag = first >> _LAG_SHIFT
        index = (first >> _BUCKET_SHIFT) & ((1 << (_LAG_SHIFT - _BUCKET_SHIFT)) - 1)
        self.drops = self.policy == "skip"
        if self.policy == "raise" or not self.is_episode:
            names = _names([slot for bucket in buckets for slot in bucket.slots]) if lag == 0 else []
            where = ", ".join(names[:_MOST_NAMES]) + (f", ... ({len(names)})" if len(names) > _MOST_NAMES else "")
            if not where and index < len(buckets):
                where = f"bucket {index} ({buckets[index].shown_names})"
            shown = list(map(transport.watch.shown, ranks))
            text = (
                f"Gradients of rank(s) {shown} were NaN or Inf in step {step - lag}, in {where}; averaging gives "
                "them to all ranks."
            )
            if self.policy == "raise":
                raise NonFinite(
                    f"{text} Nothing was updated.\nFix: look at the inputs and the loss of that rank; lower the "
                    "learning rate or clip gradients; or nonfinite='skip' to leave such steps out. To go on, call "
                    "reset_sync_window() and zero_grad() on all ranks.",
                    shown,
                    names,
                )
            if transport.rank in (0, *ranks):
                more = (
                    "This step is skipped on all ranks, as are others like it."
                    if self.drops
                    else "nonfinite='raise' stops there, 'skip' leaves such steps out everywhere, 'ignore' is silent."
                )
                logger.warning("%s %s", text, more)
        self.is_episode = True

    def drop(self, slots: Sequence[Slot]) -> None:
        """Take the gradients of this window away, where they are not to be used."""
        if self.drops:
            for slot in slots:
                set_gradient(slot.leaf, None)

    def refuse_compiled(self, slots: Sequence[Slot]) -> None:
        """A compiled optimizer has its gradients already; raise if it was to be given none."""
        if self.drops and any(slot.leaf.grad is not None for slot in slots):
            raise NonFinite("Gradients were NaN or Inf, and a compiled optimizer step cannot be skipped here.")


def _plain(flat: Tensor) -> Tensor:
    """The numbers of a bucket, as a dense real tensor."""
    flat = flat.detach()
    if flat.is_sparse:
        flat = flat._values()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.reshape(-1)


def _sum(values: Tensor) -> float:
    # Half precision would overflow where nothing is wrong.
    return float(values.sum() if values.dtype in _WIDE else values.sum(dtype=torch.float32))


def _names(slots: Sequence[Slot]) -> list[str]:
    """The parameters whose gradient is not finite now."""
    found = []
    for slot in slots:
        gradient = slot.leaf.grad
        if gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if local.numel() and not bool(_plain(local).isfinite().all()):
                found.append(slot.name)
    return found


def _has_scaler() -> bool:
    """Whether this process scales its losses, so that infinities are expected; asked only when there are some."""
    return any(
        found.is_enabled()
        for found in gc.get_objects()
        if issubclass(type(found), torch.amp.GradScaler)  # asking an object for its class may run code of its own
    )
