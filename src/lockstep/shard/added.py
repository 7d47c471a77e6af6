"""What a sharded module has beyond torch's ``FSDPModule``.

A module's own attributes go first: one of these names that the module or its class already has (``metrics`` is a common
one) stays what it was, and the name is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

from torch import nn

from lockstep.engine.nonfinite import Policy
from lockstep.engine.recovery import MADE_EQUAL
from lockstep.errors import LockstepError
from lockstep.observe.metrics import metrics_of
from lockstep.observe.timeline import Timeline
from lockstep.shard.explain import ShardExplanation, explain_root
from lockstep.shard.layout import ShardPlan
from lockstep.shard.root import name_units, plan_of, root_of, units_in
from lockstep.shard.uneven import Batch, join


class shown:
    """A property that gives way to what a program sets on the module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else self._function(module)


class Added:
    """The names, as functions of a sharded module; nobody inherits from this."""

    # ---------------------------------------------------------------- what there is to see

    @shown
    def plan(self: Any) -> ShardPlan:
        """How the model is cut: print it."""
        if self._lockstep_unit.root is None:
            name_units(self._lockstep_unit.top())
        return plan_of([unit for _, unit in units_in(self)])

    @shown
    def timeline(self: Any) -> Timeline:
        """What happened in the last steps: forwards, gathers, scatters and the waits for them."""
        return root_of(self._lockstep_unit).timeline

    def metrics(self: Any) -> dict[str, float]:
        """Return the last step that synchronised as a flat dict of numbers, for any logger; see docs/observing.md."""
        steps = root_of(self._lockstep_unit).timeline.steps
        buckets = [bucket for step in root_of(self._lockstep_unit).steps for bucket in step.reducer.buckets]
        in_graph = sum(step.num_left_in_graph for step in root_of(self._lockstep_unit).steps)
        return metrics_of(steps[-1] if steps else None, [bucket.spec for bucket in buckets], in_graph)

    def explain_compilation(self: Any) -> ShardExplanation:
        """What became of each unit in the last step; see :func:`lockstep.explain`."""
        return explain_root(root_of(self._lockstep_unit))

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Within this context, gradients add up locally; the first backward outside reduces all of them."""
        units = self._lockstep_units()
        before = [(unit.syncs, unit.all_reduces) for unit in units]
        for unit in units:
            unit.syncs = False
        try:
            yield
        finally:
            for unit, (syncs, all_reduces) in zip(units, before, strict=True):
                unit.syncs, unit.all_reduces = syncs, all_reduces

    def join(self: Any, batches: Iterable[Batch], *, divide_by_initial_world_size: bool = True) -> Iterator[Batch]:
        """Iterate over this rank's batches for as long as any rank has more; see docs/sharding.md.

        A rank that has run out gets its last batch again, and what its backward brings counts as zero.  The mean is
        over all ranks, or over those that have data.
        """
        return join(root_of(self._lockstep_unit), batches, divide_by_initial_world_size=divide_by_initial_world_size)

    def join_hook(self: Any, **kwargs: Any) -> NoReturn:
        """Refuse ``torch.distributed.algorithms.join.Join``, on all ranks alike, with a reason."""
        raise LockstepError(
            "torch's Join context cannot run a sharded model: within it a rank that has run out of data has left its "
            "loop, and others still need its shards, and its optimizer steps on them. Fix: iterate with "
            "`for batch in model.join(loader):` on every rank instead; see docs/sharding.md, Uneven inputs."
        )

    @shown
    def has_data(self: Any) -> bool:
        """Whether this iteration of :meth:`join` counts on this rank; true outside of it."""
        return not root_of(self._lockstep_unit).attendance.is_idle

    def set_sync_buffers(self: Any, enable: bool = True) -> None:
        """Let all ranks have the first rank's buffers after every backward that synchronises."""
        root_of(self._lockstep_unit).syncs_buffers = enable

    def reset_sync_window(self: Any, *, weights_are_equal: bool = False) -> None:
        """Forget a step that raised, on all ranks; its gradients are lost.

        Where ranks have updated their shards in different steps, only once they were made equal.
        """
        unit = self._lockstep_unit
        if unit.parent is not None:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if unit.root is not None:
            unit.root.reset(MADE_EQUAL if weights_are_equal else "")

    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce the whole gradients of each unit; this rank takes its shard of the result.

        The hook is one for a replicated model: it returns a future of the reduced buffer, and divides itself.  Where
        shards have replicas (a 2D mesh) it reduces over all of them, and nothing else is exchanged.
        """
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        for team in root_of(self._lockstep_unit).teams:
            team.set_comm_hook(state, hook, name)

    def set_nonfinite(self: Any, policy: Policy) -> None:
        """Say what to do about gradients that are NaN or Inf, as ``nonfinite=`` of the replicated wrapper does.

        On all ranks, on the outermost module, before the first backward.
        """
        if policy not in get_args(Policy):
            raise ValueError(f'nonfinite must be "warn", "raise", "skip" or "ignore", got {policy!r}.')
        for team in root_of(self._lockstep_unit).teams:
            team.step.reducer.finiteness.policy = policy


def names_for(module: nn.Module) -> dict[str, Any]:
    """Those that a module has not."""
    taken = (vars(module), module._modules, module._parameters, module._buffers)
    return {
        name: value
        for name, value in vars(Added).items()
        if not name.startswith("_") and not hasattr(type(module), name) and not any(name in names for names in taken)
    }
