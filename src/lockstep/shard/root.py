"""The root: all units of one sharded model, the steps that reduce their gradients, and the order of their gathers.

It is made when the outermost unit is first used, since ``fully_shard`` is called from the inside out.  Units on one
mesh share a step (``engine/step.py``): a bucket for each unit and dtype, in the reverse of declaration order.

[Note: unused parameters]  In a sharded model a parameter may stay without a gradient in any step, on any rank: ranks
tell each other which were used anywhere at the end of every window, those get a gradient (zeros are added where a
rank has none), and the others keep none.  That costs one small exchange on the host, and makes every rank scatter
every unit in every window, so that no rank waits for a scatter that another has no reason to start.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep import errors, torch_private
from lockstep.engine.module_state import broadcast_tensors
from lockstep.engine.recovery import reset_together
from lockstep.engine.states import State
from lockstep.engine.used import find_tensors, parameters_reached_from
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import Timeline, now
from lockstep.shard.ahead import GatherOrders
from lockstep.shard.layout import ShardPlan, UnitLayout, flat_layouts
from lockstep.shard.mesh import whole_group
from lockstep.shard.replaced import Registered
from lockstep.shard.team import Team
from lockstep.shard.uneven import Attendance
from lockstep.shard.unit import Phase, Unit

_CHUNK_BYTES = 250 * 1024 * 1024  # of buffers in one message, as a replicated model sends them

logger = logging.getLogger("lockstep")


class Root:
    """A sharded model, from its outermost unit down."""

    def __init__(self, top: Unit, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.timeline = Timeline(torch_private.default_group().rank())
        self.attendance = Attendance()
        self.syncs_buffers = False
        self._top = top
        self.running: Unit | None = None  # the outermost unit of the forward that is running
        self.order: list[Unit] = []  # in which units ran in the last forwards, for the backward
        self._last_order: list[Unit] = []
        self._this_order: list[Unit] = []
        self._end_task: int | None = None  # the backward at whose end units are freed
        self.is_recorded = False  # that backward, see moments.py, [Note: second derivatives]
        self._forward_start = 0
        self.orders = GatherOrders()  # of compiled graphs
        self._requires_grad = self._flags()
        self._registered = Registered(parameter for unit in units for parameter in unit.parameters)
        for number, unit in enumerate(units):
            unit.root, unit.index = self, number
        by_mesh: dict[Any, list[Unit]] = {}
        for unit in units:
            if unit.parameters:
                by_mesh.setdefault(unit.mesh.mesh, []).append(unit)
        self.teams = [Team(self, members) for members in by_mesh.values()]
        self._team_of = {unit: team for team in self.teams for unit in team.units}
        self.steps = [team.step for team in self.teams]
        plan = self.plan
        if self.timeline.rank == 0:
            logger.info("%s", plan)
        for team in self.teams:
            team.compare(plan)
            # The hooks on the parameters must not outlive the model.
            weakref.finalize(top.module_references[0](), team.hooks.detach)

    @property
    def plan(self) -> ShardPlan:
        return plan_of(self.units)

    def team_of(self, unit: Unit) -> Team:
        return self._team_of[unit]

    def _flags(self) -> list[bool]:
        return [p.sharded.requires_grad for unit in self.units for p in unit.parameters]

    def dissolve(self) -> None:
        """Take all hooks off, since the model becomes part of a larger one."""
        for team in self.teams:
            team.hooks.detach()
            team.step.lane.leave(team.step)
        for unit in self.units:
            unit.root = None

    # ---------------------------------------------------------------- forward

    def begin_forward(self, unit: Unit) -> None:
        """The outermost unit of a forward is about to run."""
        self.follow_replaced()
        self.running = unit
        self._forward_start = now()
        if torch.is_grad_enabled():
            self.attendance.note_forward()
        if listeners and torch.is_grad_enabled():
            reached(StepMoment.FORWARD, self.timeline.step, subject=self.teams[0].step.reducer if self.teams else None)
        self._last_order, self._this_order = self._this_order, []
        if torch.is_grad_enabled():
            self.note_forward()

    def follow_replaced(self) -> None:
        """Before a forward: take up shards that the program has put in the place of ours."""
        if self._registered.follow():
            self.plan_anew_in_next_forward()

    def note_forward(self) -> None:
        """A forward with gradients is about to run, in whatever way."""
        for unit in self.units:
            unit.take_requires_grad()
        flags = self._flags()
        if flags != self._requires_grad and not any(step.is_in_pass for step in self.steps):
            self._requires_grad = flags
            self.plan_anew()
        if not torch_private.in_backward():
            for team in self.teams:
                team.agree()
        for step in self.steps:
            step.lane.forget_broken_pass()
            if not torch_private.in_backward():
                step.require_finished()
            step.note_forward()

    def plan_anew_in_next_forward(self) -> None:
        self._requires_grad = []

    def plan_anew(self) -> None:
        for team in self.teams:
            team.plan_anew()

    def end_forward(self, output: Any) -> None:
        """The outermost unit has run."""
        self.running = None
        self.timeline.record("forward", self._forward_start, now())
        if not torch.is_grad_enabled():
            for unit in self.units:
                if unit.is_ahead:  # the forward has ended before it came to this one, and no backward will free it
                    unit.reshard()
            return
        for team in self.teams:
            # Only where some were unused before: what is not searched for leaves at the end of the backward.
            if _note_unused(team):
                outputs = [t for t in find_tensors(output) if t.requires_grad]
                if outputs:
                    team.step.note_used(parameters_reached_from(outputs))

    def fail_forward(self) -> None:
        """A forward has raised."""
        self.running = None
        self.order.clear()
        for unit in self.units:
            unit.order_positions.clear()
            unit.fail_forward()

    # ---------------------------------------------------------------- buffers

    def sync_buffers(self) -> None:
        """Give everyone the buffers of the first rank that has data, replicas and shards alike."""
        modules = [module for reference in self._top.module_references if (module := reference()) is not None]
        buffers = [b for module in modules for b in module.buffers() if not b.is_meta]
        group = whole_group(self._top.mesh)
        if buffers and group.size() > 1:
            with torch_private.preserve_version_counter(buffers):
                broadcast_tensors(buffers, group, self.attendance.first_active, _CHUNK_BYTES, self.teams[0].watch)

    # ---------------------------------------------------------------- the order of gathers

    def next_in_forward(self, unit: Unit) -> list[Unit]:
        """What to gather while ``unit`` runs: what came after it the last time, if all went as then so far."""
        place = len(self._this_order)
        self._this_order.append(unit)
        if unit.forward_prefetch is not None:
            return unit.forward_prefetch
        last = self._last_order
        if place + 1 < len(last) and last[place] is unit:
            return [last[place + 1]]
        return []

    def note_ran(self, unit: Unit) -> None:
        """The forward of a unit is over."""
        if torch.is_grad_enabled():
            unit.order_positions.append(len(self.order))
            self.order.append(unit)

    def next_in_backward(self, unit: Unit) -> list[Unit]:
        """What to gather while the backward of ``unit`` runs: what ran before it."""
        place = unit.order_positions.pop() if unit.order_positions else 0
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        return [self.order[place - 1]] if 0 < place <= len(self.order) else []

    # ---------------------------------------------------------------- backward

    def note_backward(self) -> None:
        """A backward has come to an output of one of the units."""
        refuse_compiled_autograd()
        task = torch_private.graph_task_id()
        if self._end_task == task:
            return  # it is known already
        for step in self.steps:
            with step.lane.lock:
                step.note_output_reached()
                step.lane.queue_end_of_outermost()
        self._end_task = task
        torch_private.queue_backward_callback(self._end_backward)

    @torch_private.leave_to_python
    def _end_backward(self) -> None:
        """Free what no later gradient has freed: a unit whose inputs need none."""
        self._end_task = None
        if torch_private.in_nested_backward():
            return  # a reentrant checkpoint; the outer pass still needs them
        if not self.is_recorded:
            self.free_after_backward()
        self._forget_backward()

    def free_after_backward(self) -> None:
        """Nothing that is whole is needed any more."""
        self.is_recorded = False
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.reshard()

    def reduce_accumulated(self) -> None:
        """Reduce what backwards that did not synchronise have added up; without a backward, as pipelines do."""
        for team in self.teams:
            team.reduce_accumulated()
        self.free_after_backward()

    def _forget_backward(self) -> None:
        """A backward is over, or broke."""
        self._end_task = None
        self.attendance.note_end_of_backward()
        for unit in self.units:
            unit.phase = Phase.IDLE
            unit.order_positions.clear()
            unit.modules_to_run.clear()
            unit.calls.forget()
            for store in unit.stores:
                store.forget_part()
                store.deliveries.end()
        self.order.clear()
        self.orders.end()

    def forget_broken_backward(self) -> None:
        """Before a forward: a backward that raised has left its marks, since the engine skips its callbacks then."""
        if self._end_task is not None and not torch_private.in_backward():
            self._forget_backward()
            self.is_recorded = False
            for unit in self.units:
                unit.reshard()

    # ---------------------------------------------------------------- after an error

    def reset(self, mended: str = "") -> None:
        """Forget what is under way, and free everything."""
        self.fail_forward()
        self._forget_backward()
        self.is_recorded = False
        self._this_order, self._last_order = [], []
        num_resets = [team.step.num_resets for team in self.teams]
        try:
            for team in self.teams:
                reset_together(team.step, mended)
                team.agree_anew()
                team.step.has_forward = False  # some ranks have not come to theirs
        finally:  # weights that differ are an error, of a model that is level again
            for team, before in zip(self.teams, num_resets, strict=True):
                if team.step.num_resets > before:
                    team.gather_log.level(team.watch, f"reset {team.step.num_resets}")
            self._free_all()

    def drop_attempt(self) -> None:
        """Forget a step that was under way on this rank, and of which the others know nothing."""
        self.fail_forward()
        self._forget_backward()
        self.is_recorded = False
        for team in self.teams:
            team.step.reset()
        self._free_all()

    def prepare_program(self) -> None:
        """Before a program: nothing is whole or on its way, and shards lie where they will be read."""
        self.orders.forget()
        for unit in self.units:
            unit.reshard()
            for store in unit.stores:
                store.follow()

    def note_program(self) -> None:
        """A program has updated the shards, which no tensor counts."""
        for step in self.steps:
            step.num_writes += 1

    @contextmanager
    def unlogged(self) -> Iterator[None]:
        """Within this context gathers are not noted: other ranks may replay a program, of which none are."""
        for team in self.teams:
            team.gather_log.is_silent = True
        try:
            yield
        finally:
            for team in self.teams:
                team.gather_log.is_silent = False

    def drop_local_gradients(self, units: Sequence[Unit]) -> None:
        """Forget what passes that did not synchronise have left for these units."""
        for team in self.teams:
            if team.step.state is State.IDLE:
                team.memory.drop([load for load in team.memory.loads if load.unit in units], team.step.reducer.buckets)
                team.step.holds_local_gradients = any(slot.dirty for slot in team.step.reducer.slots)

    def _free_all(self) -> None:
        for team in self.teams:
            team.memory.forget(team.step.reducer.slots)
        for unit in self.units:
            unit.reshard()
        self.orders.begin_anew()


def refuse_compiled_autograd() -> None:
    """Raise where compiled autograd runs a backward: the engine has no pass then, by which gradients are counted."""
    if torch_private.in_compiled_backward():
        raise errors.LockstepError(
            "Compiled autograd runs this backward, which sharded models do not support yet: their gradients would be "
            "wrong. Fix: leave the setting compiled_autograd of dynamo off; the backward of a compiled model is "
            "compiled without it."
        )


def _note_unused(team: Team) -> bool:
    """Whether unused parameters are to be searched for in the forward that just ran."""
    step = team.step
    counts = step.closing.used_counts
    if counts is not None and len(counts) == len(step.reducer.slots):
        team.had_unused = team.had_unused or not all(counts) or step.unused_changed
    return team.had_unused


def plan_of(units: Sequence[Unit]) -> ShardPlan:
    """What the units are, as pure data."""
    layouts = []
    for unit in units:
        specs = [p.spec for store in unit.stores for p in store.parameters]
        if specs:
            layouts.append(UnitLayout(unit.name, flat_layouts(specs, unit.mesh.world), unit.mesh.key))
    return ShardPlan(tuple(layouts))


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """The units of all modules in ``module``, outer ones first, each once, with its name there."""
    seen: set[Unit] = set()
    for name, child in module.named_modules():
        unit = getattr(child, "_lockstep_unit", None)
        if unit is not None and unit not in seen:
            seen.add(unit)
            yield name, unit


def root_of(unit: Unit) -> Root:
    """The root that a unit belongs to, made when it is first asked for."""
    if unit.root is not None:
        return unit.root
    with torch.inference_mode(False):  # it outlives an evaluation that may be the first to ask
        return _make_root(unit.top())


def name_units(top: Unit) -> list[Unit]:
    """Name the units of a model, and their parameters, as the model does; returns the units, outer ones first."""
    modules = [module for reference in top.module_references if (module := reference()) is not None]
    units: list[Unit] = []
    names: dict[int, str] = {}
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, member in units_in(module):
            if member not in units:
                member.name = prefix + name or type(module).__name__.removeprefix("FSDP")
                units.append(member)
        names |= {id(p): prefix + name for name, p in module.named_parameters(remove_duplicate=False)}
    for member in units:
        for parameter in member.parameters:
            parameter.name = names.get(id(parameter.sharded), parameter.name)
    return units


def _make_root(top: Unit) -> Root:
    for member in name_units(top):
        member.follow_modules()
    units = name_units(top)  # again: shards that the program has replaced are known only now
    for member in units:
        member.name_anew()
    for member in units:
        member.require_real()
    _refuse_shared(units)
    # A root that is made while something else stands in the place of shards would have no names for them.
    Registered(parameter for member in units for parameter in member.parameters).follow()
    try:
        return Root(top, units)
    except BaseException:
        for member in units:
            member.root = None
        raise


def _refuse_shared(units: Sequence[Unit]) -> None:
    """Raise for a parameter that two units have cut, each for itself: their copies would go apart."""
    seen: dict[int, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            if parameter.origin in seen:
                raise ValueError(
                    f"Parameter '{parameter.name}' is shared with '{seen[parameter.origin]}', which is already managed "
                    "by another unit. Shard the modules that share it together: fully_shard([module_a, module_b]), or "
                    "neither of them, so that the module around both has it."
                )
            seen[parameter.origin] = parameter.name
