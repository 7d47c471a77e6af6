"""``delay_all_reduce_named_params``: a reducer of its own for the parameters whose reduction waits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.ddp import setup
from lockstep.engine.bucket import Slot
from lockstep.engine.delayed import DelayedReduction
from lockstep.engine.grad_memory import GradMemory
from lockstep.engine.lane import Lane
from lockstep.engine.memory import GradOwnership
from lockstep.engine.reducer import Reducer
from lockstep.engine.transport import Transport
from lockstep.observe.timeline import Timeline
from lockstep.plan import BucketCaps


def delayed_reduction(
    module: nn.Module,
    names: Sequence[str],
    trigger: nn.Parameter,
    transport: Transport,
    lane: Lane,
    *,
    ownership: GradOwnership,
    caps: BucketCaps,
    finds_unused: bool,
) -> DelayedReduction:
    """Plan the delayed parameters by themselves."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    owners = {id(p): type(m).__name__ for m in module.modules() for p in m.parameters(recurse=False)}
    slots = [Slot(n, parameters[n], owners.get(id(parameters[n]), ""), i) for i, n in enumerate(names)]
    plan = setup.choose_plan(setup.specs_of(slots, set()), caps, None)
    timeline = Timeline(transport.rank, num_steps=1)
    reducer = Reducer(plan, slots, transport, GradMemory(ownership), timeline)
    return DelayedReduction(reducer, trigger, lane, finds_unused=finds_unused)
