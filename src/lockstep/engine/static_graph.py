"""``static_graph=True``: the first window shows how often each parameter gets a gradient, and all others repeat it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep import errors
from lockstep.engine.bucket import Slot


class StaticGraph:
    """What the first window showed."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_learned = False
        self.just_learned = False  # in the window that is closing now
        self.order: list[Slot] = []  # of the first gradients, in the first window

    def forget(self) -> None:
        """The plan has changed: learn anew."""
        self.is_learned = self.just_learned = False
        self.order = []

    def fires(self, slot: Slot, rank: int) -> bool:
        """Count a gradient of ``slot``; returns whether it was the last one of this window."""
        slot.num_fires += 1
        if not self.is_learned:
            if slot.num_fires == 1:
                self.order.append(slot)
            return False  # the first window only watches; it is reduced as a whole at its end
        expected = 1 if slot.expected_fires is None else slot.expected_fires  # None: learned as a joined rank
        if slot.num_fires > expected:
            raise errors.graph_changed(slot.place, rank=rank, expected=expected)
        return slot.num_fires == expected

    def learn(self, slots: Sequence[Slot]) -> None:
        """The first window has come to its end."""
        self.is_learned = self.just_learned = True
        for slot in slots:
            slot.expected_fires = slot.num_fires

    def learn_as_joined(self) -> None:
        """As a rank without data: the others learn now."""
        self.just_learned = self.is_on and not self.is_learned
        self.is_learned = self.is_on

    def is_unused(self, slot: Slot) -> bool:
        """Whether the first window brought nothing for ``slot``."""
        return self.is_learned and slot.expected_fires == 0

    def fires_once(self, slots: Sequence[Slot]) -> bool:
        """Whether each of these receives exactly one gradient."""
        return self.is_learned and all(slot.expected_fires == 1 for slot in slots)
