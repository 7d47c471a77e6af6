"""Compile once per host: one rank compiles a graph, the others wait and find the result in the compiler's cache.

Without it all ranks of a host compile the same graph at the same time, and take its cores from each other.

Ranks meet over the board, by the digest of the graph and never by a count: ranks that compile in another order, or
graphs of their own, do not wait for each other.  Nothing here is a collective, and every wait has an end:

    - The first rank that claims a graph compiles it.  The leader of the host (local rank 0) gets a head start for the
      first graph of a region, which ends when it is seen to compile another graph, or after a few seconds.
    - The others wait for the claimant's outcome.  They go on and compile themselves when it failed, when its process
      is gone, or at the deadline.

Ranks share when they can find each other's results: on one host, with the same cache directory, and with the same
device ordinals, since the compiler bakes those into its code and its cache keys.  (Ranks that each see one GPU, as
``cuda:0``, share; those that see all of them compile side by side.)

The forward and the backward each have a turn.  The compiler comes to the backward only when it first runs, unless
sizes are dynamic, and a turn is taken wherever that is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lockstep import torch_private
from lockstep.agree.board import Board
from lockstep.graph.fingerprint import GraphFacts, difference

logger = logging.getLogger("lockstep")

T = TypeVar("T")
Around = Callable[[str, Any, Callable[[], Any]], Any]

# A key is asked for rather than waited for: torch's store writes two lines of warnings whenever such a wait times out.
_POLL_SECONDS = 0.05
_PROGRESS_EVERY_SECONDS = 3.0
_DONE = "done"
_FAILED = "failed: "


class CompileTurns:
    """Who compiles what, among the ranks that share a board.  ``board`` is None for a rank alone."""

    def __init__(self, board: Board | None, rank: int, host: str | None = None) -> None:
        self.board = board
        self._rank = rank
        self._host = host or socket.gethostname()
        local_rank = os.environ.get("LOCAL_RANK")
        # Whoever starts ranks without saying which is the host's first gets first come, first served.
        self._is_leader = local_rank == "0"
        self._has_leader = local_rank is not None
        self._warned: set[str] = set()
        self._num_compilations: Counter[str] = Counter()

    # ---------------------------------------------------------------- comparing

    def next_number(self, region: str) -> int:
        """How many times this rank has compiled the region before the time that begins now."""
        self._num_compilations[region] += 1
        return self._num_compilations[region] - 1

    def announce(self, facts: GraphFacts) -> None:
        """Tell the other ranks what is about to be compiled here, and warn where one of this host differs."""
        if self.board is None:
            return
        self.board.post(self._facts_key(facts.region, facts.number, self._rank), facts.to_json())
        compilation = f"compile/host {self._host}/{facts.region}/{facts.number}"
        first = self.board.post_first(f"{compilation}/first", f"{self._rank} {facts.digest}")
        if self._is_leader:
            self.board.post(f"{compilation}/leader", self._turn_key(facts))
        other, digest = first.split()
        if digest == facts.digest or facts.region in self._warned:
            return
        self._warned.add(facts.region)
        theirs = self.board.read(self._facts_key(facts.region, facts.number, int(other)))
        if theirs is not None:
            table = difference({int(other): GraphFacts.from_json(theirs), self._rank: facts})
            logger.warning(
                "Ranks of host %s compile different graphs for %s, so each compiles its own: a longer start, and "
                "steps that wait for each other.\n%s",
                self._host,
                facts.region,
                table,
            )

    def describe_disagreement(self, region: str, number: int) -> str:
        """The table of what differs, among the ranks that have come to this compilation; never waits."""
        if self.board is None:
            return ""
        texts = {rank: self.board.read(self._facts_key(region, number, rank)) for rank in range(self.board.world)}
        return difference({rank: GraphFacts.from_json(text) for rank, text in texts.items() if text})

    def _facts_key(self, region: str, number: int, rank: int) -> str:
        return f"compile/facts/{region}/{number}/{rank}"

    # ---------------------------------------------------------------- taking turns

    def take_turn(self, facts: GraphFacts, compile: Callable[[], T], *, phase: str = "forward") -> T:
        """What ``compile`` returns, called when it is this rank's turn; at once where others cannot find the result."""
        if self.board is None or not facts.cache:
            return compile()
        turn = f"{self._turn_key(facts)}/{phase}"
        self._give_head_start(turn, facts)
        mine = json.dumps({"rank": self._rank, "pid": os.getpid()})
        claim = self.board.post_first(f"{turn}/claim", mine)
        if json.loads(claim)["rank"] != self._rank:
            self._wait_for_claimant(turn, facts, phase, claim)
            return compile()
        try:
            compiled = compile()
        except BaseException as error:
            self.board.post(f"{turn}/outcome", f"{_FAILED}{type(error).__name__}: {str(error)[:1000]}")
            raise
        self.board.post(f"{turn}/outcome", _DONE)
        return compiled

    def found_in_cache(self, facts: GraphFacts) -> None:
        """This rank got both phases from a cache without a turn; ranks that do not must not wait for it to start."""
        if self.board is not None and self._is_leader:
            for phase in ("forward", "backward"):
                self.board.post_first(f"{self._turn_key(facts)}/{phase}/outcome", _DONE)

    def _turn_key(self, facts: GraphFacts) -> str:
        """The same on two ranks if and only if one finds what the other compiled."""
        place = "|".join([self._host, *_identity(facts.cache), *facts.devices])
        return f"compile/{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}/{facts.digest}"

    def _give_head_start(self, turn: str, facts: GraphFacts) -> None:
        """Let the leader claim first, as long as it may be about to.

        A region is compiled again where a guard failed, often on one rank only: then nobody waits for anybody to start.
        """
        if self._is_leader or not self._has_leader or facts.number:
            return
        assert self.board is not None
        deadline = monotonic() + _seconds("LOCKSTEP_COMPILE_START_SECONDS", 5.0)
        leader = f"compile/host {self._host}/{facts.region}/{facts.number}/leader"
        while monotonic() < deadline and self.board.read(f"{turn}/claim") is None:
            if self.board.read(leader) not in (None, self._turn_key(facts)) or self.board.read(f"{turn}/outcome"):
                return
            sleep(_POLL_SECONDS)

    def _wait_for_claimant(self, turn: str, facts: GraphFacts, phase: str, claim: str) -> None:
        assert self.board is not None
        claimant = json.loads(claim)
        begin = monotonic()
        deadline = begin + _seconds("LOCKSTEP_COMPILE_TIMEOUT", 1800.0)
        next_line = begin + _PROGRESS_EVERY_SECONDS
        what = facts.region if phase == "forward" else f"the {phase} of {facts.region}"
        while (outcome := self.board.read(f"{turn}/outcome")) is None:
            waited = monotonic() - begin
            is_late = begin + waited >= deadline
            if is_late or not _is_alive(claimant["pid"]):
                logger.warning(
                    "Rank %d compiles %s itself: rank %d, which was compiling it, %s.",
                    self._rank,
                    what,
                    claimant["rank"],
                    f"has not finished after {waited:.0f} s" if is_late else "is gone",
                )
                return
            if begin + waited >= next_line:
                next_line += _PROGRESS_EVERY_SECONDS
                logger.info(
                    "rank %d waits for rank %d to compile %s (%.0f s)", self._rank, claimant["rank"], what, waited
                )
            sleep(_POLL_SECONDS)
        if outcome.startswith(_FAILED):
            logger.warning(
                "Rank %d could not compile %s (%s), so rank %d tries itself.",
                claimant["rank"],
                what,
                outcome.removeprefix(_FAILED),
                self._rank,
            )


