"""What is done about the plan after the model is wrapped: confirm it, follow the module, extend it."""

from __future__ import annotations

import logging
import warnings
import weakref

import torch
from torch import nn

from lockstep import errors, settings, torch_private
from lockstep.agree.model import stand_aside
from lockstep.ddp import setup
from lockstep.ddp.logbook import Logbook
from lockstep.ddp.options import BucketOrder
from lockstep.ddp.peers import Peers
from lockstep.engine import module_watch
from lockstep.engine.bucket import Slot
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.step import SyncStep
from lockstep.graph.joint import GraphRecord
from lockstep.plan import Plan

logger = logging.getLogger("lockstep")

_PLAN = "plan"  # what ranks tell each other of it with init_sync=False


class PlanKeeper:
    """Keeps the plan of one wrapped module, and what was compiled for it."""

    def __init__(
        self,
        wrapped: setup.Wrapped,
        step: SyncStep,
        hooks: HookFeeder,
        peers: Peers,
        log: Logbook,
        *,
        order: BucketOrder,
        is_compared: bool,
    ) -> None:
        self._module = wrapped.module
        self._parameters = wrapped.parameters
        self._ignored = wrapped.ignored
        self._caps = wrapped.caps
        self._step = step
        self._hooks = hooks
        self._peers = peers
        self._log = log
        self._order = order
        self.is_confirmed = False
        self._is_compared = is_compared or peers.board is None  # with those of the other ranks
        self._first_digest = self.plan.digest
        if not self._is_compared and peers.board is not None:
            stand_aside(peers.board, "init_sync=False on this rank, and True on others: give all ranks the same.")
            # Told now, and compared in the first forward: nobody waits there for one that is in another model's.
            peers.board.post(f"{_PLAN}/{peers.board.rank}", self._first_digest, waits=False)
        confirm = weakref.WeakMethod(self.confirm_on_group)
        step.closing.after_first = lambda: call() if (call := confirm()) is not None else None
        # Graphs are made for a plan; they are not used again when it has changed.
        self.graphs: list[GraphRecord] = []
        self.generation = "plan 0"
        self._num_plans = 0
        self._num_forwards = 0
        self._registrations_seen = -1  # so that the first forward looks
        self._note_frozen()

    @property
    def plan(self) -> Plan:
        return self._step.reducer.plan

    def _note_frozen(self) -> None:
        self._frozen = [p for p in self._parameters if not p.requires_grad]

    # ---------------------------------------------------------------- another plan

    def adopt(self, plan: Plan, slots: list[Slot] | None = None) -> None:
        """Take another plan, between windows."""
        self._hooks.detach()
        self._step.reset()
        self._step.reducer.use_plan(plan, self._step.reducer.slots if slots is None else slots)
        self._step.rebuild()
        self._hooks.attach()
        self._log.note_plan()

    def _plan_anew(self, slots: list[Slot], ready_order: list[str] | None = None) -> None:
        specs = setup.specs_of(slots, setup.sparse_parameter_names(self._module))
        self.adopt(setup.choose_plan(specs, self._caps, None, ready_order), slots)
        self._num_plans += 1
        self.generation = f"plan {self._num_plans}"
        self.graphs.clear()

    # ---------------------------------------------------------------- confirm

    def confirm(self) -> None:
        """In a forward outside of every backward: compare plans that never were, and take the order that rank 0 saw.

        A checkpoint runs forwards again, inside the backward; ranks come to those at different moments.  Where unused
        parameters are searched for, ranks need not have seen the same either.
        """
        if torch_private.in_backward():
            return
        if not self._is_compared:
            self._compare_plans()
        if self.is_confirmed or self._step.num_windows == 0:
            return
        if self._step.finds_unused and not self._step.static.is_on:
            return
        self.is_confirmed = True
        if self._order == "observed" and self.plan.order != "observed":
            self._take_observed_order()

    def _compare_plans(self) -> None:
        """With init_sync=False nothing was compared when the model was wrapped; do it before anything is reduced."""
        self._is_compared = True
        told = self._peers.watch.gather(_PLAN, self._first_digest, settings.agreement_timeout())
        if len(set(told.values())) > 1:
            told = self._peers.board.by_global(told) if self._peers.board is not None else told
            raise errors.Disagreement(
                f"Ranks lay their gradients out differently; their plans are:\n{errors.rank_table(told)}\n"
                "Likely cause: another model or another bucket size on some ranks, with init_sync=False.\n"
                "Fix: build the same module with the same options on every rank.",
                told,
            )

    def confirm_on_group(self) -> None:
        """With the first reduction on a group: the plan that rank 0 has, by the way that gradients take.

        Where ranks share no store, so that nothing else compares them, this is the one comparison of their plans.
        """
        transport = self._step.reducer.transport
        if transport.is_alone:
            return
        device = self._step.reducer.slots[0].parameter.device  # it may have been moved since it was wrapped
        digest = list(bytes.fromhex(self.plan.digest))
        mine, expected = (torch.tensor(digest, dtype=torch.uint8, device=device) for _ in range(2))
        transport.land(transport.start_broadcast(expected, 0), "the comparison of plans in the first step")
        if not torch.equal(mine, expected):
            raise errors.Disagreement(
                f"Rank {transport.shown_rank} lays its gradients out differently from rank 0 (its plan is "
                f"{self.plan.digest}), so this step averaged unrelated parameters.\nFix: build the same module with "
                "the same options on every rank."
            )

    def _take_observed_order(self) -> None:
        """Lay buckets out in the order rank 0 saw, which it tells the others over the board."""
        order = [slot.name for slot in self._step.ready_order]
        seen = set(order)
        order += [slot.name for slot in self._step.reducer.slots if slot.name not in seen]
        if self._peers.board is not None:
            order = self._peers.board.from_rank_zero("ready order", "\n".join(order)).split("\n")
        self._plan_anew(self._step.reducer.slots, order)

    # ---------------------------------------------------------------- follow the module

    def look_again(self) -> None:
        """Compare with the module in the next forward: its parameters may have been replaced."""
        self._registrations_seen = -1

    def follow_module(self) -> None:
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

    def _compare_with_module(self) -> None:
        slots = setup.trainable_slots(self._module, self._ignored)
        known = {id(p): p for p in self._parameters}
        for slot in slots:
            if not isinstance(slot.parameter, nn.Parameter):
                self._warn_functional_call(slot.name)
                return
            if id(slot.parameter) not in known:
                error = errors.model_changed(slot.name, "was added or replaced", rank=self._step.reducer.shown_rank)
                self._log.data.set_error_and_log(str(error))
                raise error
        self._hooks.find_again()
        planned = {id(slot.parameter) for slot in self._step.reducer.slots}
        if not {id(slot.parameter) for slot in slots} <= planned:
            # Those frozen since they were planned stay in: they may be unfrozen again.
            self._extend(setup.trainable_slots(self._module, self._ignored, also=planned))

    def _extend(self, slots: list[Slot]) -> None:
        """Plan anew with parameters that were unfrozen, on all ranks or not at all."""
        planned = {slot.name for slot in self._step.reducer.slots}
        names = ", ".join(slot.name for slot in slots if slot.name not in planned)
        if self._peers.board is not None:
            key = f"unfrozen, window {self._step.num_windows}, reset {self._step.num_resets}"
            told = self._peers.watch.meet(key, f"a plan with unfrozen parameters: {names}", names, 60.0)
            if len(set(told.values())) > 1:
                told = self._peers.watch.by_global(told)
                raise errors.Disagreement(
                    "Ranks unfroze different parameters:\n"
                    + errors.rank_table(told)
                    + "\nFix: change requires_grad of the same parameters on every rank, before the same forward.",
                    told,
                )
        accumulated = {id(slot.parameter) for slot in self._step.reducer.slots if slot.dirty}
        for slot in slots:
            slot.dirty = id(slot.parameter) in accumulated
        self._plan_anew(slots)
        self._note_frozen()
        logger.info("Parameters were unfrozen (%s); the plan now covers %d of them.", names, len(slots))

    def _warn_functional_call(self, name: str) -> None:
        warnings.warn(
            f"The module runs with a plain tensor in place of its parameter {name} (torch.func.functional_call); the "
            "gradient of that tensor is not reduced.",
            stacklevel=6,
        )
