"""Agreement at wrap time: every rank wrapped the same model with the same options.

Each rank posts a digest of its description; rank 0 compares them and posts a verdict.  Only when they differ do
ranks post their descriptions, so that the usual case costs two small keys per rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic

from lockstep import settings
from lockstep.agree.beat import read_words, words_of
from lockstep.agree.board import Board
from lockstep.errors import Disagreement, LockstepError, PeerFailed, PeerLate, PeerLost, rank_table

logger = logging.getLogger("lockstep")

_EQUAL = "equal"
_FAILED = "failed "
_WARN_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class TensorDescription:
    """A parameter or buffer, as far as ranks must agree on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    requires_grad: bool = False
    sparse: bool = False

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        sparse = ", sparse gradient" if self.sparse else ""
        return f"{list(self.shape)} {self.dtype}, stride {list(self.stride)}{grad}{sparse}"


@dataclass(frozen=True)
class ModelDescription:
    """What one rank is about to train."""

    versions: dict[str, str]
    options: dict[str, str]
    parameters: tuple[TensorDescription, ...] = ()
    buffers: tuple[TensorDescription, ...] = ()
    plan_digest: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelDescription:
        data = json.loads(text)
        for key in ("parameters", "buffers"):
            data[key] = tuple(
                TensorDescription(**{**t, "shape": tuple(t["shape"]), "stride": tuple(t["stride"])}) for t in data[key]
            )
        return cls(**data)


@contextmanager
def wrap_failures_told(board: Board | None) -> Iterator[None]:
    """Tell the ranks that wait for this one about an error in here, so that they do not wait until their deadline."""
    try:
        yield
    except Exception as error:
        if board is not None and not isinstance(error, LockstepError):
            _post_failure(board, error, waits=True)
        raise


def stand_aside(board: Board, why: str) -> None:
    """Take no part in the agreement; ranks that do are told why, and raise."""
    _post_failure(board, ValueError(why), waits=False)


def _post_failure(board: Board, error: Exception, *, waits: bool) -> None:
    words = words_of(error, board.rank).to_json()
    board.post(f"digest/{board.rank}", _FAILED + words, waits=waits)
    if board.rank == 0:
        board.post("verdict", _FAILED + words, waits=waits)


def agree_on_model(board: Board, mine: ModelDescription, timeout_seconds: float) -> None:
    """Return when all ranks described the same model; otherwise raise the same error on all of them."""
    text = mine.to_json()
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    deadline = monotonic() + timeout_seconds
    board.post(f"digest/{board.rank}", digest, waits=False)
    if board.rank == 0:
        verdict = _collect_verdict(board, digest, deadline)
        board.post("verdict", verdict, waits=False)
    else:
        verdict = _wait_for_verdict(board, deadline)
    if verdict.startswith(_FAILED):
        raise _failed(board, verdict)
    if verdict != _EQUAL:
        board.post(f"description/{board.rank}", text)
        raise _disagreement(board, monotonic() + timeout_seconds)


def _failed(board: Board, text: str) -> PeerFailed:
    failure = read_words(text.removeprefix(_FAILED), board.world)
    rank = None if failure is None else board.members[failure.rank]
    who = "A rank" if rank is None else f"Rank {rank}"
    said = "nothing that can be read" if failure is None else f"{failure.type}: {failure.text}"
    return PeerFailed(
        f"{who} could not wrap its model, so rank {board.members[board.rank]} stops too. It said:\n{said}", rank
    )


def _wait_for(board: Board, keys: list[str], deadline: float) -> None:
    """Wait for all of ``keys``; a rank that has said why it cannot wrap is quoted, also if it has ended meanwhile."""
    try:
        missing = board.wait_for(keys, deadline, _slow_arrival_warning(board))
    except PeerLost:
        _raise_told_failure(board)
        raise
    if missing:
        _raise_told_failure(board)
        raise _late(board)


def _raise_told_failure(board: Board) -> None:
    """Raise what a rank has posted in place of its digest, where one has."""
    for text in board.read_all(f"digest/{rank}" for rank in range(board.world)):
        if text is not None and text.startswith(_FAILED):
            raise _failed(board, text)


def _collect_verdict(board: Board, digest: str, deadline: float) -> str:
    others = [f"digest/{rank}" for rank in range(1, board.world)]
    _wait_for(board, others, deadline)
    digests = [text or "" for text in board.read_all(others)]
    failed = next((d for d in digests if d.startswith(_FAILED)), None)
    if failed is not None:
        return failed
    return _EQUAL if all(d == digest for d in digests) else "different"


def _wait_for_verdict(board: Board, deadline: float) -> str:
    _wait_for(board, ["verdict"], deadline)
    verdict = board.read("verdict")
    assert verdict is not None
    return verdict


def _absent_ranks(board: Board) -> list[int]:
    texts = board.read_all(f"digest/{rank}" for rank in range(board.world))
    return [board.members[rank] for rank, text in enumerate(texts) if text is None]


