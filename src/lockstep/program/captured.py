"""Captured programs: one CUDA graph for each kind of micro-step and batch, replayed.

    the first times      the loop, on the stream on which programs are captured: real steps of the training
    then                 captured (nothing happens), and replayed: that step
    from then on         inputs are copied in, rates written, replayed

[Note: what a capture leaves]  A capture runs Python as a step does, and nothing on the device.  So what Python counted
is put back, and counted again by each replay.  A capture that fails has changed nothing either; the step then walks
through the loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep import errors, torch_private
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import now
from lockstep.program.batch import Batch, Unwritten, map_tensors
from lockstep.program.cuda import Inbox, Machine, Mark, Recording
from lockstep.program.guards import Surroundings, TrainedInWindow, memory_of, optimizer_settings, trains
from lockstep.program.kept import Kept
from lockstep.program.optimizers import Rates, keeps_python_state, load_kernels, move_step_counts
from lockstep.program.places import shown
from lockstep.program.randomness import HostRandomness
from lockstep.program.reasons import JOINED, takes_rate_as_tensor
from lockstep.program.recipe import Recipe
from lockstep.program.record import Record
from lockstep.program.restless import Kind, Restless
from lockstep.program.shard_reasons import why_not_captured_now
from lockstep.program.together import Together
from lockstep.program.windows import WindowCounts, missing_in_proof, note_replay

WARMUP_CALLS = 3  # of each kind of batch: the compiler compiles, libraries choose kernels, optimizers make their state
_MAX_AHEAD = 2  # replays that may be queued before the host waits
_MAX_KINDS = 1000  # of batches that are remembered
_CHECK_EVERY = 16  # replays from one look at the device's counter to the next


class Refused(Exception):
    """This step cannot be captured, for the reason that the message gives."""


@dataclass
class Program:
    """One captured micro-step."""

    recording: Recording
    inbox: Inbox
    outputs: Any
    gradients: list[Tensor | None]
    grad_norm: Tensor | None
    shown: str
    keeps: list[Any] = field(default_factory=list)
    num_replays: int = 0


class Captured:
    """Runs micro-steps as captured programs where it can, and by the recipe where it cannot."""

    def __init__(self, recipe: Recipe, together: Together, machine: Machine, record: Record) -> None:
        self._recipe = recipe
        self._together = together
        self._machine = machine
        self._record = record
        self._programs: dict[Kind, Program] = {}
        self._seen: Counter[int] = Counter()  # by hash, as those below: a kind holds all that Python held
        self._waits: dict[int, list[str]] = {}
        self._refused: dict[int, str] = {}
        self._never = ""  # why no step at all can be captured
        self._has_changed = False  # its surroundings, in the last step of the loop
        self._surroundings = Surroundings(recipe)
        self._restless = Restless(self._surroundings, recipe.options)
        self._rates: Rates | None = None
        self._rates_are_baked = not all(map(takes_rate_as_tensor, recipe.options.optimizers))
        self._memory: Hashable = None
        self._current: Program | None = None
        self._trained = TrainedInWindow()
        self._kept = Kept(recipe, self._trained)
        self._counter = torch.zeros((), dtype=torch.int64, device=recipe.parallel.device)
        self._counter.add_(0)  # its kernel is loaded before it is captured
        self._num_counted = 0
        self._queue: deque[tuple[Mark, Mark, int]] = deque()
        self._unread: tuple[Mark, Callable[[], int], int] | None = None
        self._streams_are_ready = False

    # ---------------------------------------------------------------- one micro-step

    def micro(self, tree: Any, index: int, *, is_last: bool) -> Any:
        """Run micro-step ``index`` of a window, with the update if it is the last."""
        batch = Batch.of(tree)
        self._look_at_memory()
        if index > 0:
            self._kept.take_edits()
        if self._never and not self._programs:  # what Python holds does not matter any more
            self._trained.has_changed(self._recipe.parameters, index)
            if not self._recipe.parallel.is_joined:
                self._together.all_can(False, index)
            return self._loop(tree, index, is_last, None)
        key = self._key(batch, index, is_last)
        program = self._programs.get(key)
        restless = self._restless.look(key, batch, is_new=program is None and not self._seen[hash(key)])
        if restless and not self._never:
            self._record.fall_back(restless)
        is_other = self._trained.has_changed(self._recipe.parameters, index) or self._surroundings.forbid(self._record)
        can = not is_other and self._shards_can() and (program is not None or self._may_capture(key, batch))
        if self._recipe.parallel.is_joined:
            self._record.fall_back(JOINED)
            return self._loop(tree, index, is_last, key)
        if not self._together.all_can(can, index):
            self._record.unable |= self._together.unable if can else set()
            unwritten = Unwritten(batch)
            result = self._loop(tree, index, is_last, key)
            if reason := unwritten.reason():
                self._refuse(key, reason)
            return result
        with self._together.compared(), self._unlogged():
            if program is None:
                try:
                    program = self._programs[key] = self._capture(batch, index, is_last)
                except Exception as error:
                    self._note_refusal(key, error)
                    return self._loop(tree, index, is_last, key)
            return self._replay(program, batch, is_last=is_last)

    def _key(self, batch: Batch, index: int, is_last: bool) -> Kind:
        recipe = self._recipe
        optimizers = recipe.options.optimizers
        baked = optimizer_settings(optimizers, with_rates=self._rates_are_baked) if is_last else ()
        amp = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        # Middle micro-steps are alike; the first clears gradients.
        kind = (index == 0, is_last)
        units = tuple([unit.settings for root in recipe.parallel.roots for unit in root.units])
        return Kind(kind, batch.key, self._surroundings.values(), baked, trains(recipe.parameters), amp, units)

    def _look_at_memory(self) -> None:
        """Where parameters or states lie elsewhere now, what was captured would write to where they were."""
        memory = memory_of(self._recipe.parameters, self._recipe.options.optimizers)
        if memory == self._memory:
            return
        if self._programs:
            self._record.note("parameters or optimizer state were replaced; programs are captured anew")
            self._seen.clear()
        self._programs.clear()
        self._kept.forget()
        self._memory, self._current, self._rates = memory, None, None

    # ---------------------------------------------------------------- whether

    def _shards_can(self) -> bool:
        """Whether nothing about sharded models forbids a program in this step; the reason is noted."""
        reason = next(filter(None, map(why_not_captured_now, self._recipe.parallel.roots)), "")
        if reason:
            self._record.fall_back(reason)
        return not reason

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        with ExitStack() as stack:
            for root in self._recipe.parallel.roots:
                stack.enter_context(root.unlogged())
            yield

    def _may_capture(self, key: Kind, batch: Batch) -> bool:
        if self._never or hash(key) in self._refused or self._seen[hash(key)] < WARMUP_CALLS:
            return False
        if batch.opaque:
            return self._refuse(key, f"the batch holds a {batch.opaque}, which may be another one in each step")
        if any(t.requires_grad for t in batch.tensors):
            return self._refuse(key, "the batch holds a tensor that needs a gradient")
        if waits := self._waits.get(hash(key)):
            places = ", ".join(dict.fromkeys(waits))
            return self._refuse(key, f"the step waits for the GPU at {places}")
        python_state = keeps_python_state(self._recipe.options.optimizers)
        if python_state:
            return self._refuse(key, python_state)
        if any(map(torch_private.optimizer_has_hooks, self._recipe.options.optimizers)):
            return self._refuse(key, "hooks run at the optimizer's step, or it was replaced")
        if len(self._programs) >= self._recipe.options.max_programs:
            shapes = "; ".join(dict.fromkeys(p.shown for p in self._programs.values()))
            reason = (
                f"there are {len(self._programs)} programs already (max_programs={self._recipe.options.max_programs}), "
                f"for batches of {shapes}; the loop runs batches of {batch.shown()}"
            )
            alike = [kind for kind in self._programs if (kind.moment, kind.batch) == (key.moment, key.batch)]
            if alike:  # they are not for other batches
                reason += f"; this has changed since: {self._restless.difference(alike[-1], key, '', '')[0]}"
            return self._refuse(key, reason, warn=True)
        return True

    def _refuse(self, key: Hashable, reason: str, warn: bool = False) -> bool:
        self._refused[hash(key)] = reason
        self._record.fall_back(reason, warn=warn)
        return False

    def _note_refusal(self, key: Hashable, error: BaseException) -> None:
        first = error
        while first.__context__ is not None:  # the end of a capture that broke raises once more
            first = first.__context__
        if isinstance(first, Refused):
            self._refuse(key, f"it cannot be captured: {first}")
            return
        # What was captured before draws its random numbers from a generator that a broken capture may have spoilt.
        self._never = f"it cannot be captured: {shown(first)}"
        self._programs.clear()
        self._record.fall_back(self._never)

    # ---------------------------------------------------------------- the loop

    def _loop(self, tree: Any, index: int, is_last: bool, key: Hashable) -> Any:
        self._seen[hash(key)] += 1
        recipe = self._recipe
        if not self._streams_are_ready:
            self._renew_accumulators()
        # The last one before a capture shows where the host would wait, which in a capture would be an error.
        looks = not self._never and self._seen[hash(key)] == WARMUP_CALLS and hash(key) not in self._refused
        before = self._surroundings.values() if not self._never else ()
        with self._machine.aside():
            if looks:
                with self._machine.noting_waits() as places:
                    result = self._walk(recipe.moved(tree), index, is_last)
                self._waits[hash(key)] = places
            else:
                result = self._walk(recipe.moved(tree), index, is_last)
        self._current = None
        self._record.num_loop_calls += 1
        self._refuse_unused(key)
        changed = self._surroundings.changed(before) if not self._never else ""
        if changed and self._has_changed:  # once may be to set things up, and the next call is of another kind
            self._never = changed
            self._record.fall_back(changed)
        self._has_changed = bool(changed)
        if len(self._seen) > _MAX_KINDS:
            self._seen.clear()  # of a program that never sees the same twice
            self._refused.clear()
            self._waits.clear()
        return result

    def _walk(self, batch: Any, index: int, is_last: bool) -> Any:
        recipe = self._recipe
        if index == 0:
            self._kept.begin()
        elif self._current is not None:
            self._kept.attach()
        result = recipe.micro(batch, is_last=is_last)
        if is_last:
            recipe.update()
        return result

    def _renew_accumulators(self) -> None:
        """Autograd's nodes at the parameters stay on the stream they were made on: let the side stream make them."""
        self._streams_are_ready = True
        parallel = self._recipe.parallel
        for step in parallel.steps:
            for slot in step.reducer.slots:
                slot.accumulator = None
        for unit in [unit for root in parallel.roots for unit in root.units]:
            for store in unit.stores:
                store.forget_accumulator()

    def _refuse_unused(self, key: Hashable) -> None:
        """Ranks of a sharded model tell each other in each step which parameters any of them used; a program cannot."""
        for root in self._recipe.parallel.roots if not self._never else ():
            for step in root.steps:
                counts = step.closing.used_counts or []
                unused = [slot.name for slot in step.reducer.slots if not counts[slot.position]] if counts else []
                if unused and hash(key) not in self._refused:
                    self._refuse(key, f"no rank uses these parameters in such a step: {', '.join(unused[:5])}")

    # ---------------------------------------------------------------- capture

    def _capture(self, batch: Batch, index: int, is_last: bool) -> Program:
        recipe = self._recipe
        move_step_counts(recipe.options.optimizers)
        if self._rates is None:
            self._rates = Rates(recipe.options.optimizers, recipe.parallel.device)
            load_kernels(recipe.options.optimizers, self._rates.tensors)
        if index == 0 and recipe.options.accumulate == 1:
            recipe.begin()
        elif index > 0:
            self._kept.attach()
        for root in recipe.parallel.roots:
            root.prepare_program()
        for step in recipe.parallel.steps:
            step.reducer.finiteness.prepare_capture(len(step.reducer.buckets), recipe.parallel.device)
        inbox = self._machine.inbox(batch.tensors)
        inbox.put(batch.tensors)
        counts, randomness, before = (
            WindowCounts(recipe.parallel),
            HostRandomness(elsewhere=True),
            self._surroundings.values(),
        )
        norm = recipe.grad_norm
        ok = False
        try:
            with self._rates.in_place():
                recording, outputs = self._machine.record(
                    lambda: self._captured_walk(batch.rebuilt(inbox.tensors), index, is_last)
                )
            self._check_capture(randomness, before, is_last)
            ok = True
        finally:
            if not ok:
                recipe.parallel.reset()
                recipe.grad_norm = norm
                self._current = None
                recipe.begin()
                if index > 0:
                    self._kept.attach()
            randomness.restore()
            counts.put_back()
        gradients = [p.grad for p in recipe.parameters]
        program = Program(recording, inbox, outputs, gradients, recipe.grad_norm, batch.shown())
        # What a program writes to must stay its own, also where Python has let go of it.
        program.keeps = [g.detach() for g in gradients if g is not None]
        program.keeps += self._surroundings.objects()  # what it was made for
        units = [unit for root in recipe.parallel.roots for unit in root.units]
        program.keeps += [comm for unit in units for comm in (unit.gather_comm, unit.scatter_comm)]
        self._record.num_captures += 1
        self._current = program
        return program

    def _captured_walk(self, batch: Any, index: int, is_last: bool) -> Any:
        recipe = self._recipe
        if index == 0 and recipe.options.accumulate > 1:
            self._kept.begin()
        result = recipe.micro(batch, is_last=is_last)
        if is_last:
            recipe.update()
            self._counter.add_(1)
        return result

    def _check_capture(self, randomness: HostRandomness, before: tuple[Any, ...], is_last: bool) -> None:
        drawn = randomness.drawn()
        if drawn:
            raise Refused(f"the step draws random numbers of the host ({', '.join(drawn)})")
        changed = self._surroundings.changed(before)
        if changed:
            raise Refused(changed)
        missing = missing_in_proof(self._recipe.parallel) if is_last else []
        if missing:
            raise Refused(f"it would not reduce {', '.join(missing[:5])}")

    # ---------------------------------------------------------------- replay

    def _replay(self, program: Program, batch: Batch, *, is_last: bool) -> Any:
        assert self._rates is not None
        self._wait_for_room()
        if listeners:
            for step in self._recipe.parallel.steps:
                reached(StepMoment.FORWARD, step.reducer.timeline.step, subject=step.reducer)
        if program is not self._current:
            for parameter, gradient in zip(self._recipe.parameters, program.gradients, strict=True):
                parameter.grad = gradient
            self._current = program
        program.inbox.put(batch.tensors)
        self._rates.write()
        start, began = now(), self._machine.mark()
        program.recording.replay()
        self._queue.append((began, self._machine.mark(), start))
        program.num_replays += 1
        self._record.num_replays += 1
        if is_last:
            self._recipe.grad_norm = program.grad_norm.clone() if program.grad_norm is not None else None
            self._num_counted += 1
            self._check_counter()
        note_replay(self._recipe.parallel, is_last=is_last)
        for root in self._recipe.parallel.roots:
            root.note_program()
        # The program's own results are overwritten by its next replay.
        return map_tensors(program.outputs, Tensor.clone)

    def _wait_for_room(self) -> None:
        """Let the host be a few replays ahead, and no more: a rank that hangs is noticed, and named."""
        while self._queue and (len(self._queue) >= _MAX_AHEAD or self._queue[0][1].is_completed()):
            began, ended, start = self._queue.popleft()
            for step in self._recipe.parallel.steps:
                if not ended.is_completed():
                    step.reducer.transport.watch.wait_work(
                        ended, lambda s=step: f"a replay of the captured step {s.num_windows}"
                    )
                duration = int(1e9 * ended.seconds_since(began))
                step.reducer.timeline.record("replay", start, start + duration)

    def _check_counter(self) -> None:
        """The device counts what it has run; it must be what the host has asked for."""
        if self._unread is not None and self._unread[0].is_completed():
            _, read, expected = self._unread
            self._unread = None
            if read() != expected:
                raise errors.LockstepError(
                    f"The GPU has run {read()} captured updates where {expected} were asked for: a replay failed. "
                    "Nothing after it can be trusted; go on from a checkpoint."
                )
        if self._unread is None and self._num_counted % _CHECK_EVERY == 0:
            read = self._machine.read_later(self._counter)
            self._unread = (self._machine.mark(), read, self._num_counted)

    @property
    def programs(self) -> list[Program]:
        """What was captured so far."""
        return list(self._programs.values())
