"""Which rank was the cause: pure rules over what is known of each rank.

A rank that lost a peer fails too, often before the launcher has seen the peer's end.  So errors that are about peers
are consequences, whenever they came; what is left is taken in the order of time.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.launch.facts import Ending, RankFacts

ABOUT_PEERS = {"PeerFailed", "PeerLate", "PeerLost", "DistBackendError", "DistNetworkError"}
# Errors that all ranks raise together, and that name where they come from.
_NAME_THE_ORIGIN = {"NonFinite", "CheckpointFailed"}
# What torch's backends say of a connection that broke, where Lockstep did not wait for it itself.
_BROKEN_CONNECTIONS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed",
    "remote process exited or there was a network error",
)


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended; ``rank`` is None where no single rank is to blame."""

    rank: int | None
    text: str
    step: int = -1
    exit_code: int = 1


def find_cause(ranks: Sequence[RankFacts]) -> Cause:
    """The first rank that failed by itself; a rank that others missed, if none did."""
    failed = sorted((facts for facts in ranks if facts.ending is Ending.FAILED), key=_order)
    by_rank = {facts.rank: facts for facts in ranks}
    own = [facts for facts in failed if not is_about_peers(facts)]
    if own:
        return blame(own[0])
    missed = Counter(rank for facts in failed for rank in named_peers(facts) if rank in by_rank)
    for rank, _ in missed.most_common():
        peer = by_rank[rank]
        if peer.ending is Ending.FAILED:
            continue
        missing = ", ".join(str(facts.rank) for facts in failed if rank in named_peers(facts))
        return _missed(peer, missing, failed[0].exit_code)
    stopped = [facts for facts in ranks if facts.was_stopped]
    if stopped:
        return blame(stopped[0], failed[0].exit_code if failed else 1)
    left = sorted((facts for facts in ranks if facts.ending is Ending.DONE), key=lambda facts: facts.ended_at)
    if failed and left and not missed:  # connections broke, and nobody says whose: who had ended is not there
        missing = ", ".join(str(facts.rank) for facts in failed)
        return _missed(left[0], missing, failed[0].exit_code)
    return blame(failed[0]) if failed else Cause(None, "no rank failed")


def _missed(peer: RankFacts, by: str, exit_code: int | None) -> Cause:
    text = f"rank {peer.rank} (pid {peer.pid}) {_absence(peer)}; missed by rank(s) {by}"
    return Cause(peer.rank, f"{text}; last seen {peer.place.seen}", peer.place.step, exit_code or 1)


def _order(facts: RankFacts) -> tuple[float, bool]:
    """By time; of two whose ends were seen at the same look, one that was killed comes first."""
    return facts.began_to_end, facts.exit_code != -signal.SIGKILL


def blame(facts: RankFacts, exit_code: int | None = None) -> Cause:
    """This rank was the cause."""
    text = f"rank {facts.rank} (pid {facts.pid}) {facts.how()}"
    if facts.place.time:
        text += f"; last seen {facts.place.seen}"
    code = facts.exit_code if exit_code is None else exit_code
    return Cause(facts.rank, text, facts.place.step, code or 1)


def is_about_peers(facts: RankFacts) -> bool:
    """Whether a rank failed because it lost another one."""
    words = facts.first_words
    if words is None or words.thread or facts.out_of_memory:
        return False
    if _NAME_THE_ORIGIN.intersection(words.kinds):
        return bool(words.peers) and facts.rank not in words.peers
    if ABOUT_PEERS.intersection(words.kinds):
        return True
    # Those of Python's own (a download, an upload) are no rank's.
    return "OSError" not in words.kinds and any(text in words.text for text in _BROKEN_CONNECTIONS)


def named_peers(facts: RankFacts) -> tuple[int, ...]:
    """The ranks that a rank's error names."""
    words = facts.first_words
    return tuple(rank for rank in words.peers if rank != facts.rank) if words is not None else ()


def _absence(peer: RankFacts) -> str:
    if peer.ending is Ending.DONE:
        return "had ended well before the others were done"
    if peer.was_stopped:
        return peer.how()
    return "did not take part"
