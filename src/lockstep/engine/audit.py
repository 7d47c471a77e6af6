"""check="collective": every collective of ours says which it is, and how many others the program has issued.

Collectives of one group are paired by the order in which ranks issue them, whoever issues them.  Ours are in the same
order on every rank; so where they do not pair up, the program issued one of its own at another place.  Before each
collective the ranks compare its number, its name and size, and the number of collectives that the program started on
this group before it; and each rank remembers where in the program those came from.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep import torch_private
from lockstep.agree.control import ControlPlane
from lockstep.agree.watch import Watch
from lockstep.errors import Disagreement, rank_table

_NUM_REMEMBERED = 8
_PACKAGE = str(Path(__file__).parents[1])


class CollectiveAudit:
    """Compares each collective of one group between its ranks, before it is started."""

    def __init__(self, process_group: Any, control: ControlPlane, watch: Watch) -> None:
        self._control = control
        self._watch = watch
        self._number = 0
        self._num_foreign = 0
        self._foreign: deque[str] = deque(maxlen=_NUM_REMEMBERED)
        torch_private.watch_collectives(process_group, self._note)

    def _note(self, operation: str) -> None:
        """Remember a collective that was started on the group, unless this package is what started it."""
        stack = traceback.extract_stack()
        if any(frame.filename.startswith(_PACKAGE) for frame in stack[:-2]):
            return
        self._num_foreign += 1
        frame = next((f for f in reversed(stack) if "/torch/" not in f.filename and _PACKAGE not in f.filename), None)
        where = "" if frame is None else f" at {frame.filename}:{frame.lineno} ({frame.line})"
        self._foreign.append(f"{operation}{where}")

    def before(self, name: str, tensor: Tensor) -> None:
        """Compare the collective that is about to start; raise on all ranks if it would be paired with another."""
        self._number += 1
        what = f"{name}, {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
        mine = f"collective {self._number} of ours: {what}; {self._num_foreign} of the program's own before it"
        digest = int.from_bytes(hashlib.blake2b(mine.encode(), digest_size=7).digest(), "big")
        if self._control.all_equal(digest, self._watch, lambda: f"the comparison of {name}"):
            return
        details = json.dumps({"mine": mine, "foreign": list(self._foreign)})
        told = self._watch.gather(f"collective {self._number}", details, 60.0)
        facts = {rank: json.loads(text) for rank, text in told.items()}
        values = {rank: str(fact["mine"]) for rank, fact in facts.items()}
        lines = [f"  rank {rank}: {'; '.join(fact['foreign'][-3:]) or 'none'}" for rank, fact in sorted(facts.items())]
        raise Disagreement(
            "Ranks were about to pair up different collectives of one process group, which gives wrong sums without a "
            f"word:\n{rank_table(values)}\nThe program's own collectives on this group, the last ones of each rank:\n"
            + "\n".join(lines)
            + "\nLikely cause: a collective of the program's own runs before the backward on some ranks and after it "
            "on others.\nFix: issue it at the same place on all ranks, or on a group of its own "
            "(torch.distributed.new_group).",
            values,
        )