@dataclass(frozen=True)
class GraphTurn:
    """The turns of one graph that Inductor compiles."""

    turns: CompileTurns
    facts: GraphFacts

    def run(self, compile_around: Callable[[Around], T]) -> T:
        """Compile; ``compile_around`` takes what stands around each phase."""
        phases = []

        def around(phase: str, graph: Any, compile: Callable[[], Any]) -> Any:
            phases.append(phase)
            if not torch_private.inductor_can_cache(graph):
                return compile()
            return self.turns.take_turn(self.facts, compile, phase=phase)

        compiled = compile_around(around)
        if not phases:  # AOTAutograd's cache had all of it
            self.turns.found_in_cache(self.facts)
        return compiled


_turns: WeakKeyDictionary[object, CompileTurns] = WeakKeyDictionary()


def turns_of(owner: object, board: Board | None, rank: int) -> CompileTurns:
    """The turns of a wrapper, for as long as it lives and keeps its board.  Kept here because a wrapper is pickled."""
    found = _turns.get(owner)
    if found is None or found.board is not board:
        found = _turns[owner] = CompileTurns(board, rank)
    return found


def cache_directory(patches: dict[str, Any]) -> str:
    """Where other ranks find what Inductor compiles under these options; empty where there is nothing to wait for."""
    if torch_private.inductor_meets_ranks(patches):
        return ""  # they have to compile at the same time
    return torch_private.inductor_cache_directory(patches) or ""


def _identity(directory: str) -> list[str]:
    """Names a directory, so that two ranks have the same names if and only if they see the same one.

    Ranks in containers may share a host's name and a path but not what is there; nor can they see each other's
    processes, which is why the namespace of those is a part of it.
    """
    try:
        found = os.stat(directory)
        where = f"{found.st_dev}:{found.st_ino}"
    except OSError:
        where = "not there"
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return [os.path.realpath(directory), where, processes]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is there, and somebody else's
    return True


def _seconds(variable: str, default: float) -> float:
    return float(os.environ.get(variable, default))
