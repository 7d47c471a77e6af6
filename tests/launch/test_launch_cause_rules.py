"""The rules by which the cause is found, without any process."""

from __future__ import annotations

from lockstep.errors import CheckpointFailed, PeerFailed, PeerLate
from lockstep.launch.cause import find_cause
from lockstep.launch.facts import Ending, RankFacts
from lockstep.launch.page import Place
from lockstep.launch.summary import ranks_table
from lockstep.launch.words import words_of


def failed(rank: int, at: float, error: BaseException | None = None, code: int = 1) -> RankFacts:
    facts = RankFacts(
        rank, 100 + rank, "host", Ending.FAILED, code, at, Place(pid=1, step=5, moment="collect", time=at)
    )
    if error is not None:
        words = words_of(error)
        facts.words = [type(words)(**{**words.__dict__, "time": at - 0.01})]
    return facts


def test_a_killed_rank_comes_before_survivors_that_were_seen_first() -> None:
    ranks = [
        failed(0, 10.0, PeerFailed("lost a peer")),
        failed(1, 10.5, code=-9),
        failed(2, 10.1, PeerLate("late", [1])),
    ]
    cause = find_cause(ranks)
    assert (cause.rank, cause.exit_code, cause.step) == (1, -9, 5)
    assert "was killed by SIGKILL" in cause.text


def test_the_earliest_error_of_its_own_counts() -> None:
    cause = find_cause([failed(0, 12.0, ValueError("second")), failed(1, 11.0, KeyError("first"))])
    assert cause.rank == 1
    assert "KeyError: 'first'" in cause.text


def test_of_two_ends_seen_at_once_the_kill_is_the_cause() -> None:
    assert find_cause([failed(0, 10.0, code=-6), failed(1, 10.0, code=-9)]).rank == 1


def test_torchs_own_words_of_a_broken_connection_are_a_consequence() -> None:
    broken = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:58286")
    assert find_cause([failed(0, 10.0, broken), failed(1, 10.3, code=-11)]).rank == 1


def test_a_connection_of_the_programs_own_is_no_rank() -> None:
    done = RankFacts(0, 100, "host", Ending.DONE, 0, 9.0, Place(pid=1, step=5, moment="collect", time=9.0))
    upload = ConnectionRefusedError("[Errno 111] Connection refused")
    assert find_cause([done, failed(1, 10.0, upload)]).rank == 1


def test_an_error_raised_from_a_lost_peer_is_a_consequence() -> None:
    try:
        try:
            raise PeerFailed("lost")
        except PeerFailed as lost:
            raise ValueError("cannot train") from lost
    except ValueError as error:
        wrapped = error
    assert find_cause([failed(0, 10.0, wrapped), failed(1, 10.3, OSError("no disk"))]).rank == 1


def test_a_stopped_rank_that_others_name_is_the_cause() -> None:
    stopped = RankFacts(1, 101, "host", Ending.ENDED_BY_LAUNCHER, -9, 20.0, was_stopped=True)
    cause = find_cause([failed(0, 10.0, PeerLate("late", [1])), stopped, failed(2, 10.0, PeerLate("late", [1]))])
    assert cause.rank == 1
    assert "was stopped" in cause.text
    assert "missed by rank(s) 0, 2" in cause.text


def test_a_rank_that_was_alive_but_absent_is_the_cause() -> None:
    absent = RankFacts(1, 101, "host", Ending.ENDED_BY_LAUNCHER, -15, 20.0)
    cause = find_cause([failed(0, 10.0, PeerLate("late", [1])), absent])
    assert cause.rank == 1
    assert "did not take part" in cause.text


def test_a_rank_that_ended_well_too_early_is_the_cause() -> None:
    done = RankFacts(1, 101, "host", Ending.DONE, 0, 5.0)
    cause = find_cause([failed(0, 10.0, PeerFailed("lost a peer", 1)), done])
    assert cause.rank == 1
    assert "had ended well before the others were done" in cause.text
    assert cause.exit_code == 1


def test_a_rank_that_ended_well_is_the_cause_where_connections_broke_and_nobody_is_named() -> None:
    done = RankFacts(1, 101, "host", Ending.DONE, 0, 12.0)  # its end takes longer than the end of its connections
    broken = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:58286")
    cause = find_cause([failed(0, 10.0, broken), done])
    assert (cause.rank, cause.exit_code) == (1, 1)
    assert "had ended well before the others were done; missed by rank(s) 0" in cause.text


def test_what_a_rank_quotes_is_in_the_cause() -> None:
    quoting = PeerFailed("Rank 1 failed. It said:\nValueError: bad batch\nand more", 1)
    assert "It said: ValueError: bad batch" in find_cause([failed(0, 10.0, quoting)]).text
    assert "more" not in find_cause([failed(0, 10.0, quoting)]).text


def test_survivors_alone_are_better_than_nobody() -> None:
    assert find_cause([failed(0, 10.0, PeerFailed("lost")), failed(1, 9.0, PeerFailed("lost"))]).rank == 1


def test_the_table_has_every_rank_first_things_first() -> None:
    lines = ranks_table([failed(0, 10.0, PeerFailed("lost a peer")), failed(1, 9.5, code=-9)]).splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "1", "0"]


class NonFinite(RuntimeError):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__("gradients are not finite")
        self.ranks = ranks


def test_an_error_of_all_ranks_is_the_one_of_the_rank_that_it_names() -> None:
    cause = find_cause([failed(rank, 10.0 + rank, NonFinite([2])) for rank in range(3)])
    assert cause.rank == 2


def test_a_checkpoint_that_failed_on_one_rank_is_that_ranks_fault() -> None:
    told = CheckpointFailed("not saved", 1)
    cause = find_cause([failed(0, 10.0, told), failed(1, 10.5, ValueError("in state_dict")), failed(2, 10.1, told)])
    assert cause.rank == 1
    assert "ValueError: in state_dict" in cause.text
