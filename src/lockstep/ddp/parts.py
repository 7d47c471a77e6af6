"""The parts of a wrapper, and the order in which they are put together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.ddp.activate import activate
from lockstep.ddp.buffers import BufferSync
from lockstep.ddp.compilation import Compilation
from lockstep.ddp.delay import delayed_reduction
from lockstep.ddp.finalization import ManualFinalization
from lockstep.ddp.logbook import Logbook, note_engine_errors
from lockstep.ddp.options import Options
from lockstep.ddp.peers import Peers
from lockstep.ddp.plan_keeper import PlanKeeper
from lockstep.ddp.precision import LowPrecision
from lockstep.ddp.setup import Wrapped, renormalised_parameter_names
from lockstep.ddp.torch_reducer import TorchReducer
from lockstep.ddp.uneven import UnevenInputs
from lockstep.engine import step_guard
from lockstep.engine.delayed import DelayedReduction
from lockstep.engine.feeders.dist_autograd import DistAutogradFeeder
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.grad_memory import GradMemory
from lockstep.engine.reducer import Reducer
from lockstep.engine.step import SyncStep
from lockstep.observe.logging_data import LoggingData
from lockstep.observe.timeline import Timeline
from lockstep.plan import BucketCaps

BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024


@dataclass
class Parts:
    """What a wrapper is made of; none of them holds it, so that it goes when the last reference to it goes."""

    step: SyncStep
    hooks: HookFeeder
    dist_autograd: DistAutogradFeeder
    precision: LowPrecision
    finalization: ManualFinalization
    reducer: TorchReducer
    log: Logbook
    keeper: PlanKeeper
    buffers: BufferSync
    uneven: UnevenInputs
    compilation: Compilation
    delayed: DelayedReduction | None

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        self.hooks.detach()
        if self.delayed is not None:
            self.delayed.detach()

    def use_group(self, group: Any, peers: Peers) -> None:
        """Go on with another process group."""
        peers.move(group, self.step)
        if self.delayed is not None:
            self.delayed.use_transport(self.step.reducer.transport, self.step.lane)


def build_parts(
    wrapped: Wrapped,
    options: Options,
    peers: Peers,
    data: LoggingData,
    *,
    wants_sync: Callable[[], bool],
    update_group: Callable[[Any], None],
) -> Parts:
    """Build the engine, and around it what the wrapper needs."""
    activate()
    module, ignored, device, caps = wrapped.module, wrapped.ignored, wrapped.placement.device, wrapped.caps
    precision = LowPrecision(options.mixed_precision, module)
    memory = GradMemory(options.ownership, precision.reduce_dtype)
    step = SyncStep(
        Reducer(wrapped.plan, wrapped.slots, peers.transport(), memory, Timeline(peers.rank)),
        peers.lane,
        peers.union(),
        wants_sync=wants_sync,
        finds_unused=options.find_unused_parameters,
        skips_unused_buckets=options.skip_all_reduce_unused_params,
    )
    step.reducer.finiteness.policy = options.nonfinite
    step.drift.begins_equal = options.init_sync
    _leave_renormalised_out(module, step)
    precision.serve(step)
    note_engine_errors(data, step)
    step_guard.watch(step)
    hooks = HookFeeder(step)
    finalization = ManualFinalization(step, low_precision=options.mixed_precision is not None)
    log = Logbook(data, step, peers, module, wrapped.placement, options, caps)
    log.note_plan()
    keeper = PlanKeeper(wrapped, step, hooks, peers, log, order=options.bucket_order, is_compared=options.init_sync)
    buffers = BufferSync(
        module,
        ignored,
        step,
        peers,
        chunk_bytes=BROADCAST_CHUNK_BYTES,
        syncs_in_forward=options.syncs_buffers_in_forward,
    )
    uneven = UnevenInputs(module, ignored, device, step, peers, keeper, buffers, data)
    compilation = Compilation(
        module,
        device,
        step,
        keeper,
        peers,
        uneven,
        overlap=options.overlap,
        caps=caps,
        plan_is_given=options.plan is not None,
        sizes_are_open=caps == BucketCaps() and options.plan is None and options.bucket_order == "declared",
    )
    return Parts(
        step=step,
        hooks=hooks,
        dist_autograd=DistAutogradFeeder(step),
        precision=precision,
        finalization=finalization,
        reducer=TorchReducer(step, hooks, data, finalization, update_group),
        log=log,
        keeper=keeper,
        buffers=buffers,
        uneven=uneven,
        compilation=compilation,
        delayed=_delayed(module, options, step, caps),
    )


def _leave_renormalised_out(module: nn.Module, step: SyncStep) -> None:
    """Compare no weights that each rank changes by itself, and say so."""
    names = renormalised_parameter_names(module)
    if step.drift.weights is not None and names and step.reducer.world > 1:
        step.drift.weights.skipped = names
        warnings.warn(
            "With max_norm= an embedding renormalises in each forward the rows that this rank looks up, so the weights "
            f"of ranks drift apart there, with any data parallelism: {', '.join(sorted(names))}. Not compared.",
            stacklevel=5,
        )


def _delayed(module: nn.Module, options: Options, step: SyncStep, caps: BucketCaps) -> DelayedReduction | None:
    trigger = options.param_to_hook_all_reduce
    if trigger is None or not options.delayed_names:
        return None
    return delayed_reduction(
        module,
        options.delayed_names,
        trigger,
        step.reducer.transport,
        step.lane,
        ownership=options.ownership,
        caps=caps,
        finds_unused=options.find_unused_parameters,
    )
