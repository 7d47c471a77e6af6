"""The end of a backward by hand: torch 2.15's ``require_manual_backward_finalization``, with its errors.

What is asked of torch's reducer and what is asked of its wrapper meet here.
"""

from __future__ import annotations

from lockstep.engine.states import Kind, State
from lockstep.engine.step import SyncStep


class ManualFinalization:
    """Lets the caller choose when the reductions of one step are waited for and written to ``.grad``."""

    def __init__(self, step: SyncStep, *, low_precision: bool) -> None:
        self._step = step
        self._low_precision = low_precision

    @property
    def required(self) -> bool:
        return self._step.ends_by_hand

    def require(self, required: bool) -> None:
        """Turn it on or off, before a forward or after the backward was finalised."""
        if not isinstance(required, int | None):
            raise TypeError(f"require_manual_backward_finalization must be True or False, got {required!r}.")
        step = self._step
        if required:
            self.require_supported()
        if step.state is not State.IDLE or (step.has_forward and not step.holds_local_gradients):
            raise RuntimeError(
                "set_manual_finalization_required cannot be called after forward while a backward pass is expected or "
                "in progress. Call it before forward or after backward finalization."
            )
        if step.reducer.slots:
            step.ends_by_hand = required

    def require_supported(self) -> None:
        if not self._step.reducer.slots:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params."
            )

    @property
    def only_after_backward(self) -> bool:
        """Whether a hook inside the backward is too early: the parameters are low until its end."""
        return bool(self.required and self._low_precision)

    def require_finalized(self) -> None:
        """Raise where a forward begins while a backward still waits to be finalised."""
        if self._step.ends_by_hand and self._step.state is State.CLOSING:
            raise RuntimeError(
                "Expected to have finalized the prior backward pass before starting a new one. Call "
                "finalize_backward() after backward() when require_manual_backward_finalization is true."
            )

    def finalize(self) -> None:
        """Wait for the reductions under way and write the gradients."""
        self.require_supported()
        step = self._step
        if not step.ends_by_hand:
            raise RuntimeError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )
        if step.state is State.IDLE:
            raise RuntimeError(
                "finalize_backward() called but no gradient reduction requires finalization. This can happen if "
                "no_sync() is active or finalize_backward() was already called for this backward pass."
            )
        if step.state is State.OPEN:
            self._require_all_sent()
        step.finalize()

    def _require_all_sent(self) -> None:
        """Raise where a hook inside the backward finalises too early."""
        step = self._step
        buckets = step.reducer.buckets
        num_sent = sum(bucket.has_left for bucket in buckets)
        if step.kind is Kind.FOLLOW_UP or num_sent < len(buckets):
            raise RuntimeError(
                f"finalize_backward() called before all DDP buckets were ready. next_bucket_={num_sent} "
                f"buckets_.size()={len(buckets)}. Call finalize_backward() only after all DDP-managed parameters have "
                "computed gradients."
            )
