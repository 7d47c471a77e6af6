"""How many times compiled graphs deliver the gradients of a unit in a backward, and for which forwards."""

from __future__ import annotations


class Deliveries:
    """What compiled graphs deliver for a store in a backward, and for which forwards.

    A unit that runs twice in one graph is gathered once there, and delivers twice: how often is seen in the last steps.
    """

    def __init__(self) -> None:
        self._forwards: list[bool] = []  # whose backward is still to come: whether each was without data
        self._num_come = 0  # in the backward that is running
        self._num_forwards = 0  # that there were when it began
        self._per_forward = 1

    def note_forward(self, is_idle: bool) -> None:
        self._forwards.append(is_idle)

    def come(self, is_idle: bool) -> tuple[int, bool]:
        """One has come: how many are to come with it, and whether its forward (the last one first) was without data."""
        if self._num_come == 0:
            self._num_forwards = len(self._forwards)
        place = len(self._forwards) - 1 - self._num_come // self._per_forward
        num_due = self._num_forwards * self._per_forward - self._num_come
        self._num_come += 1
        return max(1, num_due), self._forwards[place] if place >= 0 else is_idle

    def end(self) -> None:
        """The backward is over."""
        if self._num_forwards:
            self._per_forward = max(self._per_forward, -(-self._num_come // self._num_forwards))
        self._num_come = self._num_forwards = 0
        self._forwards.clear()