def _late(board: Board) -> PeerLate:
    absent, me = _absent_ranks(board), board.members[board.rank]
    return PeerLate(
        f"Rank {me} waited for all ranks to wrap their model, but rank(s) {absent} did not arrive in time.\n"
        "Likely causes: those ranks failed or are still loading; they wrap their models in another order; or only some "
        "ranks reach DistributedDataParallel(...).\n"
        "Fix: look at the output of those ranks first. If they are only slow, raise "
        f"{settings.AGREEMENT_TIMEOUT.name} (seconds).",
        absent,
    )


def _slow_arrival_warning(board: Board) -> Callable[[], None]:
    next_warning = monotonic() + _WARN_EVERY_SECONDS

    def on_slice() -> None:
        nonlocal next_warning
        if monotonic() >= next_warning:
            next_warning = monotonic() + _WARN_EVERY_SECONDS
            logger.warning(
                "Rank %d is waiting for rank(s) %s to wrap their model.",
                board.members[board.rank],
                _absent_ranks(board) or [board.members[0]],
            )

    return on_slice


# ---------------------------------------------------------------- the report, once ranks are known to differ


def _disagreement(board: Board, deadline: float) -> Disagreement:
    keys = [f"description/{rank}" for rank in range(board.world)]
    board.wait_for(keys, deadline)
    descriptions = {}
    for rank, text in enumerate(board.read_all(keys)):
        try:
            descriptions[board.members[rank]] = ModelDescription.from_json(text or "")
        except (ValueError, TypeError, KeyError, AttributeError):  # late, or not what a rank of ours would write
            logger.warning("The description that rank %d has given of its model cannot be read.", board.members[rank])
    if len(descriptions) < 2:
        return Disagreement("Ranks wrapped different models or options, and their descriptions cannot be read.")
    return Disagreement(*describe_differences(descriptions))


def describe_differences(models: Mapping[int, ModelDescription]) -> tuple[str, dict[int, str]]:
    """The message for all ranks and the first table of rank and value in it."""
    sections: list[tuple[str, dict[int, str]]] = []
    for title, key in (("version of", "versions"), ("option", "options")):
        by_rank = {rank: getattr(model, key) for rank, model in models.items()}
        for name in sorted({name for values in by_rank.values() for name in values}):
            values = {rank: mapping.get(name, "(absent)") for rank, mapping in by_rank.items()}
            if _differ(values):
                sections.append((f"{title} {name} differs", values))
    for kind, key in (("parameter", "parameters"), ("buffer", "buffers")):
        sections.extend(_tensor_differences(kind, {r: getattr(m, key) for r, m in models.items()}))
    if not sections:
        digests = {rank: model.plan_digest for rank, model in models.items()}
        sections.append(("the plan (buckets) differs", digests))
    first = sections[0][1]
    body = "\n".join(f"{title}:\n{rank_table(values)}" for title, values in sections[:8])
    more = f"\n... and {len(sections) - 8} more differences" if len(sections) > 8 else ""
    message = (
        "Ranks wrapped different models or options, so they would train on each other's gradients of other "
        f"parameters, or hang. Nothing was trained.\n{body}{more}\n"
        "Likely cause: the model is built from something that differs between ranks (rank-dependent code, a different "
        "config file, checkpoint or library version, an unordered set).\n"
        "Fix: build the same module with the same options on every rank; parameters that are meant to differ go into "
        "_set_params_and_buffers_to_ignore_for_model."
    )
    return message, first


def _tensor_differences(
    kind: str, by_rank: Mapping[int, Sequence[TensorDescription]]
) -> list[tuple[str, dict[int, str]]]:
    sections: list[tuple[str, dict[int, str]]] = []
    names = {rank: [t.name for t in tensors] for rank, tensors in by_rank.items()}
    everywhere = set.intersection(*(set(n) for n in names.values()))
    anywhere = set.union(*(set(n) for n in names.values()))
    for name in _first_seen_order(names.values()):
        if name in anywhere - everywhere:
            present = {rank: "present" if name in have else "missing" for rank, have in names.items()}
            sections.append((f"{kind} {name} exists on some ranks only", present))
    if not sections and _differ({rank: "\n".join(n) for rank, n in names.items()}):
        position = next(i for i, column in enumerate(zip(*names.values(), strict=True)) if len(set(column)) > 1)
        first = {rank: f"{have[position]} comes at this place" for rank, have in names.items()}
        name = names[min(names)][position]
        sections.append((f"the order of {kind}s differs, first at {name}", first))
    tables = {rank: {t.name: t for t in tensors} for rank, tensors in by_rank.items()}
    for name in _first_seen_order(names.values()):
        if name in everywhere:
            values = {rank: str(table[name]) for rank, table in tables.items()}
            if _differ(values):
                sections.append((f"{kind} {name} differs", values))
    return sections


def _differ(values: Mapping[int, str]) -> bool:
    return len(set(values.values())) > 1


def _first_seen_order(lists: Iterable[Sequence[str]]) -> list[str]:
    seen: dict[str, None] = {}
    for names in lists:
        seen.update(dict.fromkeys(names))
    return list(seen)
