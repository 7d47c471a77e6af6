"""What ranks must do alike: which mode they run in, and in every step whether all can replay.

Captured, the comparison of a window comes before it: a program cannot be stopped once it is launched.  Every rank
says where it is, and whether it can run this step as a program.  If one cannot, all walk through the loop, where they
compare as always; otherwise nothing more is said in that step, whether a rank replays, captures, or tried to and could
not.  So whatever a rank saw, it exchanges as often as the others.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep import errors, settings, torch_private
from lockstep.agree.board import open_board
from lockstep.agree.stamp import Stamp, disagreement
from lockstep.agree.watch import Watch
from lockstep.engine.drift import NOTHING, Words
from lockstep.engine.step_guard import updates_of
from lockstep.program.parts import Parallel
from lockstep.shard.mesh import whole_group

_STAMP_SECONDS = 60.0
_CAN_SOON = 2  # besides 0 and 1: it has traced a program, and makes it when it knows who else has
_num_steps: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def watch_of_shards(module: Any) -> Watch:
    """By which the ranks of a sharded model meet for one step of it: each of its steps opens a board of its own."""
    group = whole_group(module._lockstep_unit.mesh)
    seconds = torch_private.group_timeout(group).total_seconds()
    return Watch(open_board(group, "train steps"), group.rank(), group_seconds=seconds)


class Together:
    """The ranks that run a train step of one wrapped model; nobody else for a plain one."""

    def __init__(self, parallel: Parallel, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = optimizers
        self._parallel = parallel
        self._wrappers = parallel.wrappers
        self._sharded = parallel.sharded[:1]
        self._serials = []
        self._ran_program = False  # since ranks were last asked
        self.num_made = 0  # calls in which any rank has traced a program: all ranks count the same
        self.unable: set[int] = set()  # the ranks that could not run the last step as a program
        self.words: dict[int, str] = {}  # what each rank said in ``agree``; of nobody where there is one rank
        for wrapper in self._wrappers:  # ranks make the steps of one wrapper in the same order
            made = _num_steps.setdefault(wrapper, Counter())
            made["steps"] += 1
            self._serials.append(made["steps"])

    def agree(self, facts: dict[str, str], reasons: list[str], *, word: str = "", about: str = "") -> list[str]:
        """Compare what the step was made with; returns the reasons of all ranks against a program, or ``about``.

        ``word`` goes with it, and is in ``words`` afterwards with those of the others.
        """
        watches = [
            (wrapper._peers.watch, serial) for wrapper, serial in zip(self._wrappers, self._serials, strict=True)
        ]
        for watch, serial in [*watches, *((watch, 1) for watch in map(watch_of_shards, self._sharded))]:
            if watch.board is None:
                continue
            key, subject = f"train step {serial}{about and ' ' + about}", "runs the first step of a lockstep.TrainStep"
            told = watch.meet(key, subject, json.dumps([facts, reasons, word]), settings.agreement_timeout())
            everyones = {rank: json.loads(text) for rank, text in watch.by_global(told).items()}
            if not about:
                self.words = {rank: theirs for rank, (_, _, theirs) in everyones.items()}
            for name in facts:
                values = {rank: str(theirs.get(name)) for rank, (theirs, _, _) in everyones.items()}
                if len(set(values.values())) > 1:
                    raise errors.Disagreement(
                        f"Ranks made their train step with another {name}:\n{errors.rank_table(values)}\n"
                        "Fix: give all ranks the same.",
                        values,
                    )
            for rank, (_, theirs, _) in sorted(everyones.items()):
                reasons = reasons + [f"rank {rank}: {reason}" for reason in theirs if reason not in reasons]
        return reasons

    def all_can(self, can: bool, micro: int, make: Callable[[list[int]], bool] | None = None) -> bool:
        """Whether every rank can run this step as a program; compares where ranks are, too.

        ``make`` is given where this rank has traced one: it is told which ranks (of the group) have traced one in this
        call, makes it, and returns whether it could.  Then ranks tell each other once more, all of them.
        """
        self.unable = set()
        if make is not None and not self._parallel.steps:
            return make([0])
        for step in self._parallel.steps:
            union = step.closing.union
            control = union.control
            reducer = step.reducer
            mark = reducer.finiteness.mark(step.num_windows)  # of what programs saw, which nobody told yet
            if control is None:
                self._judge(step, [mark], micro)
                can = make([0]) if make is not None else can
                continue
            stamp = self._stamp(step, micro)
            digest = stamp.digest() if union.check != "off" else 1
            moment = f"the comparison of ranks before step {step.num_windows}"
            numbers = [digest, _CAN_SOON if make is not None else int(can), mark, *self._drift_of(step)]
            everyones = control.start(numbers, reducer.transport.watch).wait(lambda m=moment: m)
            if len({numbers[0] for numbers in everyones}) > 1:
                error = disagreement(control.board, control.moment, stamp, True, _STAMP_SECONDS)
                if error is not None:
                    step.tell_peers(error)
                    raise error
            if union.check != "off":
                with step.telling_peers():
                    step.drift.judge(step, {rank: told[3:5] for rank, told in enumerate(everyones)})
            self._judge(step, [numbers[2] for numbers in everyones], micro)
            answers = [numbers[1] for numbers in everyones]
            if _CAN_SOON in answers:
                self.num_made += 1
                can = make([r for r, answer in enumerate(answers) if answer == _CAN_SOON]) if make is not None else can
                moment = f"the programs that ranks make before step {step.num_windows}"
                told = control.start([digest, int(can)], reducer.transport.watch).wait(lambda m=moment: m)
                answers = [numbers[1] for numbers in told]
            can = all(answers)
            self.unable |= set(control.board.by_global({r: "" for r, answer in enumerate(answers) if not answer}))
        self._ran_program = False
        return can

    def _drift_of(self, step: Any) -> Words:
        if not step.closing.compares:
            return NOTHING
        step.drift.look_before_program(step)
        step.drift.open(step)
        step.drift.use_settings(step, [updates_of(optimizer, step) for optimizer in self._optimizers])
        return step.drift.words()  # type: ignore[no-any-return]

    def _judge(self, step: Any, marks: list[int], micro: int) -> None:
        reducer = step.reducer
        # Windows of the loop are judged at their end.
        is_over = self._ran_program and micro == 0
        if any(marks) or (reducer.finiteness.is_episode and is_over):
            reducer.finiteness.judge(marks, reducer.transport, step.num_windows, reducer.buckets)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Within this context windows are not compared again."""
        steps = self._parallel.steps
        for step in steps:
            step.closing.is_compared = True
        try:
            yield
        finally:
            self._ran_program = True
            for step in steps:
                step.closing.is_compared = False

    def _stamp(self, step: Any, micro: int) -> Stamp:
        reducer = step.reducer
        return Stamp(
            wrapper=step.closing.union.name,
            window=step.num_windows,
            kind=f"train step, micro-step {micro}",
            updates=step.num_updates,
            plan=reducer.plan.digest,
            frozen=tuple(slot.name for slot in reducer.slots if not slot.parameter.requires_grad),
            cast=step.casts.names(),
            exchange=reducer.exchange.name,
            num_buckets=len(reducer.buckets),
            skipped=(),
            resets=step.num_resets,
        )
