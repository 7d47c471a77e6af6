"""What is started on the group between the buckets of a window, by the program itself or another model.

Ranks pair collectives up by their order.  Buckets keep theirs, but a collective of the program's own in the backward (a
norm over all ranks, say) may come before a bucket on one rank and after it on another, where only one of them compiles
or has hooks of its own.  What was added up then is not a gradient, so the places go into the stamp of the window.
"""

from __future__ import annotations

from lockstep import torch_private
from lockstep.engine.transport import Transport


class Between:
    """Counts what others start on the group from the first bucket of a window to its end."""

    def __init__(self) -> None:
        self._num_before: int | None = None  # operations on the group, up to the last bucket
        self._found: list[str] = []

    def open(self) -> None:
        """A window begins."""
        self._num_before = None
        self._found.clear()

    def note_start(self, transport: Transport, what: str) -> None:
        """A bucket is about to leave, or the window to end."""
        if self._num_before is None or transport.is_alone:
            return
        others = (torch_private.num_operations(transport.process_group) or 0) - self._num_before
        if others > 0:
            self._found.append(f"{others} before {what}")

    def note_started(self, transport: Transport) -> None:
        """A bucket has left."""
        if not transport.is_alone:
            self._num_before = torch_private.num_operations(transport.process_group)

    def places(self, transport: Transport) -> str:
        """What was found in this window, in words that are the same on all ranks; mostly none."""
        self.note_start(transport, "the end")
        self._num_before = None
        return ", ".join(self._found)
