"""The wrapper: torch's DistributedDataParallel by the same names, on our reducer.

The constructor is a recipe of named calls that make the parts, each in a file of its own; ``forward`` is three moments
(before, the module, after).  The names that people and libraries reach for inside torch's class are forwarded to the
parts in ``ddp/torch_names.py``.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from lockstep import settings, torch_private
from lockstep.agree.model import agree_on_model, wrap_failures_told
from lockstep.ddp import setup
from lockstep.ddp.buffers import BufferSync
from lockstep.ddp.comm_hooks import check_comm_hook
from lockstep.ddp.compilation import Compilation
from lockstep.ddp.delay import delayed_reduction, make_delayed_equal
from lockstep.ddp.finalization import ManualFinalization
from lockstep.ddp.logbook import Logbook, note_engine_errors, throw
from lockstep.ddp.options import BucketOrder, Device, Options, Overlap
from lockstep.ddp.peers import Peers
from lockstep.ddp.plan_keeper import PlanKeeper
from lockstep.ddp.precision import LowPrecision
from lockstep.ddp.torch_names import TorchNames
from lockstep.ddp.torch_reducer import TorchReducer
from lockstep.ddp.uneven import UnevenInputs
from lockstep.engine import step_guard
from lockstep.engine.bucket import Slot
from lockstep.engine.delayed import DelayedReduction
from lockstep.engine.feeders.dist_autograd import DistAutogradFeeder
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.grad_memory import GradMemory
from lockstep.engine.module_state import sync_module_states
from lockstep.engine.optimizer_in_backward import take_over_optimizers
from lockstep.engine.reducer import Reducer
from lockstep.engine.step import Check, SyncStep
from lockstep.graph.backend import OverlapCompiler
from lockstep.graph.explain import Explanation
from lockstep.observe.logging_data import LoggingData
from lockstep.observe.metrics import metrics_of
from lockstep.observe.timeline import Timeline, now
from lockstep.plan import BucketCaps, Plan
from lockstep.state_dict import rename_keys

_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024
# What belongs to this process; a copy makes its own.
_LIVE = (
    "reducer",
    "step",
    "logger",
    "device_mesh",
    "_peers",
    "_precision",
    "_hooks",
    "_log",
    "_keeper",
    "_buffer_sync",
    "_uneven",
    "_compilation",
    "_finalization",
    "_dist_autograd",
    "_delayed",
    "_region",
)

if TYPE_CHECKING:  # type checkers know nothing of ``register`` below
    _Base = nn.parallel.DistributedDataParallel
else:

    class _Base(nn.Module, Joinable):
        """What torch's class is made of."""


