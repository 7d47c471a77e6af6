"""The wrapper: torch's DistributedDataParallel by the same names, on our reducer.

The constructor is a recipe of named calls; ``forward`` is three moments (before, the module, after).  The names that
people and libraries reach for inside torch's class live in ``ddp/torch_names.py``.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from lockstep import torch_private
from lockstep.agree.board import open_board
from lockstep.agree.control import control_of
from lockstep.agree.model import agree_on_model, wrap_failures_told
from lockstep.agree.watch import Watch
from lockstep.ddp import setup
from lockstep.ddp.activate import activate
from lockstep.ddp.compilation import Compilation
from lockstep.ddp.plan_keeper import PlanKeeping
from lockstep.ddp.torch_names import TorchNames
from lockstep.ddp.torch_reducer import TorchReducer
from lockstep.ddp.uneven import UnevenInputs
from lockstep.engine import step_guard
from lockstep.engine.audit import CollectiveAudit
from lockstep.engine.bucket import Slot
from lockstep.engine.delayed import DelayedReduction
from lockstep.engine.feeders.dist_autograd import DistAutogradFeeder
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.grad_memory import GradMemory, GradOwnership
from lockstep.engine.lane import lane_of
from lockstep.engine.mixed_precision import MixedPrecisionParameters
from lockstep.engine.module_state import broadcast_tensors, sync_module_states
from lockstep.engine.optimizer_in_backward import take_over_optimizers
from lockstep.engine.reducer import Reducer
from lockstep.engine.step import SyncStep
from lockstep.engine.transport import Transport
from lockstep.engine.union import Check, Union
from lockstep.graph.backend import STRATEGIES
from lockstep.observe.logging_data import LoggingData
from lockstep.observe.timeline import Timeline, now
from lockstep.plan import BucketCaps, Plan

logger = logging.getLogger("lockstep")

_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024
_OWNERSHIP = {None: GradOwnership.ALIAS, True: GradOwnership.PERSISTENT, False: GradOwnership.OWN}


class DistributedDataParallel(PlanKeeping, Compilation, UnevenInputs, TorchNames, nn.Module):
    """Data parallelism for a module: every rank computes on its own inputs and all ranks apply the mean gradient.

    Gradients are reduced in buckets while the backward still runs.  The arguments are those of
    ``torch.nn.parallel.DistributedDataParallel``; what differs:

    Args:
        gradient_as_bucket_view: ``None`` (default) lets ``.grad`` point into the buffer it was reduced in, a new one in
            each step, so that nothing is copied back and old references stay valid; ``True`` keeps the buffers, so that
            addresses never change; ``False`` copies results into memory that ``.grad`` owns.
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
    _active_ddp_module: ClassVar[DistributedDataParallel | None] = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        plan: Plan | str | None = None,
        bucket_order: str = "declared",
        overlap: str | None = None,
        check: Check = "step",
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.logger = LoggingData()
        if bucket_order not in ("declared", "observed"):
            raise ValueError(f'bucket_order must be "declared" or "observed", got {bucket_order!r}.')
        if bucket_order == "observed" and find_unused_parameters and not static_graph:
            raise ValueError(
                'bucket_order="observed" needs a step in which every parameter is used, or static_graph=True; it does '
                "not go with find_unused_parameters=True."
            )
        if check not in ("step", "collective", "off"):
            raise ValueError(f'check must be "step", "collective" or "off", got {check!r}.')
        self.check = check
        if overlap not in (None, *STRATEGIES):
            raise ValueError(f"overlap must be one of {', '.join(STRATEGIES)} or None, got {overlap!r}.")
        self.overlap = overlap
        if gradient_as_bucket_view not in (None, True, False):
            raise ValueError(f"gradient_as_bucket_view must be None, True or False, got {gradient_as_bucket_view!r}.")
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.process_group = setup.choose_process_group(process_group, device_mesh)
        self._delay_request: tuple[list[str], nn.Parameter] | None = None
        self._reopen_board()
        if device_mesh is not None:
            self.device_mesh = device_mesh
        with wrap_failures_told(self._board if init_sync else None):
            delayed = list(delay_all_reduce_named_params or [])
            self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            self.parameters_to_ignore |= {name for name, _ in delayed}
            named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
            setup.check_parameters(named, all_delayed=bool(delayed))
            self._module_parameters = [p for _, p in named]
            placement = setup.choose_placement(
                self._module_parameters or [p for _, p in delayed], device_ids, output_device
            )
            self.device = placement.device
            self.device_type = placement.device_type
            self.is_multi_device_module = placement.is_multi_device
            self.device_ids = placement.device_ids
            self.output_device = placement.output_device
            self.dim = dim
            self.module = module

            init_sync_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
            if check_reduction:
                warnings.warn(
                    "check_reduction is deprecated and does nothing: each window proves that all were reduced.",
                    FutureWarning,
                    stacklevel=2,
                )
            self.find_unused_parameters = find_unused_parameters
            self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
            self._ownership = _OWNERSHIP[gradient_as_bucket_view]
            self.batched_grad_copy = batched_grad_copy  # a bucket is always packed by one kernel here
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.mixed_precision = mixed_precision
            self.static_graph = False
            self.require_backward_grad_sync = True
            self.require_forward_param_sync = True
            self.broadcast_bucket_size = _BROADCAST_CHUNK_BYTES
            self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
            self.bucket_order = bucket_order
            self._caps = BucketCaps.from_megabytes(bucket_cap_mb, bucket_cap_mb_list)
            self.bucket_bytes_cap = self._caps.cap_bytes
            self.bucket_bytes_cap_list = list(self._caps.per_bucket_bytes)
            self.bucket_bytes_cap_default = self._caps.first_cap_bytes < self._caps.cap_bytes
            self._assign_modules_buffers()

            options = {
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "gradient_as_bucket_view": gradient_as_bucket_view,
                "forward_sync_buffers": self.forward_sync_buffers,
                "bucket_cap_mb": bucket_cap_mb,
                "bucket_cap_mb_list": None if bucket_cap_mb_list is None else list(bucket_cap_mb_list),
                "bucket_order": bucket_order,
                "overlap": overlap,
                "check": check,
                "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
                "mixed_precision": mixed_precision,
                "delay_all_reduce_named_params": [name for name, _ in delayed],
                "ignored parameters and buffers": sorted(self.parameters_to_ignore),
                "device_type": self.device_type,
                "world_size": self.process_group.size(),
            }
            slots = setup.trainable_slots(module, self.parameters_to_ignore)
            specs = setup.specs_of(slots, setup.sparse_parameter_names(module))
            chosen_plan = setup.choose_plan(specs, self._caps, plan)
            self._plan_was_given = plan is not None
            self._wrap_up(slots, chosen_plan, options if init_sync else None, init_sync_buffers)
        if delayed:
            assert param_to_hook_all_reduce is not None
            self._delay([name for name, _ in delayed], param_to_hook_all_reduce, init_sync)
        if static_graph:
            self._set_static_graph()

    # ---------------------------------------------------------------- construction

    def _choose_buffer_sync(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
        """Settle when buffers are synchronised; returns whether they are when the model is wrapped."""
        if broadcast_buffers is not None:
            if forward_sync_buffers is not None:
                warning = (
                    "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is "
                    "deprecated and its value is ignored."
                )
            else:
                warning = (
                    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; note that "
                    "`forward_sync_buffers=False` still makes buffers equal once, when the model is wrapped."
                )
            warnings.warn(warning, FutureWarning, stacklevel=3)
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        return self.forward_sync_buffers

    def _wrap_up(
        self,
        slots: list[Slot],
        plan: Plan,
        options: dict[str, Any] | None,
        init_sync_buffers: bool,
    ) -> None:
        """Agree with the other ranks, make the models equal, and build the engine.

        ``options`` is None where nothing may be exchanged (init_sync=False, unpickling).
        """
        self._reject_cpu_sync_batch_norm()
        if options is not None:
            if self._board is not None:
                timeout = float(os.environ.get("LOCKSTEP_AGREEMENT_TIMEOUT", "600"))
                ignored = self.parameters_to_ignore - set(options["delay_all_reduce_named_params"])
                mine = setup.describe(self.module, ignored, options, plan, with_buffers=init_sync_buffers)
                agree_on_model(self._board, mine, timeout)
            sync_module_states(
                self.module,
                self.process_group,
                source=0,
                ignored=self.parameters_to_ignore,
                with_buffers=init_sync_buffers,
                chunk_bytes=self.broadcast_bucket_size,
                watch=self._watch,
            )
        self._build_engine(slots, plan)

    def _build_engine(self, slots: list[Slot], plan: Plan) -> None:
        activate()
        rank = self.process_group.rank()
        self._precision = (
            MixedPrecisionParameters(self.mixed_precision, self.module) if self.mixed_precision is not None else None
        )
        self.timeline = Timeline(rank)
        memory = GradMemory(self._ownership, self._precision.reduce_dtype if self._precision is not None else None)
        transport = Transport(self.process_group, self._watch)
        control = control_of(self.process_group)
        if self.check == "collective" and control is not None:
            transport.audit = CollectiveAudit(self.process_group, control, self._watch)
        self_ref = weakref.ref(self)

        def wants_sync() -> bool:
            ddp = self_ref()
            return ddp is not None and ddp._pass_synchronises()

        def update_process_group(group: Any) -> None:
            ddp = self_ref()
            if ddp is not None:
                ddp._update_process_group(group)

        self.step = SyncStep(
            Reducer(plan, slots, transport, memory, self.timeline),
            lane_of(self.process_group),
            Union(control, "wrapper" if self._board is None else self._board.name, self.check),
            wants_sync=wants_sync,
            finds_unused=self.find_unused_parameters,
            skips_unused_buckets=self.skip_all_reduce_unused_params,
        )
        self._hooks = HookFeeder(self.step)
        self.reducer = TorchReducer(self.step, self._hooks, self.logger, update_process_group)
        log = self.logger
        self.step.on_error = lambda error: log.set_error_and_log(f"{type(error)}: {error}")
        if self._precision is not None:
            self.step.before_hand_out = self._precision.restore
            self.step.after_pass = self._precision.restore
        self._graphs: list[Any] = []  # what was compiled of this model, for lockstep.explain
        self._dist_autograd = DistAutogradFeeder(self.step)
        self._init_compilation()
        self._frozen = [p for p in self._module_parameters if not p.requires_grad]
        self._num_forwards = 0
        self._registrations_seen = -1  # so that the first forward looks
        self._num_plans = 0
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._join_decided_sync = True
        self._join_decision_used = False
        self._divide_by_initial_world_size = True
        self._delayed: DelayedReduction | None = None
        step_guard.watch(self.step)
        # The hooks on the parameters must not outlive the wrapper.
        weakref.finalize(self, self._hooks.detach)
        self._log_construction()

    def _delay(self, names: list[str], trigger: nn.Parameter, init_sync: bool) -> None:
        """Give the delayed parameters a reducer of their own, which the trigger fires."""
        self._delay_request = (names, trigger)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        delayed = [(name, parameters[name]) for name in names]
        owners = {id(p): type(m).__name__ for m in self.module.modules() for p in m.parameters(recurse=False)}
        slots = [Slot(n, p, owners.get(id(p), ""), i) for i, (n, p) in enumerate(delayed)]
        plan = setup.choose_plan(setup.specs_of(slots, set()), self._caps, None)
        if init_sync:
            broadcast_tensors([p for _, p in delayed], self.process_group, 0, self.broadcast_bucket_size, self._watch)
        reducer = Reducer(
            plan,
            slots,
            self.step.reducer.transport,
            GradMemory(self._ownership),
            Timeline(self.process_group.rank(), num_steps=1),
        )
        self._delayed = DelayedReduction(reducer, trigger)
        weakref.finalize(self, self._delayed.detach)

    def _reject_cpu_sync_batch_norm(self) -> None:
        if self.device_type == "cpu" and self._has_sync_batch_norm():
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _has_sync_batch_norm(self) -> bool:
        return any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())

    def _resume(self, saved_plan: str) -> None:
        """After unpickling: the same layout, the default group, and a fresh engine."""
        self.logger = LoggingData()
        slots = setup.trainable_slots(self.module, self.parameters_to_ignore)
        specs = setup.specs_of(slots, setup.sparse_parameter_names(self.module))
        was_static, self.static_graph = self.static_graph, False
        self._plan_was_given = True
        self._reopen_board("copies")
        self._wrap_up(slots, setup.choose_plan(specs, self._caps, saved_plan), None, False)
        if self._delay_request is not None:
            self._delay(*self._delay_request, init_sync=False)
        if was_static:
            self._set_static_graph()

    def _reopen_board(self, kind: str = "wrappers") -> None:
        """Where the ranks of this group meet outside of collectives.

        Wrappers are counted, so that the n-th of one rank meets the n-th of another; copies are counted apart, since
        a program may make them on one rank only.
        """
        self._board = open_board(self.process_group, kind)
        self._watch = Watch(self._board, self.process_group.rank())

    def _use_group(self) -> None:
        """Go on with another process group: all parts learn of it."""
        transport = Transport(self.process_group, self._watch)
        step = self.step
        step.reducer.use_transport(transport)
        step.union.control = control_of(self.process_group)
        step.lane.leave(step)
        step.lane = lane_of(self.process_group)
        step.lane.enter(step)
        step.union.name = "wrapper" if self._board is None else self._board.name
        # Members of the new group may come from groups that have reduced more or less often.
        step.num_windows = step.num_updates = step.num_resets = 0
        if self._delayed is not None:
            self._delayed.use_transport(transport)

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
        if self._join_config.enable:
            return self._consume_join_decision()
        return self.require_backward_grad_sync

    def reset_sync_window(self) -> None:
        """Forget the reduction that is under way, on all ranks, after an error in a backward that was caught."""
        self.step.reset_together()
        if self._precision is not None:
            self._precision.restore()

    # ---------------------------------------------------------------- forward

    # A compiler leaves this frame alone and compiles the module inside it, as one region without breaks: what a
    # forward does before and after the module (buffers, join, logging) is not for a graph.
    @torch_private.leave_frame_to_python
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._asked_about_compiling and torch.is_grad_enabled() and not self._join_config.enable:
            self._measure_before_compiling(torch.compiler.is_compiling() or torch_private.compiler_is_watching())
        with torch_private.RecordFunction("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            before = DistributedDataParallel._active_ddp_module
            before_torch = torch_private.TorchDDP._active_ddp_module
            DistributedDataParallel._active_ddp_module = torch_private.TorchDDP._active_ddp_module = self
            try:
                output = self._region(self, *inputs, **kwargs)
            except BaseException:
                if self._precision is not None:
                    self._precision.restore()  # whoever catches it may save a checkpoint
                raise
            finally:
                DistributedDataParallel._active_ddp_module = before
                torch_private.TorchDDP._active_ddp_module = before_torch
            return self._post_forward(output)

    @torch_private.without_compiler
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
                self._follow_module()
            self._dist_autograd.attach_in_context()
        self._notify_join()
        if torch.is_grad_enabled():
            self._confirm_plan()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._join_decided_sync = self.ask_whether_to_sync(has_joined=False)
            self._join_decision_used = False
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = torch_private.inputs_to_device(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._precision is not None:
            if self._precision.config.param_dtype is not None:
                inputs, kwargs = torch_private.cast_forward_inputs(
                    self._precision.config.param_dtype, *inputs, **kwargs
                )
            self._precision.lower()
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Read here so that the compiler guards on it: graphs are made for a plan and a strategy.
        if self._graph_key == self.overlap:
            return None  # never
        return self.module(*inputs, **kwargs)

    @torch_private.without_compiler
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled():
            self.require_forward_param_sync = self.require_backward_grad_sync
            self._hooks.watch_outputs(output)
        else:
            self.require_forward_param_sync = False
            if self._precision is not None:
                self._precision.restore()
        self.timeline.record("forward", self._forward_start, now())
        return output

    def _lazy_init(self) -> None:
        """What can only be known just before the first forward."""
        take_over_optimizers(self.step, self._module_parameters)
        self._lazy_init_ran = True

    def _begin_iteration(self) -> None:
        """A new window may open: the one before must be finished, and its timings are logged."""
        self.step.require_finished()
        self._check_compilation()
        if self.logger.begin_iteration() and self.timeline.steps:
            self.logger.sample(self.timeline.steps[-1], self._runtime_facts())

    # ---------------------------------------------------------------- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets; see torch's documentation of communication hooks.

        The hook is called when a bucket is complete and returns a future that holds the reduced buffer.  It divides by
        the world size itself if it wants a mean.
        """
        self._check_comm_hook(hook)
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.step.reducer.set_comm_hook(state, hook, name)
        self.logger.values["comm_hook"] = name


# isinstance(model, torch.nn.parallel.DistributedDataParallel) is how libraries ask "is this wrapped?".
torch_private.TorchDDP.register(DistributedDataParallel)

# Where users find it; the file is a matter of ours.
DistributedDataParallel.__module__ = "lockstep.ddp"
DDP = DistributedDataParallel
