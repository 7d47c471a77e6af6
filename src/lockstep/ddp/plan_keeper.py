"""What the wrapper does about its plan after the model is wrapped: confirm it, follow the module, extend it."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep import errors
from lockstep.ddp import setup
from lockstep.engine import module_watch
from lockstep.engine.bucket import Slot
from lockstep.plan import Plan

if TYPE_CHECKING:
    from lockstep.agree.board import Board
    from lockstep.engine.feeders.hooks import HookFeeder
    from lockstep.engine.step import SyncStep
    from lockstep.observe.logging_data import LoggingData
    from lockstep.plan import BucketCaps

logger = logging.getLogger("lockstep")


class PlanKeeping:
    """Mixed into the wrapper."""

    module: nn.Module
    step: SyncStep
    _hooks: HookFeeder
    logger: LoggingData
    process_group: Any
    device: torch.device
    parameters_to_ignore: set[str]
    bucket_order: str
    find_unused_parameters: bool
    static_graph: bool
    _board: Board | None
    _caps: BucketCaps
    _frozen: list[nn.Parameter]
    _module_parameters: list[nn.Parameter]
    _has_rebuilt_buckets: bool
    _num_plans: int
    _num_forwards: int
    _registrations_seen: int

    @property
    def plan(self) -> Plan:
        """What travels together: print it, or save ``plan.to_json()`` with a checkpoint."""
        return self.step.reducer.plan

    def _use_plan(self, slots: list[Slot], ready_order: list[str] | None = None) -> None:
        specs = setup.specs_of(slots, setup.sparse_parameter_names(self.module))
        plan = setup.choose_plan(specs, self._caps, None, ready_order)
        self._lay_out(plan, slots)
        self._forget_graphs()  # type: ignore[attr-defined]
        self._log_construction()  # type: ignore[attr-defined]

    def _lay_out(self, plan: Plan, slots: list[Slot]) -> None:
        """Take another plan, between windows."""
        self._hooks.detach()
        self.step.reset()
        self.step.reducer.use_plan(plan, slots)
        self.step.rebuild()
        self._hooks.attach()

    def _confirm_plan(self) -> None:
        """Once, in the first forward after a reduction: all ranks still have the plan that rank 0 has.

        With init_sync=False this is the only comparison.  Where unused parameters are searched for, ranks may reach
        this forward in different states, so nothing is exchanged there (as in torch).
        """
        if self._has_rebuilt_buckets or self.step.num_windows == 0:
            return
        if self.find_unused_parameters and not self.static_graph:
            return
        self._has_rebuilt_buckets = True
        if self.bucket_order == "observed" and self.plan.order != "observed":
            self._take_observed_order()
        digest = torch.tensor(list(bytes.fromhex(self.plan.digest)), dtype=torch.uint8, device=self.device)
        expected = digest.clone()
        transport = self.step.reducer.transport
        transport.land(transport.start_broadcast(expected, 0), "the comparison of plans after the first step")
        if not torch.equal(digest, expected):
            error = errors.Disagreement(
                f"Rank {self.step.reducer.rank} lays its gradients out differently from rank 0 (plan {self.plan.digest}), "
                "so the first step averaged unrelated parameters.\nLikely cause: another model or another bucket size "
                "on this rank, with init_sync=False.\nFix: build the same module with the same options on every rank."
            )
            transport.watch.post_failure(error)
            raise error

    def _take_observed_order(self) -> None:
        """Lay buckets out in the order rank 0 saw, which it tells the others over the board."""
        order = [slot.name for slot in self.step.ready_order]
        seen = set(order)
        order += [slot.name for slot in self.step.reducer.slots if slot.name not in seen]
        if self._board is not None:
            order = self._board.from_rank_zero("ready order", "\n".join(order)).split("\n")
        self._use_plan(self.step.reducer.slots, order)

    def _follow_module(self) -> None:
        """Notice parameters that were unfrozen, added or replaced since the module was wrapped.

        Registering a parameter, and ``.to()`` on the wrapper, are noticed at once; for writes that bypass both, the
        module is walked through ever more rarely.
        """
        self._num_forwards += 1
        n = self._num_forwards
        if (
            any(p.requires_grad for p in self._frozen)
            or self._registrations_seen != module_watch.num_registrations()
            or n % 100 == 0
            or n & (n - 1) == 0
        ):
            self._registrations_seen = module_watch.num_registrations()
            self._compare_with_module()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What ``.to()``, ``.cuda()``, ``.half()`` come down to; it may replace parameters."""
        self._registrations_seen = -1
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def _compare_with_module(self) -> None:
        slots = setup.trainable_slots(self.module, self.parameters_to_ignore)
        known = {id(p): p for p in self._module_parameters}
        for slot in slots:
            if not isinstance(slot.parameter, nn.Parameter):
                self._warn_functional_call(slot.name)
                return
            if id(slot.parameter) not in known:
                error = errors.model_changed(slot.name, "was added or replaced", rank=self.step.reducer.rank)
                self.logger.set_error_and_log(str(error))
                raise error
        planned = {id(slot.parameter) for slot in self.step.reducer.slots}
        if not {id(slot.parameter) for slot in slots} <= planned:
            # Those frozen since they were planned stay in: they may be unfrozen again.
            self._extend_plan(setup.trainable_slots(self.module, self.parameters_to_ignore, also=planned))

    def _extend_plan(self, slots: list[Slot]) -> None:
        """Parameters were unfrozen: plan anew with them, on all ranks or not at all."""
        self._use_plan(slots)
        self._frozen = [p for p in self._module_parameters if not p.requires_grad]
        logger.info("Parameters were unfrozen; the plan now covers %d of them.", len(slots))
        if self._board is None:
            return
        self._num_plans += 1
        watch = self.step.reducer.transport.watch
        digests = watch.meet("a plan with parameters that were unfrozen", self.plan.digest, 60.0)
        if len(set(digests.values())) > 1:
            raise errors.Disagreement(
                "Ranks unfroze different parameters:\n"
                + errors.rank_table({r: f"plan {d}" for r, d in digests.items()})
                + "\nFix: change requires_grad of the same parameters on every rank, before the same forward.",
                digests,
            )

    def _warn_functional_call(self, name: str) -> None:
        warnings.warn(
            f"The module runs with a plain tensor in place of its parameter {name} (torch.func.functional_call); the "
            "gradient of that tensor is not reduced.",
            stacklevel=6,
        )
