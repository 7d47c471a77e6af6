"""Subjects in processes of their own that take turns: one set of ranks per subject, of which one at a time computes.

Two versions of one library cannot share a process without sharing what they patch and register in torch, and each
would pay for the other's hooks. So each subject has its own ranks, all are alive at once, and a number in a file says
whose turn it is. Rounds are interleaved as in ``timing.interleave``: each round in the reverse order of the last.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks import RanksFailed, run_ranks

POLL_SECONDS = 0.01


class Turns:
    """In each rank: the subject's place in the order, and the file that says whose turn it is."""

    def __init__(self, folder: str, place: int, num_subjects: int) -> None:
        self.folder, self.place, self.num_subjects = Path(folder), place, num_subjects
        self._num_taken = 0

    def take(self, work: Callable[[], Any]) -> Any:
        """Wait for this subject's next turn, do ``work`` on all its ranks, and pass the turn on."""
        import torch.distributed as dist

        in_reverse = self._num_taken % 2 == 1
        place = self.num_subjects - 1 - self.place if in_reverse else self.place
        mine = self._num_taken * self.num_subjects + place
        self._num_taken += 1
        while self._now() != mine:
            if (self.folder / "stop").exists():
                raise RuntimeError("the ranks of another subject failed")
            time.sleep(POLL_SECONDS)
        try:
            answer = work()
        except BaseException:
            (self.folder / "stop").touch()
            raise
        dist.barrier()
        if dist.get_rank() == 0:
            pass_on(self.folder, mine + 1)
        return answer

    def _now(self) -> int:
        return int((self.folder / "turn").read_text())


def pass_on(folder: Path, turn: int) -> None:
    # By renaming, so that nobody reads half a number.
    draft = folder / f"turn.{os.getpid()}"
    draft.write_text(str(turn))
    draft.replace(folder / "turn")


def run_in_turns(job: str, options: dict[str, Any], subjects: list[str], **where: Any) -> dict[str, Any]:
    """The answer of each subject's rank 0.  ``job`` gets ``subject`` and ``turns`` besides the options.

    A job takes its first turn for setting up and one turn per round, equally many for all subjects.
    """
    with tempfile.TemporaryDirectory(prefix="turns-") as name:
        folder = Path(name)
        pass_on(folder, 0)

        def run(place: int) -> Any:
            own = {**options, "subject": subjects[place], "turns": [name, place, len(subjects)]}
            try:
                return run_ranks(job, own, **where)[0]
            except RanksFailed:
                (folder / "stop").touch()
                raise

        with ThreadPoolExecutor(len(subjects)) as pool:
            futures = [pool.submit(run, place) for place in range(len(subjects))]
            failures = [error for future in futures if (error := future.exception()) is not None]
        # The others fail because the first one did; its own words are the ones to show.
        own_words = [error for error in failures if "the ranks of another subject failed" not in str(error)]
        if failures:
            raise (own_words or failures)[0]
        return {subject: future.result() for subject, future in zip(subjects, futures, strict=True)}
