"""Uneven inputs: what a rank does that has run out of data while others go on.

Its shards are still needed, and still trained: every rank takes part in every gather, scatter and optimizer step, and
in whatever else the program does in a step (a norm over all gradients, say).  So the program's loop goes on there too,
with the last batch once more, and what that rank's backward brings counts as zero.

[Note: zeros]  What a backward brings is dropped on its way into the buffers (memory.py), wherever it came from: from
outputs, or from a loss that a module keeps to itself.  What a rank added up while it had data lies in the buffers by
then, since under ``join()`` every pass ends there; so it counts, divided by the ranks that had data with it.  Where one
backward is of several forwards, of which some had data, each of the others is made zero: by a hook on its outputs, or
compiled by the gradients that the graph delivers, the last forward's first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from lockstep import errors
from lockstep.engine.transport import Transport
from lockstep.shard.mesh import whole_group

if TYPE_CHECKING:
    from lockstep.shard.root import Root

Batch = TypeVar("Batch")

# What a rank tells the others.
_OUT_OF_DATA, _HAS_DATA, _NEVER_HAD_DATA = 0, 1, 2


class Attendance:
    """Which ranks have data in the iteration that is running."""

    def __init__(self) -> None:
        self.number = 0  # of the loop that is running
        self.forget()

    def forget(self) -> None:
        """Nobody joins: all have data."""
        self.is_joining = False
        self.is_idle = False  # this rank has none
        self.had_data = False  # some forward did, whose backward may be still to come
        self.num_active: int | None = None  # to divide by, instead of by all ranks
        self.first_active = 0  # whose buffers are taken where they are synchronised

    def note_forward(self) -> None:
        """A forward with gradients runs."""
        self.had_data = self.had_data or not self.is_idle

    def note_end_of_backward(self) -> None:
        self.had_data = False

    @property
    def counts_as_zero(self) -> bool:
        """Whether nothing counts of what the backward that is running brings."""
        return self.is_idle and not self.had_data


def join(root: Root, batches: Iterable[Batch], *, divide_by_initial_world_size: bool) -> Iterator[Batch]:
    """This rank's batches, and then the last one again and again for as long as any rank has more."""
    if len(root.teams) != 1:
        raise errors.LockstepError(
            f"join() is for a model whose units are all on one mesh; this one has {len(root.teams)}."
        )
    team, mesh = root.teams[0], root.teams[0].units[0].mesh
    if not divide_by_initial_world_size and not team.exchange.is_linear:
        raise errors.LockstepError(
            f"join(divide_by_initial_world_size=False): the communication hook {team.exchange.name} divides by itself, "
            "and knows of no ranks without data. Leave one of the two out."
        )
    transport = Transport(whole_group(mesh), team.watch)
    attendance = root.attendance
    mine_is = attendance.number = attendance.number + 1  # a loop that was left may be dropped when another one runs
    iterator = iter(batches)
    had: list[Batch] = []
    try:
        while True:
            had_before, has_data = bool(had), False
            for batch in iterator:
                had, has_data = [batch], True
                break
            mine = _HAS_DATA if has_data else _OUT_OF_DATA if had_before else _NEVER_HAD_DATA
            said = _tell(transport, mesh.device, mine)
            active = [rank for rank, what in enumerate(said) if what == _HAS_DATA]
            if not active:
                return
            empty = [team.watch.shown(rank) for rank, what in enumerate(said) if what == _NEVER_HAD_DATA]
            if empty:
                raise errors.LockstepError(
                    f"join(): ranks {', '.join(map(str, empty))} had not a single batch, so there is nothing that they "
                    "could run while the others train. Fix: give every rank at least one batch."
                )
            attendance.is_joining = True
            attendance.is_idle = not has_data
            attendance.num_active = None if divide_by_initial_world_size else len(active)
            attendance.first_active = active[0]
            yield had[0]
    finally:
        if attendance.number == mine_is:
            attendance.forget()


def _tell(transport: Transport, device: torch.device, mine: int) -> list[int]:
    """What every rank says, by rank."""
    said = torch.zeros(transport.world, dtype=torch.int64, device=device)
    said[transport.rank] = mine
    if transport.world > 1:
        transport.land(transport.start_max(said), "the question who has data, in join()")
    return [int(what) for what in said.tolist()]