class DistributedDataParallel(TorchNames, _Base):
    """Data parallelism for a module: every rank computes on its own inputs and all ranks apply the mean gradient.

    Gradients are reduced in buckets while the backward still runs.  The arguments are those of
    ``torch.nn.parallel.DistributedDataParallel``; what differs:

    Args:
        gradient_as_bucket_view: ``None`` (default) lets ``.grad`` point into the buffer it was reduced in, a new one in
            each step, so that nothing is copied back and old references stay valid; ``True`` keeps the buffers, so that
            addresses never change; ``False`` copies results into memory that ``.grad`` owns.
        lazy_bucket_allocation: as in torch 2.15.  Buffers are allocated when a bucket becomes whole anyway, except where
            ``gradient_as_bucket_view=True`` keeps them: with True here, too, they are not kept between steps.
        plan: a :class:`lockstep.Plan` (or its JSON) to use instead of a new one.  A resumed run that passes the plan it
            was saved with keeps the layout, and so the bits, of the run before.
        bucket_order: ``"declared"`` (default) fills buckets in the reverse of declaration order, fixed before the first
            backward; ``"observed"`` takes the order in which rank 0 saw gradients become ready in the first step,
            agreed and recorded in ``plan.order``.
        overlap: how a compiled model overlaps communication with its backward.  ``"graph"``: the reduction of each
            bucket starts inside the one compiled backward graph; ``"split"``: the graph is cut at bucket boundaries and
            each part compiled by your backend; ``"none"``: the reduction starts when the compiled backward has
            returned.  ``None`` (default) is ``"graph"``, and ``"split"`` for backends that do not trace a backward.
    """

    # Compilers ask the class which wrapper is running.
    _active_ddp_module: ClassVar[Any] = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        plan: Plan | str | None = None,
        bucket_order: BucketOrder = "declared",
        overlap: Overlap | None = None,
        check: Check = "step",
    ) -> None:
        nn.Module.__init__(self)  # Joinable's own state is the part's, see uneven.py
        self._options = options = Options(
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
            lazy_bucket_allocation=lazy_bucket_allocation,
            plan=plan,
            bucket_order=bucket_order,
            overlap=overlap,
            check=check,
        )
        self.require_backward_grad_sync = True
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.logger = LoggingData()
        self._peers = Peers(setup.choose_process_group(process_group, device_mesh), check)
        with wrap_failures_told(self._peers.board if init_sync else None):
            self._take_module(module)
            slots, chosen = self._make_plan()
            if init_sync:
                self._make_ranks_equal(chosen)
            self._build_parts(slots, chosen)
        if options.delayed_names:
            self._delay(init_sync)
        if static_graph:
            self._set_static_graph()

    # ---------------------------------------------------------------- construction

    def _take_module(self, module: nn.Module) -> None:
        """Name its parameters, and see where it lives."""
        options = self._options
        delayed = list(options.delay_all_reduce_named_params or ())
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore |= set(options.delayed_names)
        named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        setup.check_parameters(named, all_delayed=bool(delayed))
        self._module_parameters = [p for _, p in named]
        self._placement = setup.choose_placement(
            self._module_parameters or [p for _, p in delayed], options.device_ids, options.output_device
        )
        self.module = module

    def _make_plan(self) -> tuple[list[Slot], Plan]:
        self._caps: BucketCaps = self._options.caps()
        slots = setup.trainable_slots(self.module, self.parameters_to_ignore)
        specs = setup.specs_of(slots, setup.sparse_parameter_names(self.module))
        plan = setup.choose_plan(specs, self._caps, self._options.given_plan())
        if self._placement.device_type == "cpu" and setup.has_sync_batch_norm(self.module):
            throw(self.logger, ValueError, "SyncBatchNorm layers only work with GPU modules")
        return slots, plan

    def _make_ranks_equal(self, plan: Plan) -> None:
        """Compare models and options with the other ranks, then take rank 0's parameters."""
        options, peers = self._options, self._peers
        if peers.board is not None:
            ignored = self.parameters_to_ignore - set(options.delayed_names)
            compared = options.compared(self.parameters_to_ignore, self._placement.device_type, peers.world)
            mine = setup.describe(self.module, ignored, compared, plan, with_buffers=options.syncs_buffers_at_wrap)
            agree_on_model(peers.board, mine, settings.agreement_timeout())
        sync_module_states(
            self.module,
            peers.group,
            source=0,
            ignored=self.parameters_to_ignore,
            with_buffers=options.syncs_buffers_at_wrap,
            chunk_bytes=_BROADCAST_CHUNK_BYTES,
            watch=peers.watch,
        )

    def _build_parts(self, slots: list[Slot], plan: Plan) -> None:
        options, module, peers, device = self._options, self.module, self._peers, self._placement.device
        self._precision = LowPrecision(options.mixed_precision, module)
        memory = GradMemory(options.ownership, self._precision.reduce_dtype)
        me = weakref.ref(self)  # no part holds its owner, so that it goes when the last reference to it goes
        self.step = SyncStep(
            Reducer(plan, slots, peers.transport(), memory, Timeline(peers.rank)),
            peers.lane,
            peers.control,
            name=peers.name,
            wants_sync=lambda: (ddp := me()) is not None and ddp._pass_synchronises(),
            finds_unused=options.find_unused_parameters,
            skips_unused_buckets=options.skip_all_reduce_unused_params,
            check=options.check,
        )
        self._precision.serve(self.step)
        note_engine_errors(self.logger, self.step)
        self._hooks = HookFeeder(self.step)
        self._dist_autograd = DistAutogradFeeder(self.step)
        self._finalization = ManualFinalization(self.step, low_precision=options.mixed_precision is not None)
        self.reducer: Any = TorchReducer(self.step, self._hooks, self.logger, self._finalization, _group_updater(me))
        self._log = Logbook(self.logger, self.step, peers, module, self._placement, options, self._caps)
        self._keeper = PlanKeeper(
            module,
            self._module_parameters,
            self.parameters_to_ignore,
            device,
            self.step,
            self._hooks,
            peers,
            self._log,
            caps=self._caps,
            order=options.bucket_order,
        )
        self._buffer_sync = BufferSync(
            module,
            self.parameters_to_ignore,
            self.step,
            peers,
            chunk_bytes=_BROADCAST_CHUNK_BYTES,
            syncs_in_forward=options.syncs_buffers_in_forward,
        )
        self._uneven = UnevenInputs(
            module,
            self.parameters_to_ignore,
            device,
            self.step,
            peers,
            self._keeper,
            self._buffer_sync,
            self.logger,
        )
        self._compilation = Compilation(
            module,
            device,
            self.step,
            self._keeper,
            peers,
            self._uneven,
            overlap=options.overlap,
            caps=self._caps,
            plan_is_given=options.plan is not None,
            sizes_are_open=self._caps == BucketCaps() and options.plan is None and options.bucket_order == "declared",
        )
        # What a compiler sees of a forward, as a function of this wrapper alone: compilers keep their graphs by code
        # object, so a shared one would hand this wrapper another one's graphs, and run out of room for them.
        self._region = torch_private.own_code(type(self)._run_ddp_forward)
        self._delayed: DelayedReduction | None = None
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        step_guard.watch(self.step)
        # The hooks on the parameters must not outlive the wrapper.
        weakref.finalize(self, self._hooks.detach)
        self._log.note_plan()

    def _delay(self, init_sync: bool) -> None:
        """Give the delayed parameters a reducer of their own."""
        names, trigger = self._options.delayed_names, self._options.param_to_hook_all_reduce
        assert trigger is not None
        if init_sync:
            make_delayed_equal(self.module, names, self._peers, _BROADCAST_CHUNK_BYTES)
        self._delayed = delayed_reduction(
            self.module,
            names,
            trigger,
            self.step.reducer.transport,
            ownership=self._options.ownership,
            caps=self._caps,
        )
        weakref.finalize(self, self._delayed.detach)

    def _set_static_graph(self) -> None:
        """Promise that every step uses the same parameters, as often as the first one does."""
        step = self.step
        if step.static_graph:
            warnings.warn("static_graph is already set; there is no need to set it again.", stacklevel=2)
            return
        if step.num_windows or step.state.value != "idle":
            throw(
                self.logger,
                RuntimeError,
                "_set_static_graph should be called before training loop starts, that is before the first backward.",
            )
        step.static_graph = True
        self.logger.values["static_graph"] = 1
        if step.finds_unused:
            warnings.warn(
                "find_unused_parameters=True is not needed with static_graph=True: the first iteration shows which "
                "parameters are unused. Make sure that this set does not change during training.",
                stacklevel=2,
            )

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group (a changed world); the window in progress is forgotten."""
        self.step.reset()
        self._keeper.is_confirmed = False
        if not torch_private.rank_not_in_group(new_process_group):
            self._peers.move(new_process_group, self.step)
            if self._delayed is not None:
                self._delayed.use_transport(self.step.reducer.transport)

    # ---------------------------------------------------------------- what there is to see

    @property
    def plan(self) -> Plan:
        """What travels together: print it, or save ``plan.to_json()`` with a checkpoint."""
        return self._keeper.plan

    def metrics(self) -> dict[str, float]:
        """Return the last step that synchronised as a flat dict of numbers, for any logger; see docs/observing.md."""
        reducer = self.step.reducer
        steps = reducer.timeline.steps
        in_graph = sum(bucket.left_in_graph for bucket in reducer.buckets)
        return metrics_of(steps[-1] if steps else None, reducer.plan, in_graph)

    def explain_compilation(self) -> Explanation:
        """See :func:`lockstep.explain`."""
        return self._compilation.explain()

    # ---------------------------------------------------------------- when gradients are synchronised

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, gradients add up locally; the first backward outside reduces all of them.

        It is the backward that counts: where the forward runs does not matter.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _pass_synchronises(self) -> bool:
        return self._uneven.consume_decision() if self._uneven.is_on else self.require_backward_grad_sync

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: ranks that run out of data mirror the others' collectives until all are done."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def reset_sync_window(self) -> None:
        """Forget the reduction that is under way, on all ranks, after an error in a backward that was caught."""
        self.step.reset_together()
        self._precision.restore()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a backward that synchronises ends with a call of :meth:`finalize_backward`, instead of by itself.

        Set it before a forward, or after the backward was finalised.
        """
        return self._finalization.required

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._finalization.require(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` must wait until the coming backward has returned.

        Otherwise a hook in the backward may call it too, once the gradients of all parameters are there.
        """
        return self._finalization.only_after_backward

    def finalize_backward(self) -> None:
        """Wait for the reductions under way and write ``.grad``; once per backward that synchronises."""
        self._finalization.finalize()

    # ---------------------------------------------------------------- forward

    # A compiler leaves this frame alone and compiles the module inside it, as one region without breaks: what a
    # forward does before and after the module (buffers, join, logging) is not for a graph.
    @torch_private.leave_frame_to_python
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise RuntimeError("torch.export cannot export a data-parallel wrapper; export lockstep.unwrap(model).")
        if not self._compilation.has_asked and torch.is_grad_enabled() and not self._uneven.is_on:
            self._compilation.measure_before(torch_private.compiler_is_watching())
        with torch_private.RecordFunction("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            before = DistributedDataParallel._active_ddp_module
            before_torch = torch_private.TorchDDP._active_ddp_module
            DistributedDataParallel._active_ddp_module = torch_private.TorchDDP._active_ddp_module = self
            try:
                output = self._region(self, *inputs, **kwargs)
            except BaseException:
                self._precision.restore()  # whoever catches it may save a checkpoint
                raise
            finally:
                DistributedDataParallel._active_ddp_module = before
                torch_private.TorchDDP._active_ddp_module = before_torch
            return self._post_forward(output)

    @torch.compiler.disable
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._forward_start = now()
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled():
            self.step.lane.forget_broken_pass()
            self.step.note_forward()
            # A checkpoint may run the forward again, inside the backward.
            if self.require_backward_grad_sync and not torch_private.in_backward():
                self._begin_iteration()
            if self._delayed is not None:
                self._delayed.begin()
            if not torch_private.in_backward():
                self._keeper.follow_module()
            self._dist_autograd.attach_in_context()
        self._uneven.notify()
        if torch.is_grad_enabled():
            self._keeper.confirm()
        if self._buffer_sync.will_sync_before:
            self._sync_buffers()
        self._uneven.decide(self.require_backward_grad_sync)
        if self._placement.device_ids:
            device = torch.device(self._placement.device_type, self._placement.device_ids[0])
            moved, moved_kwargs = torch_private.inputs_to_device(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self._precision.begin_forward(inputs, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Read here so that the compiler guards on it: graphs are made for a plan and a strategy.
        if self._keeper.generation == self._compilation.overlap:
            return None  # never
        return self.module(*inputs, **kwargs)

    @torch.compiler.disable
    def _post_forward(self, output: Any) -> Any:
        if self._buffer_sync.will_sync_after:
            self._sync_buffers()
        if torch.is_grad_enabled():
            self._buffer_sync.is_due = self.require_backward_grad_sync
            self._hooks.watch_outputs(output)
        else:
            self._buffer_sync.is_due = False
            self._precision.restore()
        self.step.reducer.timeline.record("forward", self._forward_start, now())
        return output

    def _lazy_init(self) -> None:
        """Do what can only be done just before the first forward."""
        take_over_optimizers(self.step, self._module_parameters)
        self._lazy_init_ran = True

    def _begin_iteration(self) -> None:
        """Check that the window before is finished, and log it: a new one may open."""
        self._finalization.require_finalized()
        self.step.require_finished()
        self._compilation.check()
        self._log.begin_iteration()

    # ---------------------------------------------------------------- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets; see torch's documentation of communication hooks.

        The hook is called when a bucket is complete and returns a future that holds the reduced buffer.  It divides by
        the world size itself if it wants a mean.
        """
        check_comm_hook(hook, self.logger)
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.step.reducer.set_comm_hook(state, hook, name)
        self.logger.values["comm_hook"] = name

    # ---------------------------------------------------------------- as a module

    @contextmanager
    @torch.compiler.disable(recursive=False)
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Be the wrapper that is running, for compilers."""
        before, before_torch = DistributedDataParallel._active_ddp_module, torch_private.TorchDDP._active_ddp_module
        DistributedDataParallel._active_ddp_module = torch_private.TorchDDP._active_ddp_module = self
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = before
            torch_private.TorchDDP._active_ddp_module = before_torch

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What ``.to()``, ``.cuda()``, ``.half()`` come down to; it may replace parameters."""
        self._keeper.look_again()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        rename_keys(state_dict, prefix, set(self.module.state_dict(prefix=f"{prefix}module.")))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # ---------------------------------------------------------------- copies

    def _check_default_group(self) -> None:
        try:
            is_default = self._peers.group == torch_private.default_group()
        except (RuntimeError, ValueError):
            is_default = False
        if not is_default:
            throw(
                self.logger,
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group.",
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for live in _LIVE:
            state.pop(live, None)
        state["_options"] = replace(
            self._options,
            process_group=None,
            device_mesh=None,
            plan=self.plan.to_json(),
            overlap=self._compilation.overlap,
            find_unused_parameters=self.step.finds_unused,
            static_graph=self.step.static_graph,
            broadcast_buffers=None,
            forward_sync_buffers=self._buffer_sync.syncs_in_forward,
            check_reduction=False,
        )
        state["_saved"] = (self._buffer_sync.hook, self._buffer_sync.is_due, self.step.ends_by_hand)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with the same layout, the default group, and fresh parts."""
        hook, is_due, ends_by_hand = state.pop("_saved")
        nn.Module.__setstate__(self, state)
        options = self._options
        self.logger = LoggingData()
        self._peers = Peers(torch_private.default_group(), options.check, "copies")
        self._build_parts(*self._make_plan())
        self._buffer_sync.hook, self._buffer_sync.is_due = hook, is_due
        self.step.ends_by_hand = ends_by_hand
        if options.delayed_names:
            self._delay(init_sync=False)
        if options.static_graph:
            self._set_static_graph()


# isinstance(model, torch.nn.parallel.DistributedDataParallel) is how libraries ask "is this wrapped?".
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)  # type: ignore[attr-defined]


def _group_updater(reference: weakref.ref[DistributedDataParallel]) -> Callable[[Any], None]:
    def update(group: Any) -> None:
        ddp = reference()
        if ddp is not None:
            ddp._update_process_group(group)

    return update


def _overlap_compiler(
    bucket_bytes_cap: int, backend_compile_fn: Callable[..., Any], first_bucket_cap: int | None = None
) -> OverlapCompiler | None:
    """For the wrapper that runs, if it is ours: see graph/backend.py."""
    ddp = DistributedDataParallel._active_ddp_module
    return ddp._compilation.compiler_for(backend_compile_fn) if isinstance(ddp, DistributedDataParallel) else None


torch_private.stand_in_for_ddp_optimizer(_overlap_compiler)

# Where users find it; the file is a matter of ours.
DistributedDataParallel.__module__ = "lockstep.ddp"
DDP = DistributedDataParallel
