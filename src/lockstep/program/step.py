"""``lockstep.TrainStep``: one step of training, as one program where that can be, with the result of the plain loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.program import loading, open_windows, precompiling
from lockstep.program.by_bucket import BucketUpdates, why_not_by_bucket
from lockstep.program.captured import Captured
from lockstep.program.cuda import CudaMachine
from lockstep.program.facts import facts_of
from lockstep.program.guards import optimizer_settings
from lockstep.program.loading import Loading, Source
from lockstep.program.options import Mode, Options, check_options
from lockstep.program.parts import Parallel
from lockstep.program.passes import Passes
from lockstep.program.reasons import JOINED, why_not_captured, why_not_graph
from lockstep.program.recipe import Recipe
from lockstep.program.record import Record, StepExplanation
from lockstep.program.together import Together
from lockstep.program.unguarded import Compiled
from lockstep.program.whole import Whole

_WORDS = {
    Mode.LOOP: "the plain loop",
    Mode.COMPILED: "the loop with a compiled forward and backward",
    Mode.GRAPH: "one compiled program for the whole step",
    Mode.CAPTURED: "captured CUDA graphs",
}


class TrainStep:
    """Trains by one call per batch: forward, backward, reduction, clipping, optimizer, schedule.

    Args:
        model: a ``lockstep.DDP``, a sharded or a plain module, compiled or not.
        optimizer: one, or a list of several.
        loss: ``loss(model, batch)``; returns the loss, or a tuple that begins with it.
        clip_norm: the largest norm that all gradients together may have.
        clip_value: the largest value that an element of a gradient may have; one of the two.
        accumulate: how many calls make one update; the loss of each is divided by it, and only the last one reduces.
        scaler: a ``torch.amp.GradScaler``.
        scheduler: one learning-rate scheduler, or a list; each is stepped after every update.
        average: the decay of an exponential average of the weights (``averaged_state_dict``), or an ``AveragedModel``.
        mode: ``"loop"``, ``"compiled"``, ``"graph"``, ``"captured"``, or ``"auto"``, which captures where it can.
        max_programs: how many programs are made at most, for batches of different shapes.
        update_by_bucket: update a bucket's parameters as soon as it is reduced, where the optimizer allows it, so that
            gradients need not all exist at once.

    A call returns what ``loss`` returned, detached.  Tensors in a batch are moved to the model's device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Callable[[Any, Any], Any],
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        scaler: Any = None,
        scheduler: Any = None,
        average: Any = None,
        mode: str = "auto",
        max_programs: int = 8,
        update_by_bucket: bool = False,
    ) -> None:
        self._options = options = check_options(
            model,
            optimizer,
            loss,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulate=accumulate,
            scaler=scaler,
            scheduler=scheduler,
            average=average,
            mode=mode,
            max_programs=max_programs,
            update_by_bucket=update_by_bucket,
        )
        self._parallel = Parallel(model)
        self._loading = Loading(loading.source_for_next_step(), self._parallel)
        self._recipe = Recipe(options, self._parallel)
        self._together = Together(self._parallel, self._options.optimizers)
        self._record = Record(asked=mode)
        self._passes = Passes(self._parallel, options.accumulate)
        self._settings = optimizer_settings(options.optimizers, with_rates=False)
        self._runner: _Loop | Captured | Whole | None = None
        self._micro = 0
        self.num_updates = 0
        if precompiling.active is not None:
            precompiling.active.enter(self)

    # ---------------------------------------------------------------- a step

    def __call__(self, batch: Any) -> Any:
        """Run one batch; every ``accumulate``-th call updates the parameters."""
        if self._runner is None:
            self._runner = self._choose()
        index, is_last = self._micro, self.is_last
        if index == 0:
            self._recipe.follow_optimizers()
            open_windows.require_alone(self)
        with self._passes.counted(index, is_last=is_last):
            result = self._runner.micro(batch, index, is_last=is_last)
        if is_last:
            self._recipe.follow()
            self.num_updates += 1
            if precompiling.active is not None:
                precompiling.active.after_update(self)
        self._now_at(0 if is_last else index + 1)
        return result

    def _now_at(self, micro: int) -> None:
        """The next call is micro-step ``micro`` of its window."""
        self._micro = micro
        open_windows.note(self, is_open=micro > 0)

    @property
    def is_last(self) -> bool:
        """Whether the next call updates the parameters."""
        return self._micro == self._options.accumulate - 1

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last update, before it was clipped; None without ``clip_norm``."""
        return self._recipe.grad_norm

    def reset(self) -> None:
        """Begin a window anew, after an error that was caught: the next call is the first of its micro-batches.

        In the middle of micro-batches it is for all ranks: they compare how many they have run.
        """
        self._passes.drop(self._micro)
        self._now_at(0)
        self._parallel.drop_local_gradients()
        self._recipe.begin()

    # ---------------------------------------------------------------- how it runs

    def _choose(self) -> _Loop | Captured | Whole:
        options, asked = self._options, self._options.mode
        reasons: list[str] = []
        if asked in (Mode.CAPTURED, Mode.AUTO):
            reasons = why_not_captured(options, self._parallel)
        elif asked is Mode.GRAPH:
            reasons = why_not_graph(options, self._parallel)
        if self._parallel.is_joined:
            # A rank without data never comes here, so nothing can be compared.
            reasons = [JOINED] if asked in (Mode.CAPTURED, Mode.AUTO, Mode.GRAPH) else []
        else:
            found = self._loading.look(self._artifact_facts()) if self._loading.is_wanted else ""
            reasons = self._together.agree(_facts(options), reasons, word=found)
            if came := self._loading.decide(self._together.words):
                self._record.note(came)
        for reason in reasons:
            self._record.fall_back(reason)
        chosen = asked
        if asked is Mode.AUTO:
            chosen = Mode.LOOP if reasons else Mode.CAPTURED
        elif reasons:
            chosen = Mode.LOOP
        self._record.runs = _WORDS[chosen]
        self._choose_updates(chosen)
        return self._runner_of(chosen)

    def _choose_updates(self, chosen: Mode) -> None:
        """Whether parameters are updated bucket by bucket; all ranks must come to the same."""
        options = self._options
        if not options.update_by_bucket:
            return
        if chosen is Mode.GRAPH:
            reasons = ["in one compiled program the compiler decides when"]
        else:
            reasons = [JOINED] if self._parallel.is_joined else why_not_by_bucket(options, self._parallel)
        if not self._parallel.is_joined:
            reasons = self._together.agree({}, reasons, about="updates")
        if reasons:
            self._record.note(f"all gradients exist before the update, because {reasons[0]}")
        else:
            self._record.note("parameters are updated bucket by bucket, inside the backward")
            self._recipe.by_bucket = BucketUpdates(options, self._parallel)

    def _runner_of(self, chosen: Mode) -> _Loop | Captured | Whole:
        if chosen is Mode.CAPTURED:
            machine = CudaMachine(self._parallel.device)
            return Captured(self._recipe, self._together, machine, self._record)
        if chosen is Mode.GRAPH:
            return Whole(self._recipe, self._together, self._record)
        if chosen is Mode.COMPILED:
            self._recipe.compute = Compiled(self._options.model, self._options.loss, self._record)
        return _Loop(self._recipe, self._record, self._together)

    def explain(self) -> StepExplanation:
        """Say which mode runs, why, and what was made so far; after a step or two there is most to say."""
        record, runner = self._record, self._runner
        programs: list[str] = []
        notes = record.all_notes()
        if isinstance(runner, Captured):
            programs = [f"batches of {p.shown}, replayed {p.num_replays} times" for p in runner.programs]
        elif isinstance(runner, Whole):
            programs = runner.shown()
            places = runner.rank_is_baked_in_at()
            notes += [f"rank is baked in at {place}: each rank has a program of its own" for place in places]
            notes += filter(None, [runner.why_none_yet()])
        notes += [self._loading.shown()] if self._loading.is_loaded else []
        num_program_calls = record.num_replays + record.num_graph_calls
        runs = record.runs or "nothing yet; it is chosen in the first call"
        if record.reasons and record.num_loop_calls and not num_program_calls:
            runs = _WORDS[Mode.LOOP]
        return StepExplanation(
            asked=record.asked,
            runs=runs,
            reasons=tuple(record.reasons),
            notes=tuple(notes),
            programs=tuple(programs),
            num_loop_calls=record.num_loop_calls,
            num_program_calls=num_program_calls,
        )

    # ---------------------------------------------------------------- compiled once

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write all that was compiled so far to a file for ``lockstep.load_step``; returns its digest.

        Run a window or two of each kind of batch first.  Rank 0 writes; for the others this does nothing, and returns
        an empty text.  The file is code: see docs/train_step.md before you load one that is not yours.
        """
        if self._parallel.rank != 0:
            return ""
        programs = [p.digest for p in self._runner.programs] if isinstance(self._runner, Whole) else []
        if self._runner is None or (isinstance(self._runner, Whole) and not programs):
            raise RuntimeError(
                "Nothing was compiled that could be saved, of this step at least: run at least two windows of batches "
                "first. step.explain() says what runs."
            )
        made = loading.make(self._artifact_facts(), self._parallel, programs)
        return made.write(Path(path))

    @property
    def _waits_for_program(self) -> bool:
        """Whether a program is to run and there is none yet: settings that change may take a few updates more."""
        return isinstance(self._runner, Whole) and not self._runner.programs and not self._record.reasons

    def _artifact_facts(self) -> dict[str, str]:
        return facts_of(self._options, self._parallel, _facts(self._options), self._settings)

    # ---------------------------------------------------------------- state

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A TrainStep is neither copied nor pickled: it belongs to its model and optimizer. Make another one from "
            "theirs; state_dict() has what the step itself knows, save() what it compiled."
        )

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The weight averages under the plain model's names, with the model's buffers as they are."""
        if self._recipe.average is None:
            raise ValueError("There is no average here: make the step with average=0.999, say.")
        return self._recipe.average.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What the step itself knows between two updates: the number of updates, and the averages."""
        if self._micro:
            raise RuntimeError(
                f"{self._micro} of {self._options.accumulate} micro-batches are in the gradients, which are not saved: "
                "save after the call that updates (step.is_last is True before it)."
            )
        state: dict[str, Any] = {"num_updates": self.num_updates}
        if self._recipe.average is not None:
            state["averages"] = self._recipe.average.named()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.num_updates = int(state["num_updates"])
        self._passes.drop(self._micro)
        self._now_at(0)
        self._parallel.drop_local_gradients()
        if self._recipe.average is not None:
            self._recipe.average.load(state.get("averages", {}))


