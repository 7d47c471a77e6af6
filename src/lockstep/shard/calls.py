"""The calls of a unit whose backward is still to come, by which the end of the unit's backward is known.

[Note: rounds]  A unit of several modules is gathered once for all of them, in the backward too: it stays whole from the
first of their backwards to the last.  A round is the calls of one forward: of one call, in a unit of one module.

[Note: a unit leaves with its backward]  A scatter waits for the one before it (exchange.py, [Note: input buffers]).  A
rank that holds a unit's gradients back, for a parameter that it has not used, would have others wait in there, which
have gathers still to start that this rank needs.  So every rank sends a unit when the unit's backward is over, with
what there is; a gradient that comes after all (a use of the parameter elsewhere) is a remainder of the window.  Where
it never comes to a unit, whose output was not used, or cannot tell its end, that is when the next one's begins.
"""

from __future__ import annotations

import weakref
from typing import Any

from lockstep import torch_private

_MOST_CALLS = 256  # whoever adds up losses without detaching them keeps a node of every step alive


class Calls:
    """Autograd's nodes on the inputs of a unit, one for each call whose graph is still there."""

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._round = 0
        self._unwatched_rounds: set[int] = set()
        self._ended: list[weakref.ref[Any]] = []  # those that the backward which is running has come to
        self._has_unwatched = False
        self._has_new = False  # a call since the last backward

    def _begin(self) -> None:
        """A call comes: what was known of calls before the last backward is kept for graphs that are still there."""
        if not self._has_new:
            self._has_new, self._has_unwatched = True, False
            self._unwatched_rounds.clear()

    def begin_round(self) -> None:
        """See [Note: rounds]."""
        self._round += 1

    def note(self, node: Any) -> None:
        """A call of which autograd will tell the end."""
        self._begin()
        node.round = self._round
        self._nodes = [reference for reference in self._nodes[1 - _MOST_CALLS :] if reference() is not None]
        self._nodes.append(weakref.ref(node))

    def note_unwatched(self) -> None:
        """A call of which it will not, since no input needs a gradient."""
        self._begin()
        self._has_unwatched = True
        self._unwatched_rounds.add(self._round)

    def end(self, node: Any) -> tuple[bool, bool]:
        """The backward of one call is over; returns whether the one that is running comes to no other, and to no other
        of its round."""
        self._ended.append(weakref.ref(node))
        ended = [reference() for reference in self._ended]
        others = [other for reference in self._nodes if (other := reference()) is not None]
        rounds = {other.round for other in others if other not in ended and torch_private.engine_will_run(other)}
        return not rounds and not self._has_unwatched, node.round not in rounds | self._unwatched_rounds

    def forget(self) -> None:
        """The pass is over; another one may go through the same graph again."""
        self._ended.clear()
        self._has_new = False
