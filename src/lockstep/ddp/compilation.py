"""Compilation of a wrapped model: the plan for it, who compiles its graphs, and what came of them.

[Note: when the plan is chosen]  Bucket sizes that the user did not give are chosen before the first backward, from the
speed of the link and the pace of the backward.  The link is measured by collectives, so all ranks must be there: in
their first forward they tell each other, over the board, whether they are about to compile, and measure if all are.
The pace is read off the first graph; rank 0's plan is what all take.
"""

from __future__ import annotations

import logging
import sys
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from lockstep import settings, torch_private
from lockstep.ddp import setup
from lockstep.ddp.options import Overlap
from lockstep.ddp.peers import Peers
from lockstep.ddp.plan_keeper import PlanKeeper
from lockstep.ddp.uneven import UnevenInputs
from lockstep.engine.link import measure_link
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep
from lockstep.graph.backend import OverlapCompiler
from lockstep.graph.explain import REST_CAME_LATER, Explanation, explain_graphs
from lockstep.graph.numbers import RankNumbers
from lockstep.graph.pace import measure_flops_per_second, pace_of, ready_order
from lockstep.plan import BucketCaps, Plan
from lockstep.plan.build import plan_from_groups
from lockstep.plan.link import LinkModel
from lockstep.plan.overlap import Pace, choose_caps, pace_from_total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.engine.bucket import Slot
    from lockstep.plan import ParameterSpec

logger = logging.getLogger("lockstep")

# Where nothing travels, a bucket is only a cost: few of them, but not so large that a second copy of one hurts.
_LONE_CAP_BYTES = 256 * 1024 * 1024
# A bucket costs the computing thread about this much: on a CPU with its share of the collective; on the host of a GPU
# the Python of a launch, 0.05 ms on a fast one and 0.15 ms on a slow one.
LAUNCH_SECONDS = {"cpu": 2e-4, "cuda": 1e-4}
# A graph with less of the model than this says little about the whole backward.
_ENOUGH_OF_THE_MODEL = 0.8


_INTENTION = "intention to compile"
_FIRST_PLAN = "plan for the first compiled graph"
# Reasons for which a bucket leaves after a graph, and nothing is wrong.
_AS_MEANT = ("compiled autograd", REST_CAME_LATER)
# By group and by the plan before the choice: what was chosen in this process.
_chosen_plans: dict[tuple[str, str], Plan] = {}


