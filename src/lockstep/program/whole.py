"""Mode ``"graph"``: the whole step traced once for each kind of batch, and compiled as one program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.graph.compare import IN_BACKWARD
from lockstep.program.batch import Batch, Unwritten, map_tensors
from lockstep.program.changing import NotTaken
from lockstep.program.deliver import Delivery
from lockstep.program.guards import Surroundings, TrainedInWindow, memory_of, optimizer_settings, trains
from lockstep.program.making import Draft, GraphProgram, Maker
from lockstep.program.optimizers import keeps_python_state
from lockstep.program.places import why_not_traced
from lockstep.program.reasons import JOINED
from lockstep.program.recipe import Recipe
from lockstep.program.record import Record
from lockstep.program.restless import Kind, Restless
from lockstep.program.shards import Shards
from lockstep.program.sizes import BucketSizes
from lockstep.program.together import Together
from lockstep.program.traced import StateIsMissing
from lockstep.program.untraceable import Untraceable
from lockstep.program.windows import note_replay

_MAX_KINDS = 1000  # of batches that are remembered
WARMUP_CALLS = 1  # of each kind of batch: the state of optimizers is made by a real step


class Whole:
    """Runs micro-steps as compiled programs where it can, and by the recipe where it cannot."""

    def __init__(self, recipe: Recipe, together: Together, record: Record) -> None:
        self._recipe = recipe
        self._together = together
        self._record = record
        self._programs: dict[Kind, GraphProgram] = {}
        self._seen: Counter[int] = Counter()  # by hash: a kind holds all that Python held
        self._refused: set[int] = set()
        self._never = ""  # why no step at all can be a program
        self._has_changed = False  # its surroundings, in the last step of the loop
        self._surroundings = Surroundings(recipe)
        self._restless = Restless(self._surroundings, recipe.options)
        self._memory: Hashable = None
        wrappers = recipe.parallel.wrappers
        sharded = recipe.parallel.sharded
        self._shards = Shards(sharded[0]) if sharded else None
        self._delivery: Delivery | Shards | None = Delivery(wrappers[0].step) if wrappers else self._shards
        self._maker = Maker(recipe, together, self._surroundings, self._delivery)
        # Gradients added up so far, by ``id`` of their parameter; and which have any in this window.
        self._sum_of: dict[int, Tensor] = {}
        self._has_sum: set[int] = set()
        self._trained = TrainedInWindow()
        self._sizes = BucketSizes(wrappers)
        self._is_kept = False  # this micro-step of a sharded model cannot be a program

    # ---------------------------------------------------------------- one micro-step

    def micro(self, tree: Any, index: int, *, is_last: bool) -> Any:
        """Run micro-step ``index`` of a window, with the update if it is the last."""
        if self._recipe.options.accumulate == 1:
            return self._micro(tree, index, is_last)
        if self._shards is not None:
            return self._micro_of_shards(self._shards, tree, index, is_last)
        if index == 0:
            self._has_sum.clear()
        else:
            self._put_away()
        is_closed = False
        try:
            result = self._micro(tree, index, is_last)
            is_closed = is_last
        finally:
            if not is_closed:
                self._lay_out()
        return result

    def _micro_of_shards(self, shards: Shards, tree: Any, index: int, is_last: bool) -> Any:
        """As ``micro``; nobody sees what is added up, since it belongs to whole parameters."""
        if index > 0:
            self._has_sum -= shards.dropped()
        try:
            result = self._micro(tree, index, is_last)
        except BaseException:
            self._put_away()  # the loop has laid it out; a program would reduce it once more
            raise
        if is_last:
            self._sum_of.clear()  # it is as large as the whole model
            self._has_sum.clear()
        return result

    def _micro(self, tree: Any, index: int, is_last: bool) -> Any:
        recipe = self._recipe
        tree = recipe.moved(tree)
        if recipe.parallel.is_joined:
            self._record.fall_back(JOINED)
            return self._loop(tree, index, is_last, None)
        if index == 0:
            self._sizes.settle()
        is_kept = self._is_kept_from_it()
        if self._never and not self._programs:  # what Python holds does not matter any more
            self._trained.has_changed(recipe.parameters, index)
            self._together.all_can(False, index)
            return self._loop(tree, index, is_last, None)
        batch = Batch.of(tree)
        key = self._key(batch, index, is_last)
        found = self._programs.get(key)
        if found is not None and not found.has_same_extra:
            del self._programs[key]
            found = None
        restless = self._restless.look(key, batch, is_new=found is None and not self._seen[hash(key)])
        if restless and not self._never:
            self._record.fall_back(restless)
        is_other = self._trained.has_changed(recipe.parameters, index) or is_kept
        is_other = self._surroundings.forbid(self._record) or is_other
        program = None if is_other else found
        draft: Draft | None = None
        if program is None and not is_other and self._may_trace(key, batch):
            try:
                draft = self._maker.trace(batch, self._sums(), index, is_last)
            except StateIsMissing:
                pass  # the loop makes it, when a scaler lets it
            except Exception as error:
                self._refuse(key, f"it cannot be one program: {_why(error)}")

        def make(tracing: list[int]) -> bool:
            assert draft is not None
            try:
                self._programs[key] = self._maker.make(draft, tracing)
            except Exception as error:
                return self._refuse(key, f"it cannot be one program: {_why(error)}")
            return True

        # All or none: a program rounds an update in other places than the loop, and ranks would drift apart by that.
        can = self._together.all_can(program is not None, index, make if draft is not None else None)
        program = self._programs.get(key) if draft is not None else program
        if not can or program is None:
            self._record.unable |= self._together.unable if program is not None else set()
            unwritten = Unwritten(batch)
            result = self._loop(tree, index, is_last, key)
            if reason := unwritten.reason():
                self._refuse(key, reason)
            return result
        with self._together.compared():  # just now: the end of the window needs no exchange of its own
            return self._run(program, batch, index, is_last)

    def _is_kept_from_it(self) -> bool:
        """Whether this step of a sharded model cannot be a program, as the model is set just now."""
        reason = self._shards.prepare() if self._shards is not None else ""
        if not reason and self._shards is not None and self._recipe.options.accumulate > 1 and self._shards.is_joining:
            reason = "join() is in use: micro-batches of ranks with and without data add up in buffers of the loop"
        if reason:
            self._record.fall_back(reason)
        self._is_kept = bool(reason)
        return self._is_kept

    def _key(self, batch: Batch, index: int, is_last: bool) -> Kind:
        recipe = self._recipe
        optimizers = recipe.options.optimizers
        plans = [wrapper.plan for wrapper in recipe.parallel.wrappers]
        plans += [self._shards.plan] if self._shards is not None else []
        memory = (memory_of((), optimizers), tuple(map(id, plans)))
        if memory != self._memory:
            if self._programs:
                self._record.note("the plan or the optimizer state was replaced; programs are made anew")
                self._seen.clear()  # the state of optimizers may have to be made again
            self._programs.clear()
            self._memory = memory
        device = recipe.parallel.device.type
        amp = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        baked: Hashable = ()
        if is_last:
            if recipe.numbers.follow():  # what held the settings that are inputs now will not be used again
                self._programs = {kind: made for kind, made in self._programs.items() if not kind.moment[1]}
            baked = recipe.numbers.kind(optimizer_settings(optimizers, with_rates=False))
        around = self._surroundings.values()
        units = self._shards.key() if self._shards is not None else ()
        return Kind((index == 0, is_last), batch.key, around, baked, trains(recipe.parameters), amp, units)

    def _may_trace(self, key: Kind, batch: Batch) -> bool:
        if self._never or hash(key) in self._refused or self._seen[hash(key)] < WARMUP_CALLS:
            return False
        options = self._recipe.options
        if batch.opaque:
            return self._refuse(key, f"the batch holds a {batch.opaque}, which may be another one in each step")
        if any(t.requires_grad for t in batch.tensors):
            return self._refuse(key, "the batch holds a tensor that needs a gradient")
        if self._surroundings.has_hooks:
            return self._refuse(key, "a hook looks at the gradient of a parameter, or at the steps of an optimizer")
        python_state = keeps_python_state(options.optimizers)
        if python_state:
            return self._refuse(key, python_state)
        if len(self._programs) >= options.max_programs:
            shapes = "; ".join(dict.fromkeys(p.shown for p in self._programs.values()))
            reason = (
                f"there are {len(self._programs)} programs already (max_programs={options.max_programs}), for batches "
                f"of {shapes}; the loop runs batches of {batch.shown()}"
            )
            alike = [kind for kind in self._programs if (kind.moment, kind.batch) == (key.moment, key.batch)]
            if alike:  # they are not for other batches
                reason += f"; this has changed since: {self._restless.difference(alike[-1], key, '', '')[0]}"
            return self._refuse(key, reason, warn=True)
        return True

    def _refuse(self, key: Hashable, reason: str, warn: bool = False) -> bool:
        self._refused.add(hash(key))
        self._record.fall_back(reason, warn=warn)
        return False

    # ---------------------------------------------------------------- the loop

    def _loop(self, tree: Any, index: int, is_last: bool, key: Hashable) -> Any:
        """Walk through a micro-step; gradients added up so far lie where programs add them up."""
        self._seen[hash(key)] += 1
        recipe = self._recipe
        if index == 0:
            recipe.begin()
            self._has_sum.clear()
        self._lay_out()
        if self._shards is not None and self._has_sum:
            self._shards.note_local(self._has_sum)
        before, versions = self._as_seen() if not self._never else ((), {})
        result = recipe.micro(tree, is_last=is_last)
        self._sizes.note(recipe.backward_seconds, is_last)
        if is_last:
            recipe.update()
        elif recipe.options.accumulate > 1:
            self._put_away()
        self._record.num_loop_calls += 1
        # Whole parameters that are to stay in the place of shards are no change of the program's own.
        stays_whole = self._is_kept and self._shards is not None and self._shards.is_whole
        if not self._never and not stays_whole:
            changed = self._surroundings.changed(before)
            # Once may be to set things up (a teacher that is put into eval mode): the next call is of another kind.
            self._never = (changed if self._has_changed else "") or self._surroundings.written(versions)
            self._has_changed = bool(changed)
            if self._never:
                self._record.fall_back(self._never)
        if len(self._seen) > _MAX_KINDS:
            self._seen.clear()  # of a program that never sees the same twice
            self._refused.clear()
        return result

    def _as_seen(self) -> tuple[tuple[Any, ...], dict[int, tuple[int, str]]]:
        return self._surroundings.values(), self._surroundings.versions()

    def _put_away(self) -> None:
        """Before a micro-step that is not the first, and after one of the loop: what is added up is in our sums alone.

        A program that comes next adds to them and reduces the result; in ``.grad`` it would be reduced once more.  What
        the user did to ``.grad`` between two calls (``zero_grad()``, another tensor) is done to the sums.
        """
        for parameter in self._recipe.parameters:
            holder = self._holder_of(parameter)
            gradient, holder.grad = holder.grad, None
            if gradient is None:
                if self._shards is None:
                    self._has_sum.discard(id(parameter))
                continue
            sum_so_far = self._sum_for(parameter)
            if gradient.data_ptr() != sum_so_far.data_ptr():
                sum_so_far.copy_(gradient)  # it was replaced, or the first: not added to
            self._has_sum.add(id(parameter))

    def _lay_out(self) -> None:
        """Between two micro-steps: what is added up so far is where a loop has it, and the user's to change."""
        for parameter in self._recipe.parameters:
            if id(parameter) in self._has_sum:
                self._holder_of(parameter).grad = self._sum_of[id(parameter)].detach()

    def _holder_of(self, parameter: Tensor) -> Tensor:
        """In whose ``.grad`` gradients add up until they are reduced: of a shard the whole parameter's."""
        return parameter if self._shards is None else self._shards.whole_of(parameter)

    def _sum_for(self, parameter: Tensor) -> Tensor:
        found, holder = self._sum_of.get(id(parameter)), self._holder_of(parameter)
        if found is None or (found.shape, found.dtype, found.device) != (holder.shape, holder.dtype, holder.device):
            found = self._sum_of[id(parameter)] = torch.zeros_like(holder, requires_grad=False)
        return found

    def _sums(self) -> list[Tensor]:
        """What a program adds to, of all that train; the first of a window writes over it."""
        if self._recipe.options.accumulate == 1:
            return []
        return [self._sum_for(p) for p in self._recipe.parameters if p.requires_grad]

    def _have_sums(self, index: int) -> None:
        """Before a program: all that trains has a sum from now on, which is zero if there was none."""
        if self._recipe.options.accumulate == 1:
            return
        trained = [p for p in self._recipe.parameters if p.requires_grad]
        empty = [self._sum_for(p) for p in trained if id(p) not in self._has_sum] if index > 0 else []
        if empty:
            torch_private.foreach_zero(empty)
        self._has_sum = set(map(id, trained))

    # ---------------------------------------------------------------- running it

    def _run(self, program: GraphProgram, batch: Batch, index: int, is_last: bool) -> Any:
        recipe = self._recipe
        if index == 0:
            recipe.begin()
        wrappers = recipe.parallel.wrappers
        for wrapper in wrappers:
            with torch.enable_grad(), _syncing(wrapper, is_last):
                wrapper._pre_forward()
        self._have_sums(index)
        inputs = program.whole.inputs(batch.tensors, recipe.numbers.tensors(), self._sums())
        if self._delivery is not None:
            self._delivery.enter()
        if self._shards is not None:
            self._shards.begin()
        with torch.no_grad(), ExitStack() as telling:  # peers wait for what this rank may not come to
            for step in recipe.parallel.steps:
                telling.enter_context(step.telling_peers())
            outputs = list(program.run(*inputs.flat(), *program.extra))
        if self._shards is not None:
            self._shards.end()
        for wrapper in wrappers:
            with torch.enable_grad(), _syncing(wrapper, is_last):
                wrapper._post_forward(())
        if self._delivery is None or not self._delivery.is_needed or not is_last:
            note_replay(recipe.parallel, is_last=is_last)
        else:
            for step in recipe.parallel.steps:
                step.reducer.finiteness.tell_later(step.num_windows - 1)
        program.num_runs += 1
        self._record.num_graph_calls += 1
        if is_last and program.whole.has_norm:
            recipe.grad_norm = outputs.pop()
        following = iter(outputs)
        return map_tensors(program.whole.results, lambda _: next(following))

    def shown(self) -> list[str]:
        """The programs so far, for people."""
        return [
            f"batches of {p.shown}, run {p.num_runs} times, {len(p.graph.graph.nodes)} operations, digest {p.digest}"
            for p in self._programs.values()
        ]

    def why_none_yet(self) -> str:
        """Why there is no program yet, where nothing speaks against one; empty if there is nothing to say."""
        return "" if self._programs or self._record.reasons else self._restless.why_none_yet()

    def rank_is_baked_in_at(self) -> list[str]:
        """Places in the user's program where ranks have other numbers in their programs."""
        found = dict.fromkeys(place for p in self._programs.values() for place in p.differing_places())
        return [place for place in found if place != IN_BACKWARD] or list(found)

    @property
    def programs(self) -> list[GraphProgram]:
        return list(self._programs.values())


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, (Untraceable, NotTaken)) else why_not_traced(error)


def _syncing(wrapper: Any, is_last: bool) -> Any:
    return torch.enable_grad() if is_last else wrapper.no_sync()
