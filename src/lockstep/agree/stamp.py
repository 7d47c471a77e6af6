"""The stamp of a window: everything that decides what a rank sends, compared between ranks in every window.

What all ranks must have alike goes into a digest, and a digest is all that travels; only when digests differ do ranks
post their stamps, so that one error can show on all ranks what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.agree.board import Board
from lockstep.errors import Disagreement, rank_table

_DIGEST_BYTES = 7  # fits a signed 64-bit number
_NO_STAMP = "null"  # what a rank without data posts
GATHER = "a gather of a sharded unit"  # a kind of stamp that is compared amid a window
_OF_GATHERS = ("wrapper", "window", "kind", "resets", "gathers")


class Stamp(NamedTuple):
    """One window as one rank sees it."""

    wrapper: str
    window: int
    kind: str
    updates: int
    plan: str
    frozen: tuple[str, ...]
    cast: tuple[str, ...]
    exchange: str
    num_buckets: int
    skipped: tuple[str, ...]
    resets: int
    passes: int = 0  # of a train step since the last update; a loop by hand may run as many as it likes
    gathers: str = ""  # of a sharded model
    between: str = ""  # what others start on the group between the buckets
    kept: str = ""  # of a sharded model: gradients that new ones are added to

    def digest(self) -> int:
        """A positive number that stands for all of it."""
        lasting = (self.wrapper, self.kind, self[4:10])
        known = _lasting.get(lasting)
        if known is None:
            known = _lasting[lasting] = _number_for(repr(lasting))
            if len(_lasting) > _MOST_LASTING:
                _lasting.pop(next(iter(_lasting)))
        if self.gathers:
            known += _number_for(self.gathers)
        if self.between:
            known += _number_for(f"between {self.between}")
        if self.kept:
            known += _number_for(self.kept)
        known += _WINDOW * self.window + _UPDATES * self.updates + _RESETS * self.resets + _PASSES * self.passes
        return 1 + (known & _MASK)


# What windows of a model mostly have in common, and the number that stands for it: it is made once.
_lasting: dict[tuple[object, ...], int] = {}
_MOST_LASTING = 64
# Odd numbers without a pattern, so that small counts which differ give sums which differ.
_WINDOW, _UPDATES = 0xA3_F15C_97D2_6B49, 0x6D_0BE3_A941_7FC5
_RESETS, _PASSES = 0xC8_B279_1E5D_A433, 0x39_E6D4_F08B_15A7
_MASK = (1 << 8 * _DIGEST_BYTES) - 1


def _number_for(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest(), "big")


# Field, what a message calls it, and the likely reason for a difference.
_WORDS = {
    "wrapper": ("the model that is reduced", "the ranks run the backward of different models, or in another order"),
    "window": ("number of the window", "a rank has reduced more often than another"),
    "kind": ("kind of window", "only some ranks ran a forward before this backward, or a second backward after it"),
    "updates": (
        "optimizer steps so far",
        "an extra backward, no_sync(), or a skipped optimizer.step() on some ranks only: this reduction pairs up "
        "gradients of different steps",
    ),
    "plan": ("the plan", "another model or bucket size with init_sync=False, or unfrozen on some ranks only"),
    "frozen": ("frozen parameters", "requires_grad was changed on some ranks only"),
    "cast": ("parameters of another dtype than planned", "parameters were cast on some ranks only"),
    "exchange": ("communication hook or divisor", "a communication hook was registered on some ranks only"),
    "num_buckets": ("buckets that left", "a rank skipped or repeated some"),
    "skipped": (
        "buckets left out as unused",
        "skip_all_reduce_unused_params=True needs the same unused parameters on all ranks",
    ),
    "resets": ("calls of reset_sync_window()", "it must be called on all ranks"),
    "passes": (
        "micro-batches of the train step since the last update",
        "reset() of a lockstep.TrainStep on some ranks only, in the middle of its micro-batches",
    ),
    "gathers": (
        "gathers of sharded units so far",
        "a forward or an evaluation more on some ranks, or units in another order: shards of different units were "
        "paired up, so weights and gradients of this step are not valid",
    ),
    "between": (
        "collectives of the program between the buckets",
        "a collective of your own runs in the backward (a norm over all ranks, a gather), and only some ranks compile "
        "or have hooks on parameters, so buckets leave at another moment there and were paired up with it: give your "
        "collectives a process group of their own, by dist.new_group()",
    ),
    "kept": (
        "gradients from before, which those of this window would be added to",
        "zero_grad() was called on some ranks only, or with another set_to_none",
    ),
}


def disagreement(
    board: Board, key: str, mine: Stamp | None, updates_itself: bool, seconds: float
) -> Disagreement | None:
    """Once digests differ, on all ranks: post the stamps, and make the error that shows what differs.

    ``mine`` is None on a rank that has run out of data (join). ``updates_itself``: whether an optimizer of this rank
    updates the model. None where all that differs is the number of updates of ranks that are given their weights by
    others.
    """
    told = board.gather(key, json.dumps(None if mine is None else [mine._asdict(), updates_itself]), seconds)
    everyones = board.by_global(told).items()
    facts = {rank: _read_fact(rank, text) for rank, text in everyones if text != _NO_STAMP}
    stamps = {rank: stamp for rank, (stamp, _) in facts.items()}
    updates = {stamp["updates"] for stamp, updates_itself in facts.values() if updates_itself}
    others = {json.dumps({**stamp, "updates": 0}) for stamp in stamps.values()}
    if len(others) == 1 and len(updates) <= 1 < len({stamp["updates"] for stamp in stamps.values()}):
        return None
    return describe_difference(stamps)


def _read_fact(rank: int, text: str) -> tuple[dict[str, object], bool]:
    """A stamp that a rank has posted; what is not of that form is not from a rank of this program."""
    try:
        stamp, updates_itself = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        stamp = updates_itself = None
    if not (isinstance(stamp, dict) and isinstance(updates_itself, bool)):
        raise Disagreement(f"The stamp that rank {rank} has posted cannot be read: {text[:200]!r}.")
    return stamp, updates_itself


def describe_difference(stamps: Mapping[int, Mapping[str, object]]) -> Disagreement:
    """The same error on all ranks: each field that differs, as a table of rank and value."""
    window = next(iter(stamps.values())).get("window")
    sections: list[str] = []
    first: dict[int, str] = {}
    is_amid = any(stamp.get("kind") == GATHER for stamp in stamps.values())
    for field, (title, cause) in _WORDS.items():
        if is_amid and field not in _OF_GATHERS:
            continue  # a stamp in the middle of a window does not say
        values = {rank: _shown(stamp.get(field)) for rank, stamp in stamps.items()}
        if len(set(values.values())) > 1:
            first = first or values
            sections.append(f"{title}:\n{rank_table(values)}\n  likely cause: {cause}")
    weights_differ = not is_amid and len({stamp.get("updates") for stamp in stamps.values()}) > 1
    going_on = "call reset_sync_window() and zero_grad() on all ranks and repeat the step"
    if weights_differ:
        going_on = (
            "the weights must be made equal, since ranks have updated them in different steps; reset_sync_window() on "
            "all ranks says how"
        )
    body = "\n".join(sections) or "  (the digests differ, but no field does)"
    return Disagreement(
        f"Ranks do not do the same in window {window}, so their gradients must not be used:\n{body}\n"
        f"Nothing was updated in this step. Fix: let all ranks do the same; to go on in this process, {going_on}. "
        "check='off' turns this comparison off, of a lockstep.DDP.",
        first,
    )


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        names = [str(v) for v in value]
        return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "") if names else "none"
    return str(value) or "none"