class Compilation:
    """Looks after what is compiled of one wrapped module."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        step: SyncStep,
        keeper: PlanKeeper,
        peers: Peers,
        uneven: UnevenInputs,
        *,
        overlap: Overlap | None,
        caps: BucketCaps,
        plan_is_given: bool,
        sizes_are_open: bool,
    ) -> None:
        self._module = module
        self._device = device
        self._step = step
        self._keeper = keeper
        self._peers = peers
        self._uneven = uneven
        self.overlap = overlap
        self._caps = caps
        self._plan_is_given = plan_is_given
        # Whether bucket sizes are this wrapper's to choose: the user gave neither sizes nor a plan.
        self.sizes_are_open = sizes_are_open
        self._first_digest = step.reducer.plan.digest
        self._link: LinkModel | None = None
        self._has_asked = self._all_compile = False
        self._has_settled = self._has_asked_for_program = False
        self._numbers = RankNumbers(peers.board, self._are_together)
        self.explains_when_settled = False
        self._num_graphs_seen = self._num_graphs_checked = -1
        self._num_passes_to_check = 0

    def keep(self, plan: Plan) -> None:
        """Take a plan for good, as if the user had given it; on all ranks, before the first backward."""
        self._plan_is_given, self.sizes_are_open = True, False
        if plan.digest != self._step.reducer.plan.digest:
            self._keeper.adopt(plan)

    def ask_once(self, compiler_is_watching: bool) -> None:
        """Ask the others, in the first forward that will have a backward; see [Note: when the plan is chosen]."""
        if not self._has_asked:
            self._has_asked = True
            self._ask(compiler_is_watching)

    @torch_private.without_compiler
    def _ask(self, compiler_is_watching: bool) -> None:
        if self._peers.world == 1:
            self._all_compile = True
            self._link = LinkModel.free() if self.sizes_are_open else None
            return
        if self._peers.board is None or not self._peers.board.is_ours:
            return
        known = _chosen_plans.get(self._plan_key)
        mine = compiler_is_watching or (
            any(map(torch_private.is_compiled, self._module.modules())) and not torch_private.compiler_is_off()
        )
        if not mine or self.overlap == "none":
            # For those who ask; an eager rank never waits.
            self._peers.board.post(f"{_INTENTION}/{self._peers.rank}", "no")
            return
        if not self.sizes_are_open:
            answer = "yes"
        else:
            answer = "yes, sizes open" if known is None else f"yes, plan {known.digest}"
        told = set(self._peers.watch.gather(_INTENTION, answer, settings.agreement_timeout()).values())
        self._all_compile = "no" not in told
        if told == {"yes, sizes open"}:
            self._link = measure_link(self._peers.group, self._device, self._peers.watch)
        elif known is not None and told == {f"yes, plan {known.digest}"}:
            self._keeper.adopt(known)

    @property
    def _plan_key(self) -> tuple[str, str]:
        """A second wrapper of the same kind takes the plan of the first: it may be given the same graphs, too."""
        return (self._peers.group.group_name, self._first_digest)

    # ---------------------------------------------------------------- what came of it

    def explain(self) -> Explanation:
        """See :func:`lockstep.explain`."""
        return explain_graphs(self._keeper.graphs, self._step.reducer, self._module, self._measured_exposed_seconds())

    def _measured_exposed_seconds(self) -> float | None:
        """How long the last steps waited for the link; unknown where a wait does not stop the host."""
        if not self._step.reducer.transport.blocks_host(self._device):
            return None
        waits = [step.exposed_seconds for step in self._step.reducer.timeline.steps]
        return median(waits) if waits else None

    def check(self) -> None:
        """Say what did not come as expected, after the third reduction, and again when more was compiled."""
        num_graphs, num_passes = len(self._keeper.graphs), self._step.num_windows
        if self._num_graphs_seen != num_graphs:
            self._num_graphs_seen = num_graphs
            self._num_passes_to_check = max(3, num_passes + 2)  # the first one only watches what comes from a graph
        if self._num_graphs_checked == num_graphs or num_passes < self._num_passes_to_check:
            return
        self._num_graphs_checked = num_graphs
        explanation = self.explain()
        for name in explanation.never_ran:
            warnings.warn(f"{name} was compiled, but no graph of it has run.", stacklevel=4)
        for graph in explanation.graphs:
            for launch in graph.launches:
                if not launch.delivers and not launch.left_because.startswith(_AS_MEANT):
                    why = launch.left_because or "the graph has not delivered them"
                    warnings.warn(
                        f"The compiled graph of {graph.region} was to launch {', '.join(launch.names[:5])}"
                        f"{', ...' if len(launch.names) > 5 else ''} in its backward, but they are reduced after it: "
                        f"{why}. lockstep.explain(model) tells more.",
                        stacklevel=4,
                    )
        if self._keeper.graphs and self._step.reducer.rank == 0:
            if self.explains_when_settled:
                print(explanation, file=sys.stderr)
            logger.info("%s", explanation)

    # ---------------------------------------------------------------- the plan for a graph

    def compiler_for(self, backend: Callable[..., Any]) -> OverlapCompiler:
        return OverlapCompiler(
            self._step,
            self._keeper.graphs,
            backend,
            self.overlap,
            self._caps,
            settle_plan=self._settle_plan,
            board=self._peers.board,
            numbers=self._numbers,
        )

    def _are_together(self) -> bool:
        """Whether all ranks are in their first forward, and compile it."""
        is_first = not self._step.num_windows and self._step.state is State.IDLE and not torch_private.in_backward()
        return is_first and self._all_compile and not self._uneven.is_on

    def _settle_plan(
        self, gm: fx.GraphModule, slots: dict[int, Slot], split_groups: Sequence[Sequence[str]] | None
    ) -> None:
        """Take the plan that suits this graph, which is cut by ``split_groups``, before the first backward."""
        if self._plan_is_given or self._step.num_windows or self._step.state is not State.IDLE:
            return
        if not self._all_compile or self._uneven.is_on or torch_private.in_backward():
            return  # others would not come to agree on it, or it is too late
        if self._has_settled:
            return  # once, since a later graph may be compiled on some ranks only
        self._has_settled = True
        plan = self._plan_of_parts(split_groups) if split_groups is not None else self._plan_by_pace(gm, slots)
        is_open = split_groups is not None or self._link is not None
        if self._peers.board is not None and not is_open:
            # Ranks whose backend cuts the graph ask all; nobody waits for them here.
            self._peers.board.post(f"{_FIRST_PLAN}/{self._peers.rank}", "none")
        elif self._peers.board is not None:
            mine = "none" if plan is None else plan.to_json()
            told = self._peers.watch.gather(_FIRST_PLAN, mine, settings.agreement_timeout())
            if plan is None or "none" in told.values():
                return
            plan = setup.choose_plan(list(plan.parameters), self._caps, Plan.from_json(told[0]))
        if plan is None:
            return
        if split_groups is None:
            _chosen_plans[self._plan_key] = plan
        if plan.digest != self._step.reducer.plan.digest:
            self._keeper.adopt(plan)
        logger.info("The plan for the compiled model:\n%s", plan)

    def settle_for_program(self, backward_seconds: float) -> None:
        """Take the plan that suits a program of the whole step, between the first window and the second.

        All ranks come here at the same place, once per wrapper.  A communication hook may have begun to keep things by
        bucket, so where there is one the plan stays.
        """
        step = self._step
        if self._has_asked_for_program or self._peers.board is None or self._uneven.is_on:
            return
        self._has_asked_for_program = True
        if not self.sizes_are_open or self.overlap == "none":
            return  # on all ranks alike: options and plans are compared
        known = _chosen_plans.get(self._plan_key)
        answer = "settled" if self._has_settled else "open" if known is None else f"plan {known.digest}"
        if step.reducer.exchange is not step.reducer.mean:
            answer = "stays"  # hooks are compared at the end of the window that comes
        timeout = settings.agreement_timeout()
        told = set(self._peers.watch.gather("bucket sizes for a program", answer, timeout).values())
        plan = known if known is not None and told == {f"plan {known.digest}"} else None
        if told == {"open"}:
            self._link = measure_link(self._peers.group, self._device, self._peers.watch)
            specs = setup.specs_of(step.reducer.slots, setup.sparse_parameter_names(self._module))
            mine = self._plan_by_size(specs, backward_seconds).to_json()
            told_plans = self._peers.watch.gather("plan for the first program", mine, timeout)
            plan = setup.choose_plan(specs, self._caps, Plan.from_json(told_plans[0]))
            _chosen_plans[self._plan_key] = plan
        self._has_settled = True
        if plan is not None and plan.digest != step.reducer.plan.digest:
            self._keeper.adopt(plan)
            logger.info("The plan for the program of the whole step:\n%s", plan)

    def _plan_by_size(self, specs: list[ParameterSpec], backward_seconds: float) -> Plan:
        """By the order in which gradients became ready in the last window; each takes time by its size."""
        assert self._link is not None
        order = [slot.name for slot in self._step.ready_order]
        order += [spec.name for spec in reversed(specs) if spec.name not in set(order)]
        pace = pace_from_total(specs, backward_seconds, ready_order=order)
        launch_seconds = LAUNCH_SECONDS.get(self._device.type, LAUNCH_SECONDS["cuda"])
        return choose_caps(specs, pace, self._link, launch_seconds=launch_seconds, ready_order=order).plan

    def _plan_of_parts(self, groups: Sequence[Sequence[str]]) -> Plan:
        specs = setup.specs_of(self._step.reducer.slots, setup.sparse_parameter_names(self._module))
        return plan_from_groups(specs, groups, self._caps)

    def _plan_by_pace(self, gm: fx.GraphModule, slots: dict[int, Slot]) -> Plan | None:
        if self._link is None or not self.sizes_are_open:
            return None
        specs = setup.specs_of(self._step.reducer.slots, setup.sparse_parameter_names(self._module))
        covered = {slot.name for slot in slots.values()}
        if sum(s.num_bytes for s in specs if s.name in covered) < _ENOUGH_OF_THE_MODEL * sum(
            s.num_bytes for s in specs
        ):
            return None
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        names = {placeholders[index]: slot.name for index, slot in slots.items()}
        order = ready_order(gm, names)
        order += [spec.name for spec in reversed(specs) if spec.name not in set(order)]
        if self._link == LinkModel.free():
            caps = BucketCaps(_LONE_CAP_BYTES, _LONE_CAP_BYTES)
            return setup.choose_plan(specs, caps, None, order)
        speed = measure_flops_per_second(self._device, self._compute_dtype())
        pace = pace_of(gm, names, speed)
        ready = {spec.name: pace.ready_seconds.get(spec.name, pace.backward_seconds) for spec in specs}
        launch_seconds = LAUNCH_SECONDS.get(self._device.type, LAUNCH_SECONDS["cuda"])
        choice = choose_caps(
            specs, Pace(ready, pace.backward_seconds), self._link, launch_seconds=launch_seconds, ready_order=order
        )
        return choice.plan

    def _compute_dtype(self) -> torch.dtype:
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return next((slot.parameter.dtype for slot in self._step.reducer.slots), torch.float32)
