"""check="collective": ranks compare every collective of a group before it is started, ours and the program's own.

Collectives of one group are paired by the order in which ranks issue them, whoever issues them.  So each carries its
number and what it is; where these differ, ranks were about to pair up two that do not belong together.  They are
compared on a control plane of their own, since a program may issue one while others are elsewhere in their step.
"""

from __future__ import annotations

import hashlib
import json
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import Tensor

from lockstep import torch_private
from lockstep.agree.control import ControlPlane
from lockstep.agree.watch import Watch
from lockstep.errors import Disagreement, rank_table

_NUM_REMEMBERED = 3
_PACKAGE = str(Path(__file__).parents[1])


class CollectiveAudit:
    """Numbers the collectives of one group, and compares each between its ranks."""

    def __init__(self, process_group: Any, watch: Watch) -> None:
        self._plane = ControlPlane(process_group, "audit")
        self._watch = watch
        self._number = 0
        self._foreign: deque[str] = deque(maxlen=_NUM_REMEMBERED)
        self._hooks: dict[object, int] = {}  # those under way, each with the thread that it was called in
        torch_private.watch_collectives(process_group, self._before_foreign)

    def connect(self, watch: Watch) -> None:
        """Connect with the other ranks, which do so too; what comes from now on is told by ``watch``."""
        self._watch = watch
        self._plane.connect(watch)

    def renew(self) -> None:
        """Count anew, on all ranks, after an error that was handled."""
        self._number = 0
        self._plane.renew()

    def before(self, name: str, tensor: Tensor) -> None:
        """Compare a collective of ours; raise on all ranks if it would be paired with another."""
        self._compare(f"{name}, {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}", "")

    def begin_hook(self) -> Callable[[Any], None]:
        """Take what other threads start from now on for a hook's, which was compared as a whole; returns the end."""
        key = object()
        self._hooks[key] = get_ident()

        def end(_: Any = None) -> None:
            self._hooks.pop(key, None)

        return end

    def before_end(self, model: str) -> None:
        """Compare the exchange that ends a step, by the name of the model that it is of.

        It is on a plane of its own; a rank that waits there for one that waits here would wait in vain.
        """
        self._compare(f"the end of a step of {model}", "")

    def _before_foreign(self, operation: str) -> None:
        """Compare a collective that anyone starts on the group, unless this package is what started it."""
        callers = set(self._hooks.copy().values())
        if callers and get_ident() not in callers:
            return  # of a hook: what follows its first collective runs in a thread of the backend, or in the hook's own
        stack = traceback.extract_stack()
        if any(frame.filename.startswith(_PACKAGE) for frame in stack[:-2]):
            return
        frame = next((f for f in reversed(stack) if "/torch/" not in f.filename and _PACKAGE not in f.filename), None)
        where = "" if frame is None else f" at {frame.filename}:{frame.lineno} ({frame.line})"
        self._foreign.append(f"{operation}{where}")
        self._compare(f"{operation} of the program's own", where)

    def _compare(self, what: str, where: str) -> None:
        self._number += 1
        mine = f"collective {self._number}: {what}"
        digest = int.from_bytes(hashlib.blake2b(mine.encode(), digest_size=7).digest(), "big")
        meeting = (f"collective {self._number}", f"{what}{where}")
        answer = self._plane.start([digest], self._watch)
        everyones = answer.wait(lambda: f"the comparison of {mine}{where}", meeting=meeting)
        if all(numbers == [digest] for numbers in everyones):
            return
        details = json.dumps({"mine": mine + where, "foreign": list(self._foreign)})
        told = self._watch.gather(f"collective {self._number}", details, 60.0)
        facts = {rank: _read_fact(text) for rank, text in self._watch.by_global(told).items()}
        values = {rank: mine for rank, (mine, _) in facts.items()}
        lines = [f"  rank {rank}: {foreign or 'none'}" for rank, (_, foreign) in sorted(facts.items())]
        raise Disagreement(
            "Ranks were about to pair up different collectives of one process group, which gives wrong sums without a "
            f"word:\n{rank_table(values)}\nThe program's own collectives on this group, the last ones of each rank:\n"
            + "\n".join(lines)
            + "\nLikely cause: a collective of the program's own runs before the backward on some ranks and after it "
            "on others.\nFix: issue it at the same place on all ranks, or on a group of its own "
            "(torch.distributed.new_group).",
            values,
        )


def _read_fact(text: str) -> tuple[str, str]:
    """What a rank has told: its collective, and the program's own ones before."""
    try:
        data = json.loads(text)
        return str(data["mine"]), "; ".join(map(str, data["foreign"]))
    except (ValueError, TypeError, KeyError):
        return f"something that cannot be read: {text[:200]!r}", ""


_audits: weakref.WeakKeyDictionary[Any, CollectiveAudit] = weakref.WeakKeyDictionary()


def audit_of(process_group: Any, watch: Watch) -> CollectiveAudit:
    """The one audit of a process group."""
    audit = _audits.get(process_group)
    if audit is None:
        audit = _audits[process_group] = CollectiveAudit(process_group, watch)
    return audit


def known_audit_of(process_group: Any) -> CollectiveAudit | None:
    """The audit of a process group, if any model has asked for one."""
    return _audits.get(process_group)
