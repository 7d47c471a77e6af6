"""How a micro-step becomes a program: traced, compared with what other ranks have traced, compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lockstep import torch_private
from lockstep.graph import tuning
from lockstep.graph.compare import SOMEWHERE, compare, describe_program, differing_places, digest_of
from lockstep.graph.turns import take_turn
from lockstep.program.batch import Batch
from lockstep.program.constants import Constants
from lockstep.program.deliver import Delivery, launch_early
from lockstep.program.guards import Surroundings
from lockstep.program.held import give_what_is_held
from lockstep.program.optimizers import move_step_counts
from lockstep.program.products import multiply_in_place
from lockstep.program.randomness import Draws, HostRandomness
from lockstep.program.recipe import Recipe
from lockstep.program.shards import Shards, keep_order
from lockstep.program.together import Together
from lockstep.program.traced import WholeStep, why_no_program
from lockstep.program.untraceable import Untraceable


@dataclass
class GraphProgram:
    """One compiled micro-step."""

    whole: WholeStep
    run: Callable[..., Any]
    digest: str
    graph: Any
    shown: str
    differing_places: Callable[[], list[str]]  # where other ranks have other numbers in it
    world: list[Any]  # what it was made for, kept alive
    extra: list[Tensor]  # what it is given besides the step's inputs: see held.py, constants.py
    num_runs: int = 0

    def __post_init__(self) -> None:
        self._kinds = list(map(_kind_of, self.extra))

    @property
    def has_same_extra(self) -> bool:
        """Whether the tensors that it is given besides still are what it was made for: ``data`` may be replaced."""
        return list(map(_kind_of, self.extra)) == self._kinds


class Draft(NamedTuple):
    """What was traced and is not compiled yet."""

    whole: WholeStep
    graph: Any
    inputs: list[Tensor]
    held: list[Tensor]
    constants: Constants
    shown: str
    subject: str


class Maker:
    """Makes the programs of one train step."""

    def __init__(
        self,
        recipe: Recipe,
        together: Together,
        surroundings: Surroundings,
        delivery: Delivery | Shards | None,
    ) -> None:
        self._recipe = recipe
        self._together = together
        self._surroundings = surroundings
        self._delivery = delivery
        self._shards = delivery if isinstance(delivery, Shards) else None

    def trace(self, batch: Batch, sums: Sequence[Tensor], index: int, is_last: bool) -> Draft:
        """Trace a micro-step, and tell the other ranks of its numbers; ``sums`` are what it adds gradients to."""
        recipe = self._recipe
        move_step_counts(recipe.options.optimizers)
        if self._delivery is not None:
            self._delivery.enter()
        whole = WholeStep(recipe, batch, self._delivery, index, is_last)
        given = whole.inputs(batch.tensors, recipe.numbers.tensors(), sums)
        inputs = whole.examples(given)
        randomness, before = HostRandomness(elsewhere=True), self._surroundings.values()
        draws = Draws(recipe.parallel.device)
        try:
            with torch_private.noting_seeds() as seeded:
                graph = torch_private.trace_program(whole.function(inputs), inputs.flat(), draws.before)
            not_so_random = draws.why_not(randomness.drawn(), seeded)
        finally:
            randomness.restore()
        if why := why_no_program(graph) or not_so_random:
            raise Untraceable(why)
        changed = self._surroundings.changed(before)
        if changed:
            raise Untraceable(changed)
        held = give_what_is_held(graph, whole.named(given))
        launch_early(graph)
        if isinstance(self._delivery, Delivery):
            multiply_in_place(graph, self._delivery)
        if self._shards is not None:
            keep_order(graph)
        board, constants = self._board, Constants(graph)
        if board is not None:
            board.post(f"{self._key_of_numbers()}/{board.rank}", constants.told())
        kind = "update" if is_last else "first micro-step" if index == 0 else "micro-step"
        return Draft(whole, graph, inputs.flat(), held, constants, batch.shown(), f"the {kind} of a train step")

    def make(self, draft: Draft, tracing: list[int]) -> GraphProgram:
        """Compile what was traced; ``tracing`` are the ranks that have traced a program in this call."""
        board, graph = self._board, draft.graph
        numbers: list[Tensor] = []
        if board is not None and len(tracing) == board.world:
            told = board.read_all([f"{self._key_of_numbers(made=1)}/{rank}" for rank in range(board.world)])
            numbers = draft.constants.take_out([text or "[]" for text in told]) if all(told) else []
        differing = self._compare(draft)
        tuning.start()
        # Ranks of a host take turns: the first one compiles, the others find its work in the cache.
        around = take_turn if any(step.reducer.world > 1 for step in self._recipe.parallel.steps) else None
        extra = [*draft.held, *numbers]
        run = torch_private.compile_program(graph, [*draft.inputs, *extra], around)
        held = self._surroundings.objects()
        return GraphProgram(draft.whole, run, digest_of(graph), graph, draft.shown, differing, held, extra)

    def _key_of_numbers(self, made: int = 0) -> str:
        """Under which ranks tell the numbers of what they trace; ``made`` is 1 when all know that it was traced."""
        return f"numbers of program {self._together.num_made - made}"

    @property
    def _board(self) -> Any:
        """By which the ranks of the model tell each other what they trace; None for a rank that is alone."""
        boards = [wrapper._peers.board for wrapper in self._recipe.parallel.wrappers]
        boards += [self._shards.team.board] if self._shards is not None else []
        return next((board for board in boards if board is not None), None)

    def _compare(self, draft: Draft) -> Callable[[], list[str]]:
        """Say so if another rank makes another program in the place of this one; returns where they differ."""
        board = self._board
        if board is None:
            return list
        facts = describe_program(draft.graph, draft.shown)
        key = compare(board, draft.subject, facts)
        return partial(differing_places, board, key, facts, SOMEWHERE)


def _kind_of(tensor: Tensor) -> Hashable:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