def load_step(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Callable[[Any, Any], Any],
    *,
    digest: str | None = None,
    **options: Any,
) -> TrainStep:
    """Make a step that takes its compiled programs from a file, on all ranks or on none.

    The file is code and runs in this process: load one only from where you would run a program.  Its own digest shows
    a changed byte; ``digest``, as ``step.save`` returned it, shows another file.  What does not fit (another torch,
    device, model, plan, option) is refused with what differs, and the ranks compile as usual.

    Args:
        path: what ``step.save`` or ``lockstep precompile`` wrote.
        model, optimizer, loss: as for :class:`TrainStep`.
        digest: the only digest that is accepted.
        options: what else :class:`TrainStep` takes; as when the file was made.
    """
    expected = loading.check_digest(digest)
    step = TrainStep(model, optimizer, loss, **options)
    step._loading = Loading(Source(Path(path), expected), step._parallel)
    return step


class _Loop:
    """The plain loop."""

    def __init__(self, recipe: Recipe, record: Record, together: Together) -> None:
        self._recipe = recipe
        self._record = record
        self._together = together

    def micro(self, batch: Any, index: int, *, is_last: bool) -> Any:
        recipe = self._recipe
        if index == 0:
            recipe.begin()
        if recipe.by_bucket is not None and recipe.parallel.is_joined:
            self._record.note("all gradients exist before the update from now on: " + JOINED)
            recipe.by_bucket = None
        if recipe.by_bucket is None:
            if recipe.options.accumulate > 1 and recipe.parallel.meets_in_micro_steps:
                self._together.all_can(True, index)  # compares: a rank in another micro-step would gather with this one
            return self._walk(batch, is_last)
        self._together.all_can(True, index)  # compares; see by_bucket.py, [Note: compared before]
        with self._together.compared():
            result = self._walk(batch, is_last)
        for wrapper in recipe.parallel.wrappers:
            wrapper.step.reducer.finiteness.tell_later(wrapper.step.num_windows - 1)
        return result

    def _walk(self, batch: Any, is_last: bool) -> Any:
        result = self._recipe.micro(self._recipe.moved(batch), is_last=is_last)
        if is_last:
            self._recipe.update()
        self._record.num_loop_calls += 1
        return result


def _facts(options: Options) -> dict[str, str]:
    """What all ranks must have made their step with."""
    return {
        "mode": options.mode.value,
        "clip_norm": str(options.clip_norm),
        "clip_value": str(options.clip_value),
        "accumulate": str(options.accumulate),
        "scaler": str(options.scales),
        "average": str(options.average if isinstance(options.average, float) else options.average is not None),
        "optimizers": ", ".join(type(o).__name__ for o in options.optimizers),
        "schedulers": ", ".join(type(s).__name__ for s in options.schedulers),
        "max_programs": str(options.max_programs),
        "update_by_bucket": str(options.update_by_bucket),
    }
