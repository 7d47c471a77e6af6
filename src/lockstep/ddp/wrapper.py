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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from lockstep import torch_private
from lockstep.agree.last_words import notice
from lockstep.agree.model import wrap_failures_told
from lockstep.ddp import dispatch, setup
from lockstep.ddp.comm_hooks import check_comm_hook
from lockstep.ddp.equal import make_ranks_equal, take_state
from lockstep.ddp.logbook import throw
from lockstep.ddp.options import BucketOrder, Device, Options, Overlap
from lockstep.ddp.parts import BROADCAST_CHUNK_BYTES, build_parts
from lockstep.ddp.peers import Peers
from lockstep.ddp.torch_names import TorchNames
from lockstep.engine.nonfinite import Policy
from lockstep.engine.optimizer_in_backward import take_over_optimizers
from lockstep.engine.recovery import MADE_EQUAL, reset_together
from lockstep.engine.states import State
from lockstep.engine.union import Check
from lockstep.graph.explain import Explanation
from lockstep.observe.logging_data import LoggingData
from lockstep.observe.metrics import metrics_of
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import now
from lockstep.plan import Plan
from lockstep.state_dict import rename_keys

hands_over_graphs = torch_private.hands_over_graphs  # by name, so that a compiler finds it

# What belongs to this process; a copy makes its own.
_LIVE = ("logger", "device_mesh", "_peers", "_parts", "_wrapped", "_region")

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
        lazy_bucket_allocation: as in torch 2.15.  Buffers are allocated when a bucket becomes whole anyway, unless
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
        late_timeout: seconds to wait for a rank that is alive but does not arrive, before all ranks raise PeerLate;
            ``None`` (default) or 0: as long as the process group's timeout.
        nonfinite: what to do about gradients that are NaN or Inf on any rank: ``"warn"`` (default) once per episode,
            with rank and parameters; ``"raise"`` on all ranks; ``"skip"`` the optimizer's step on all ranks;
            ``"ignore"``.  On a GPU ``"raise"`` and ``"skip"`` wait for it at the end of each step.
    """

    # Compilers ask the class which wrapper is running.
    _active_ddp_module: Any = None

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
        late_timeout: float | None = None,
        nonfinite: Policy = "warn",
    ) -> None:
        nn.Module.__init__(self)  # Joinable's own state is the part's, see uneven.py
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}.")
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
            late_timeout=late_timeout,
            nonfinite=nonfinite,
        )
        self.require_backward_grad_sync = True
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.logger = LoggingData()
        self._peers = Peers(setup.choose_process_group(process_group, device_mesh), check, late_timeout=late_timeout)
        with wrap_failures_told(self._peers.board if init_sync else None):
            self._wrapped = setup.take_module(module, options)
            self.module = module
            self._reject_sync_batch_norm()
            if init_sync:
                make_ranks_equal(self._wrapped, options, self._peers, BROADCAST_CHUNK_BYTES)
            self._build()
        if static_graph:
            self._set_static_graph()

    # ---------------------------------------------------------------- construction

    def _reject_sync_batch_norm(self) -> None:
        if self.device_type == "cpu" and setup.has_sync_batch_norm(self.module):
            throw(self.logger, ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _build(self) -> None:
        """Make the parts; they know this wrapper only by two questions that end when it is gone."""
        me = weakref.ref(self)
        self._parts = build_parts(
            self._wrapped,
            self._options,
            self._peers,
            self.logger,
            wants_sync=lambda: (ddp := me()) is not None and ddp._pass_synchronises(),
            update_group=lambda group: None if (ddp := me()) is None else ddp._update_process_group(group),
        )
        # The hooks on the parameters must not outlive the wrapper.
        weakref.finalize(self, self._parts.detach)
        # What a compiler sees of a forward, as a function of this wrapper alone: compilers keep their graphs by code
        # object, so a shared one would hand this wrapper another one's graphs, and run out of room for them.
        self._region = torch_private.own_code(type(self)._run_ddp_forward)
        self._serial = dispatch.enter(self)
        # Inputs that are cast on their way in are not for a graph.
        self._can_be_inlined = self._options.mixed_precision is None and self._parts.delayed is None
        device_ids = self._wrapped.placement.device_ids
        self._input_device = torch.device(self.device_type, device_ids[0]) if device_ids else None
        self._lazy_init_ran = False
        self._ddp_sink_clone = True

    def _set_static_graph(self) -> None:
        """Promise that every step uses the same parameters, as often as the first one does."""
        step = self.step
        if step.static.is_on:
            warnings.warn("static_graph is already set; there is no need to set it again.", stacklevel=2)
            return
        if step.num_windows or step.state is not State.IDLE:
            throw(
                self.logger,
                RuntimeError,
                "_set_static_graph should be called before training loop starts, that is before the first backward.",
            )
        step.static.is_on = True
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
        self._parts.keeper.is_confirmed = False
        if not torch_private.rank_not_in_group(new_process_group):
            self._parts.use_group(new_process_group, self._peers)

    # ---------------------------------------------------------------- what there is to see

    @property
    def plan(self) -> Plan:
        """What travels together: print it, or save ``plan.to_json()`` with a checkpoint."""
        return self._parts.keeper.plan

    def metrics(self) -> dict[str, float]:
        """Return the last step that synchronised as a flat dict of numbers, for any logger; see docs/observing.md."""
        reducer = self.step.reducer
        steps = reducer.timeline.steps
        return metrics_of(steps[-1] if steps else None, reducer.plan, self.step.num_left_in_graph)

    def explain_compilation(self) -> Explanation:
        """See :func:`lockstep.explain`."""
        return self._parts.compilation.explain()

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
        return self._parts.uneven.consume_decision() if self._parts.uneven.is_on else self.require_backward_grad_sync

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: ranks that run out of data mirror the others' collectives until all are done."""
        context = torch_private.WatchedJoin(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        context.wait_for = self._parts.uneven.wait_for_ranks_with_data
        return context

    def reset_sync_window(self, *, take_weights_from: int | None = None, weights_are_equal: bool = False) -> None:
        """Forget the reduction that is under way, on all ranks, after an error in a backward that was caught.

        Where weights have come to differ this is an error, unless all take the parameters and buffers of one rank of
        the group (``take_weights_from``), or the program has made them equal itself (``weights_are_equal``).
        """
        mended = MADE_EQUAL if weights_are_equal else ""
        reset_together(self.step, mended if take_weights_from is None else f"the weights of rank {take_weights_from}")
        self._parts.precision.restore()
        if take_weights_from is not None:
            take_state(self._wrapped, self._peers, take_weights_from, BROADCAST_CHUNK_BYTES)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a backward that synchronises ends with a call of :meth:`finalize_backward`, instead of by itself.

        Set it before a forward, or after the backward was finalised.
        """
        return self._parts.finalization.required

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._parts.finalization.require(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` must wait until the coming backward has returned.

        Otherwise a hook in the backward may call it too, once the gradients of all parameters are there.
        """
        return self._parts.finalization.only_after_backward

    def finalize_backward(self) -> None:
        """Wait for the reductions under way and write ``.grad``; once per backward that synchronises."""
        self._parts.finalization.finalize()

    # ---------------------------------------------------------------- forward

    # A compiler leaves this frame alone and compiles the module inside it, as one region without breaks: what a
    # forward does before and after the module (buffers, join, logging) is not for a graph.
    @torch_private.leave_frame_to_python
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch_private.is_exporting():
            raise RuntimeError("torch.export cannot export a data-parallel wrapper; export lockstep.unwrap(model).")
        # A function that calls this is being compiled: the module becomes a part of it, see dispatch.py.
        if torch.compiler.is_dynamo_compiling() and self._is_inlined(inputs, kwargs):
            torch.ops.lockstep.forward_of(self._serial, torch.is_grad_enabled())
            return self._run_ddp_forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._parts.uneven.is_on:
            self._parts.compilation.ask_once(torch.compiler.is_compiling() or torch_private.compiler_is_watching())
        with torch_private.RecordFunction("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            before = DistributedDataParallel._active_ddp_module
            before_torch = torch_private.TorchDDP._active_ddp_module
            DistributedDataParallel._active_ddp_module = torch_private.TorchDDP._active_ddp_module = self
            try:
                output = self._region(self, *inputs, **kwargs)
            except BaseException as error:
                self._parts.precision.restore()  # whoever catches it may save a checkpoint
                notice(error)
                raise
            finally:
                DistributedDataParallel._active_ddp_module = before
                torch_private.TorchDDP._active_ddp_module = before_torch
            return self._post_forward(output)

    def _is_inlined(self, inputs: Any, kwargs: Any) -> bool:
        """Whether a compiler that traces this may put the module into its graph."""
        if not self._can_be_inlined or self._parts.uneven.is_on or not hands_over_graphs():
            return False
        return self._input_device is None or dispatch.are_on((inputs, kwargs), self._input_device)

    @torch_private.without_compiler
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._forward_start = now()
        if listeners and torch.is_grad_enabled():
            reached(StepMoment.FORWARD, self.step.reducer.timeline.step, subject=self.step.reducer)
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled():
            self.step.lane.forget_broken_pass()
            self.step.note_forward()
            # A checkpoint may run the forward again, inside the backward.
            if self.require_backward_grad_sync and not torch_private.in_backward():
                self._begin_iteration()
            if not torch_private.in_backward():
                self._parts.keeper.follow_module()
            self._parts.dist_autograd.attach_in_context()
        self._parts.uneven.notify()
        if torch.is_grad_enabled():
            self._parts.keeper.confirm()
        if self._parts.buffers.will_sync_before:
            self._sync_buffers()
        self._parts.uneven.decide(self.require_backward_grad_sync)
        if self._input_device is not None:
            moved, moved_kwargs = torch_private.inputs_to_device(
                inputs, kwargs, self._input_device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self._parts.precision.begin_forward(inputs, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Read here so that the compiler guards on it: graphs are made for a plan and a strategy.
        if self._parts.keeper.generation == self._parts.compilation.overlap:
            return None  # never
        return self.module(*inputs, **kwargs)

    @torch_private.without_compiler
    def _post_forward(self, output: Any) -> Any:
        if self._parts.buffers.will_sync_after:
            self._sync_buffers()
        if torch.is_grad_enabled():
            self._parts.buffers.is_due = self.require_backward_grad_sync
            self._parts.hooks.watch_outputs(output)
        else:
            self._parts.buffers.is_due = False
            self._parts.precision.restore()
        self.step.reducer.timeline.record("forward", self._forward_start, now())
        return output

    def _lazy_init(self) -> None:
        """Do what can only be done just before the first forward."""
        take_over_optimizers(self.step, self._wrapped.parameters)
        self._lazy_init_ran = True

    def _begin_iteration(self) -> None:
        """Check that the window before is finished, and log it: a new one may open."""
        self._parts.finalization.require_finalized()
        self.step.require_finished()
        self._parts.compilation.check()
        self._parts.log.begin_iteration()

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
    @torch_private.frame_without_compiler
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
        self._parts.keeper.look_again()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._parts.keeper.look_again()
        rename_keys(state_dict, prefix, set(self.module.state_dict(prefix=f"{prefix}module.")))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # ---------------------------------------------------------------- copies

    def _check_default_group(self) -> None:
        if not self._peers.is_default:
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
            overlap=self._parts.compilation.overlap,
            find_unused_parameters=self.step.finds_unused,
            static_graph=self.step.static.is_on,
            broadcast_buffers=None,
            forward_sync_buffers=self._parts.buffers.syncs_in_forward,
            check_reduction=False,
        )
        state["_saved"] = (self._parts.buffers.hook, self._parts.buffers.is_due, self.step.ends_by_hand)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with the same layout, the default group, and fresh parts."""
        hook, is_due, ends_by_hand = state.pop("_saved")
        nn.Module.__setstate__(self, state)
        options = self._options
        self.logger = LoggingData()
        self._peers = Peers(torch_private.default_group(), options.check, "copies", options.late_timeout)
        self._wrapped = setup.take_module(self.module, options)
        self._reject_sync_batch_norm()
        self._build()
        self._parts.buffers.hook, self._parts.buffers.is_due = hook, is_due
        self.step.ends_by_hand = ends_by_hand
        if options.static_graph:
            self._set_static_graph()


# isinstance(model, torch.nn.parallel.DistributedDataParallel) is how libraries ask "is this wrapped?".
torch_private.TorchDDP.register(DistributedDataParallel)

# Where users find it; the file is a matter of ours.
DistributedDataParallel.__module__ = "lockstep.ddp"
DDP = DistributedDataParallel
