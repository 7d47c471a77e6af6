"""The units of a sharded model that are on one mesh, and the step (``engine/step.py``) that reduces their gradients."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_not
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep import errors, torch_private
from lockstep.agree.board import Board, open_board
from lockstep.agree.control import ControlPlane, control_of
from lockstep.agree.watch import Watch
from lockstep.engine import step_guard
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.casts import MEETING_SECONDS
from lockstep.engine.feeders.hooks import HookFeeder
from lockstep.engine.lane import lane_of
from lockstep.engine.reducer import Reducer
from lockstep.engine.states import Kind, State
from lockstep.engine.step import SyncStep, will_accumulate
from lockstep.engine.union import Union
from lockstep.plan import Bucket, BucketCaps, ParameterSpec, Plan
from lockstep.settings import agreement_timeout
from lockstep.shard.exchange import HookExchange, Load, ScatterExchange
from lockstep.shard.foresight import Meeting
from lockstep.shard.layout import ShardPlan, flat_layouts
from lockstep.shard.level import GatherLog
from lockstep.shard.memory import ShardMemory
from lockstep.shard.mesh import Links, ShardMesh, whole_group
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.store import FlatStore
from lockstep.shard.unit import Unit
from lockstep.shard.updates import Tally

if TYPE_CHECKING:
    from lockstep.shard.root import Root

_MOST_NAMES = 10


class Team:
    """The units of a root that are on one mesh, and the step that reduces their gradients."""

    def __init__(self, root: Root, units: Sequence[Unit]) -> None:
        self.units = list(units)
        mesh = units[0].mesh
        group = whole_group(mesh)
        self.board: Board | None = open_board(group, "sharded models")
        group_seconds = torch_private.group_timeout(group).total_seconds()
        self.watch = Watch(self.board, group.rank(), group_seconds=group_seconds)
        for unit in units:
            unit.links = Links(unit.mesh, self.watch)
            if unit.num_keepers:
                unit.links.keepers(unit.num_keepers)  # made here, which all ranks pass
        self.memory = ShardMemory(root.attendance)
        self.gather_log = GatherLog(units, mesh.shard_ranks)
        self._lingering: set[ShardedParameter] = set()  # frozen, and with gradients that have not been reduced yet
        plan, slots, loads = self._plan()
        self._use_slots(slots)
        self.memory.use(loads, self.slots)
        reducer = Reducer(plan, slots, units[0].links.scatter, self.memory, root.timeline)
        self.exchange: ScatterExchange | HookExchange = ScatterExchange(reducer.transport, loads)
        reducer.exchange = self.exchange
        control = control_of(group) if mesh.world * mesh.num_replicas > 1 else None
        name = "sharded model" if self.board is None else self.board.name
        me = weakref.ref(self)
        self.step = SyncStep(
            reducer,
            lane_of(group),
            Union(control, name, "step"),
            wants_sync=lambda: (team := me()) is not None and any(unit.syncs for unit in team.units),
            finds_unused=True,
        )
        self.step.drift.hold_shards()
        self.step.kept = self.memory.kept
        self.step.after_pass = self._after_pass_of(me)
        if mesh.num_replicas == 1:  # each replica gathers for itself
            self.step.gathers = self.gather_log.said
        self._let_gathers_meet(mesh, control)
        self._tally = Tally(self.step)
        self._tally.mark(self._leaves)
        for unit in units:
            unit.step = weakref.ref(self.step)
            unit.gather_log = self.gather_log
        self.hooks = HookFeeder(self.step)
        self._is_agreed = False
        self._num_agreements = 0
        self._last_agreement = ""  # by the name of the meeting
        self._num_hooks = 0  # that were to be registered
        self.had_unused = False
        self._other_task: int | None = None  # the last backward that ended in no .grad
        step_guard.watch(self.step)

    def _let_gathers_meet(self, mesh: ShardMesh, control: ControlPlane | None) -> None:
        is_own = mesh.num_replicas > 1
        plane = control_of(mesh.shard_group) if is_own else control
        if mesh.world > 1 and plane is not None:
            self.gather_log.meeting = Meeting(self.step, plane, self.watch, mesh.shard_ranks, is_own=is_own)
            self.watch.is_foreign = self.gather_log.meeting.is_foreign
            self.gather_log.gather_on(mesh.shard_group, self.watch)

    @staticmethod
    def _after_pass_of(me: weakref.ref[Team]) -> Any:
        def after_pass() -> None:
            team = me()
            root = None if team is None else team.units[0].root
            if root is not None and root.is_recorded:
                root.free_after_backward()
            if team is not None and team.step.syncs:
                team._end_window()
            elif team is not None:
                for bucket in team.step.reducer.buckets:
                    team.memory.keep(bucket)

        return after_pass

    def _end_window(self) -> None:
        """Gradients were reduced."""
        self.gather_log.end_window()
        root = self.units[0].root
        for unit in self.units:
            unit.end_step()
        if root is not None and self._lingering:
            root.plan_anew_in_next_forward()
        if root is not None and root.syncs_buffers and self is root.teams[0]:
            root.sync_buffers()

    def finalize(self) -> None:
        """Close a window that the program closes by hand."""
        was_open = self.step.state is not State.IDLE
        self.step.finalize()
        if was_open and self.step.state is State.IDLE:
            root = self.units[0].root
            if root is not None and root.is_recorded:
                root.free_after_backward()
            self._end_window()

    def reduce_accumulated(self) -> None:
        """Reduce what passes that did not synchronise have added up, without a backward."""
        step = self.step
        with step.lane.lock:
            if step.is_in_pass or not step.holds_local_gradients:
                return
            try:
                step.begin_pass()
                step.settle_pass(is_inner=False)
                step.end_pass(is_inner=False)
            finally:
                step.forget_pass()

    def _plan(self) -> tuple[Plan, list[Slot], list[Load]]:
        slots: list[Slot] = []
        loads: list[Load] = []
        buckets: list[Bucket] = []
        for unit in self.units:
            unit.make_whole()
            for store in unit.stores:
                for parameter in store.parameters:
                    assert parameter.full is not None
                    parameter.follow_requires_grad()
                    if self._trains(parameter):
                        slot = Slot(parameter.name, parameter.full, parameter.owner_name, len(slots))
                        slot.leaf = parameter.sharded
                        slots.append(slot)
        for unit in reversed(self.units):
            for store in unit.stores:
                training = [p for p in store.parameters if self._trains(p)]
                if not training:
                    continue
                (layout,) = flat_layouts([p.spec for p in training], unit.mesh.world)
                loads.append(Load(unit, training, layout))
                specs = tuple(
                    ParameterSpec(p.name, p.shape, p.spec.dtype, p.spec.itemsize, f"{unit.device.type}:0")
                    for p in training
                )
                buckets.append(Bucket(len(buckets), specs))
        return Plan(tuple(buckets), BucketCaps(), "units"), slots, loads

    def _use_slots(self, slots: Sequence[Slot]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        # Those of a store's parameters, once asked for.
        self._slots_of: weakref.WeakKeyDictionary[FlatStore, list[Slot | None]] = weakref.WeakKeyDictionary()

    def _trains(self, parameter: ShardedParameter) -> bool:
        return parameter.sharded.requires_grad or parameter in self._lingering

    @property
    def _leaves(self) -> list[Any]:
        return [parameter.sharded for unit in self.units for parameter in unit.parameters]

    def delivered_by(
        self, store: FlatStore, gradients: Sequence[Tensor | None]
    ) -> tuple[Sequence[Slot], Sequence[Tensor], Sequence[Slot]]:
        """What a graph delivers for a store: whose gradients there are, the gradients, and all that train."""
        known = self._slots_of.get(store)
        if known is None:
            known = self._slots_of[store] = [self.slots.get(parameter.name) for parameter in store.parameters]
        flags = store.flags()
        if None not in known and False not in flags and all(map(is_not, gradients, repeat(None))):
            return known, gradients, known  # type: ignore[return-value]
        slots: list[Slot] = []
        coming: list[Tensor] = []
        for slot, gradient, trains in zip(known, gradients, flags, strict=True):
            if slot is not None and gradient is not None and trains:
                slots.append(slot)
                coming.append(gradient)
        return slots, coming, [slot for slot in known if slot is not None]

    def plan_anew(self) -> None:
        """Take up parameters that were frozen, unfrozen, replaced or cast, between windows."""
        self.hooks.detach()
        planned = [p for load in self.memory.loads for p in load.parameters] if self.step.holds_local_gradients else []
        partial = self.memory.take_partial()
        self._lingering = {p for p in (*planned, *partial) if not p.sharded.requires_grad}
        self.step.reset()
        plan, slots, loads = self._plan()
        self._use_slots(slots)
        self.memory.use(loads, self.slots)
        self._tally.mark(self._leaves)
        self.step.reducer.use_plan(plan, slots)
        self.exchange.loads = list(loads)
        self.step.rebuild()
        for slot in slots:
            slot.dirty = slot.parameter.grad is not None  # of passes that did not synchronise
        self.memory.put_partial(partial)
        self.hooks.attach()
        self._is_agreed = False

    def agree_anew(self) -> None:
        """After an error that ranks have met at different places: all of them meet before the next forward."""
        self._is_agreed = False
        self._num_agreements = self._num_hooks = 0

    def agree(self) -> None:
        """Before the first forward with a new plan: raise on all ranks if they do not train the same parameters.

        What is scattered would have another size on each rank, which backends end processes for.
        """
        if self._is_agreed:
            return
        if self.board is not None:
            parameters = [p for unit in self.units for p in unit.parameters]
            frozen = [p.name for p in parameters if not p.sharded.requires_grad]
            waiting = [p.name for p in parameters if p in self._lingering]
            mine = f"{len(frozen)} of {len(parameters)} parameters are frozen" + (
                f": {_listed(frozen)}" if frozen else ""
            )
            if waiting:
                mine += f"; gradients from before that are still to be reduced: {_listed(waiting)}"
            digest = hashlib.blake2b("\n".join([*frozen, "", *waiting]).encode(), digest_size=16).hexdigest()
            self._num_agreements += 1
            key = f"shards that train, {self._num_agreements}, reset {self.step.num_resets}"
            subject, word = f"a new plan of what trains: {mine}", f"{digest}\n{mine}"
            told = self.watch.meet(key, subject, word, MEETING_SECONDS, follows=self._last_agreement)
            self._last_agreement = key
            if len(set(told.values())) > 1:
                told = self.watch.by_global(told)
                shown = {rank: text.split("\n")[1] for rank, text in told.items()}
                raise errors.Disagreement(
                    f"Ranks train different parameters of a sharded model:\n{errors.rank_table(shown)}\n"
                    "Fix: change requires_grad of the same parameters on every rank, before the same forward.",
                    shown,
                )
        self._is_agreed = True

    def begin_unit(self, unit: Unit) -> None:
        """The backward of a unit begins: those before it, which this backward does not come to, leave without it.

        Others may have come to them (calls.py, [Note: a unit leaves with its backward]).
        """
        first = next((number for number, load in enumerate(self.memory.loads) if load.unit is unit), 0)
        step = self.step
        if step.is_in_pass and step.all_launched_before(first):
            return
        with step.lane.lock:
            if not self._may_send():
                return
            with step.telling_peers():
                for bucket, load in zip(step.reducer.buckets[:first], self.memory.loads[:first], strict=True):
                    if not load.unit.gathers.in_graph:  # those of graphs do not lead to .grad of whole parameters
                        self._end(bucket, lambda slot: not will_accumulate(slot))
                step.send_complete()

    def end_unit(self, unit: Unit) -> None:
        """The backward of a unit is over: it leaves (calls.py, [Note: a unit leaves with its backward])."""
        step = self.step
        with step.lane.lock:
            if not self._may_send():
                return
            with step.telling_peers():
                for bucket, load in zip(step.reducer.buckets, self.memory.loads, strict=True):
                    if load.unit is unit:
                        self._end(bucket, lambda slot: True)
                step.send_complete()

    def _may_send(self) -> bool:
        """Whether units leave in the backward that is running; begins its pass."""
        step = self.step
        if isinstance(self.exchange, HookExchange) or step.closing.is_compared:
            return False  # nobody waits in there
        if not step.is_in_pass:
            task = torch_private.graph_task_id()
            if task == self._other_task:
                return False
            if not step.takes_part():
                self._other_task = task  # torch.autograd.grad
                return False
            step.lane.begin(step)
        step.intake.flush_deferred()
        return step.syncs and step.state is State.OPEN and step.kind is Kind.FULL

    def _end(self, bucket: LiveBucket, is_over: Callable[[Slot], bool]) -> None:
        if bucket.num_pending and not bucket.num_due and not bucket.has_left:
            for slot in bucket.slots:
                if not slot.ready and is_over(slot):
                    self.step.note_ready(slot, found_unused=not slot.dirty)

    def set_comm_hook(self, state: Any, hook: Any, name: str) -> None:
        reducer = self.step.reducer
        if isinstance(self.exchange, HookExchange):
            raise RuntimeError("register_comm_hook can only be called once; write one hook that does both.")
        self._agree_on_hook(name)
        for unit in self.units:
            unit.reshard()  # what is under way comes in by the way it went
            unit.links.gather_apart()
        if self.gather_log.meeting is not None:
            self.gather_log.gather_on(self.units[0].links.gather.process_group, self.watch)
        self.memory.divides = False
        self.exchange = reducer.exchange = HookExchange(reducer.transport, self.memory.loads, state, hook, name)
        reducer.transport.keep_order_of(reducer)

    def _agree_on_hook(self, name: str) -> None:
        """Raise on all ranks if they register different ones, or some none: the group for gathers is made by all."""
        if self.board is None:
            return
        self._num_hooks += 1
        key = f"communication hook {self._num_hooks}, reset {self.step.num_resets}"
        told = self.watch.meet(key, f"register_comm_hook({name})", name, agreement_timeout())
        if len(set(told.values())) > 1:
            told = self.watch.by_global(told)
            raise errors.Disagreement(
                f"Ranks register different communication hooks:\n{errors.rank_table(told)}\n"
                "Fix: register the same one on every rank, before the same step.",
                told,
            )

    def compare(self, plan: ShardPlan) -> None:
        """Raise on all ranks if they do not shard the same model in the same way."""
        if self.board is None:
            return
        told = self.watch.gather("plan of shards", f"{plan.digest}\n{plan}", agreement_timeout())
        if len({text.split("\n")[0] for text in told.values()}) > 1:
            told = self.watch.by_global(told)
            shown = {rank: text.split("\n")[1] for rank, text in told.items()}
            raise errors.Disagreement(
                f"Ranks shard different models, or the same one differently:\n{errors.rank_table(shown)}\n"
                + _first_difference(told)
                + "Fix: call fully_shard on the same modules with the same options on every rank.",
                shown,
            )
        if self.step.closing.union.control is not None:
            self.step.closing.union.control.connect(self.watch)
        if self.gather_log.meeting is not None:
            self.gather_log.meeting.control.connect(self.watch)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _first_difference(told: dict[int, str]) -> str:
    """The first line of the plans that is not the same on rank 0 and another rank."""
    first = told[0].split("\n")[2:]
    for rank, text in sorted(told.items()):
        other = text.split("\n")[2:]
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                return f"The first difference:\n  rank 0: {mine.strip()}\n  rank {rank}: {theirs.strip()}\n"
        if len(first) != len(other):
            return f"Rank 0 has {len(first) - 1} units, rank {rank} has {len(other) - 1}.\n"
    return ""
