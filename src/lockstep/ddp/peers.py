"""The other ranks: the process group, and the board and watch by which its ranks meet outside of collectives."""

from __future__ import annotations

import torch.distributed as dist

from lockstep import torch_private
from lockstep.agree.board import open_board
from lockstep.agree.control import ControlPlane, control_of
from lockstep.agree.watch import Watch
from lockstep.engine.audit import audit_of
from lockstep.engine.lane import Lane, lane_of
from lockstep.engine.step import SyncStep
from lockstep.engine.transport import Transport
from lockstep.engine.union import Check, Union


class Peers:
    """The group that one wrapper reduces over; it may be exchanged for another.

    Wrappers are counted, so that the n-th of one rank meets the n-th of another; copies (``kind="copies"``) are counted
    apart, since a program may make them on one rank only.
    """

    def __init__(
        self, group: dist.ProcessGroup, check: Check, kind: str = "wrappers", late_timeout: float | None = None
    ) -> None:
        self._check = check
        self._late_timeout = late_timeout
        self._meet(group, kind)

    def _meet(self, group: dist.ProcessGroup, kind: str) -> None:
        self.group = group
        self.board = open_board(group, kind)
        self.watch = Watch(
            self.board, group.rank(), self._late_timeout, torch_private.group_timeout(group).total_seconds()
        )

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world(self) -> int:
        return self.group.size()

    @property
    def is_default(self) -> bool:
        try:
            return bool(self.group == torch_private.default_group())
        except (RuntimeError, ValueError):
            return False

    @property
    def name(self) -> str:
        """How ranks call the wrapper when they compare."""
        return "wrapper" if self.board is None else self.board.name

    @property
    def control(self) -> ControlPlane | None:
        return control_of(self.group)

    def connect(self) -> None:
        """Connect the planes on which ranks compare; all ranks come here."""
        if self.control is not None:
            self.control.connect(self.watch)
            if self._check == "collective":
                audit_of(self.group, self.watch).connect(self.watch)

    def union(self) -> Union:
        """Make what compares this wrapper with its twins at the end of a step."""
        return Union(self.control, self.name, self._check)

    @property
    def lane(self) -> Lane:
        return lane_of(self.group)

    def transport(self) -> Transport:
        """Make the engine's view of the group."""
        transport = Transport(self.group, self.watch)
        if self._check == "collective" and self.control is not None:
            transport.audit = audit_of(self.group, self.watch)
        return transport

    def move(self, group: dist.ProcessGroup, step: SyncStep) -> None:
        """Go on with another group, and take ``step`` along."""
        self._meet(group, "wrappers")
        step.reducer.use_transport(self.transport())
        step.report_progress()
        step.lane.leave(step)
        step.lane = self.lane
        step.lane.enter(step)
        step.closing.union.move(self.control, self.name)
        # Members of the new group may come from groups that have reduced more or less often.
        step.num_windows = step.num_updates = step.num_resets = 0
        step.drift.forget()
