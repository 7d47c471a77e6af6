"""How ranks save together: rank 0 opens a directory, every rank writes its files, rank 0 makes it count.

    rank 0   begin: lock the folder, remove litter, make a partial directory      all   write files, sync, report
    rank 0   all reports are here: manifest, sync, rename, latest, remove old     all   hear the verdict

Until the rename nothing has the name of a checkpoint; after it everything is on the disk.  Any error, on any rank, is
in the verdict, so that all ranks know the same: it counts, or it does not and why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import folder as folders
from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.disk import (
    NewFile,
    digest_of,
    locked,
    make_directory,
    read_small,
    remove_tree,
    sync_directory,
    write_file,
)
from lockstep.checkpoint.manifest import MANIFEST, MAX_BYTES, STATE, Manifest, state_of, tensors_of, unite
from lockstep.checkpoint.moments import Moment, reached
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    LockstepError,
    PeerFailed,
    PeerLate,
    StoreSilent,
    bullet_list,
    rank_table,
)
from lockstep.version import __version__

logger = logging.getLogger("lockstep")

_STORE_LOST_SECONDS = 10.0
_BEAT_SECONDS = 2.0
_COUNTS = "counts"


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is being saved, as rank 0 chose it."""

    name: str
    save_id: str
    serial: int

    def partial(self, folder: Path) -> Path:
        return folder / folders.partial_name(self.name, self.save_id)


class Save:
    """One save on one rank."""

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot | None,
        ranks: Ranks,
        *,
        keep: int | None,
        failure: BaseException | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._snapshot = snapshot
        self._ranks = ranks
        self._keep = keep
        self._failure = failure
        self._on_bytes = on_bytes
        self._number = ranks.next_number("save")
        self._num_bytes, self._next_beat = 0, 0.0

    def run(self) -> Path:
        """Do this rank's part and return the checkpoint once it counts on all ranks, or raise why it does not."""
        try:
            if self._ranks.world > 1:
                self._ranks.tell(self._key(f"beat/{self._ranks.rank}"), "0")
            if self._ranks.rank != 0:
                return self._hear_verdict(self._write_and_report(None))
            if folders.is_a_checkpoint(self._folder):
                raise NotADirectoryError(
                    errno.ENOTDIR, "this is a checkpoint; give the folder it is in", str(self._folder)
                )
            make_directory(self._folder)
            with locked(self._folder):
                return self._lead()
        except OSError as error:  # the folder cannot be made or locked
            self._ranks.tell(self._key("begin"), "{}")
            raise self._failed(self._words(error), self._me) from error
        except LockstepError:
            raise
        except RuntimeError as error:
            raise CheckpointFailed(f"The ranks' store was lost while a checkpoint was saved: {error}") from error
        finally:
            self._snapshot = None  # a copy of the whole share, which nobody needs any more

    # ---------------------------------------------------------------- every rank

    def _write_and_report(self, place: Place | None) -> Place | None:
        """Write this rank's files and say so, or say why not."""
        rank = self._ranks.rank
        try:
            if self._failure is not None:
                raise self._failure
            place = self._hear_begin() if place is None else place
            if place is None:
                return None
            report = {"files": self._write_files(place)}
        except Exception as error:
            report = {"error": [self._words(error)]}
        assert self._snapshot is not None or "error" in report
        report["step"] = [] if self._snapshot is None else [self._snapshot.step]
        self._ranks.tell(self._key(f"report/{rank}"), json.dumps(report))
        reached(Moment.REPORTED, self._folder)
        return place

    def _write_files(self, place: Place) -> Any:
        rank, snapshot, directory = self._ranks.rank, self._snapshot, place.partial(self._folder)
        assert snapshot is not None
        mark = {"save_id": place.save_id, "step": str(snapshot.step), "rank": str(rank)}
        files = {}
        with NewFile(directory / tensors_of(rank), self._note_bytes) as file:
            tensorfile.write(file, snapshot.tensors, mark)
            files[tensors_of(rank)] = file.finish()
        own = {**mark, "own": snapshot.own, "index": snapshot.index, "checks": snapshot.checks}
        files[state_of(rank)] = write_file(directory / state_of(rank), json.dumps(own).encode(), self._note_bytes)
        if rank == 0:
            shared = json.dumps({**mark, "shared": snapshot.shared}).encode()
            files[STATE] = write_file(directory / STATE, shared, self._note_bytes)
        return files

    def _hear_begin(self) -> Place | None:
        """Return the place that rank 0 chose; None if it gave up, which is in the verdict."""
        key = self._key("begin")
        what = f"rank {self._ranks.shown(0)} to begin a checkpoint"
        words = self._ranks.wait([key], what, lambda: None, self._absent)[key]
        return Place(**json.loads(words)) if words != "{}" else None

    def _hear_verdict(self, place: Place | None) -> Path:
        key = self._key("verdict")
        try:
            verdict = json.loads(self._ranks.wait([key], "the verdict on a checkpoint", self._sign_of_life)[key])
        except (PeerLate, PeerFailed) as error:
            # Rank 0 may only stand still, and go on later: what was decided first holds for it too.
            may_count = isinstance(error, StoreSilent)  # perhaps because rank 0 has ended well
            if isinstance(error, PeerLate) and not may_count:
                may_count = self._decide(str(self._me)) == _COUNTS
            path = None if place is None else self._find_on_disk(place, _STORE_LOST_SECONDS if may_count else 0.0)
            if path is None:
                zero = self._ranks.shown(0)
                raise CheckpointFailed(f"It is not known whether the checkpoint counts. {error}", zero) from error
            return path
        except RuntimeError:  # the store is gone, perhaps because rank 0 has ended well
            path = None if place is None else self._find_on_disk(place, _STORE_LOST_SECONDS)
            if path is None:
                raise
            return path
        if "error" in verdict:
            raise CheckpointFailed(verdict["error"], verdict.get("rank"))
        return Path(verdict["path"])

    def _decide(self, word: str) -> str:
        """Say that it counts, or give it up; returns what was said first."""
        with contextlib.suppress(RuntimeError):  # the store is silent: nobody hears anything
            return self._ranks.decide(self._key("decision"), word) if self._ranks.world > 1 else word
        return word

    def _find_on_disk(self, place: Place, patience: float) -> Path | None:
        """Look whether the checkpoint is there, which counts even if rank 0 can no longer say so."""
        deadline = time.monotonic() + patience
        while True:
            try:
                if Manifest.read(self._folder / place.name).save_id == place.save_id:
                    return self._folder / place.name
            except CheckpointDamaged:
                pass  # not there yet, or never
            if time.monotonic() > deadline:
                return None
            time.sleep(0.2)

    # ---------------------------------------------------------------- rank 0

    def _lead(self) -> Path:
        place = self._begin()
        self._ranks.tell(self._key("begin"), json.dumps(place.__dict__ if place else {}))
        try:
            self._write_and_report(place)
            if place is None:
                assert self._failure is not None
                raise _Refused(self._words(self._failure), self._me)
            path = self._commit(place, self._reports())
        except Exception as error:
            if place is None or not self._counts(place):
                self._clear(place)
                refused = error if isinstance(error, _Refused) else _Refused(self._words(error), self._origin(error))
                raise self._failed(str(refused), refused.rank) from self._failure or error
            path = self._folder / place.name
            logger.warning("The checkpoint %s counts, but after it was complete: %s", path, error)
        self._remove_old(path.name)
        self._ranks.tell(self._key("verdict"), json.dumps({"path": str(path)}))
        reached(Moment.DONE, path)
        return path

    def _begin(self) -> Place | None:
        """Prepare the folder and make a place in it; None if that failed, or there is nothing to save."""
        if self._snapshot is None:
            return None
        place = None
        try:
            folders.remove_litter(self._folder)
            reached(Moment.FOLDER_READY, self._folder)
            name, serial = folders.next_place(self._folder, self._snapshot.step)
            place = Place(name, secrets.token_hex(8), serial)
            place.partial(self._folder).mkdir()
            reached(Moment.PARTIAL_MADE, place.partial(self._folder))
            return place
        except Exception as error:
            self._clear(place)
            self._failure = error
            return None

    def _counts(self, place: Place) -> bool:
        """Tell whether the checkpoint is complete and the latest, whatever went wrong after that."""
        with contextlib.suppress(OSError, CheckpointDamaged):
            is_latest = folders.read_latest(self._folder) == folders.Latest(place.name, place.serial)
            return is_latest and Manifest.read(self._folder / place.name).save_id == place.save_id
        return False

    def _clear(self, place: Place | None) -> None:
        """Remove what does not count, whichever name it had reached."""
        if place is None:
            return
        partial, final = place.partial(self._folder), self._folder / place.name
        with contextlib.suppress(OSError, CheckpointDamaged):
            if final.exists() and Manifest.read(final).save_id == place.save_id:
                os.rename(final, partial)
        remove_tree(partial)

    def _remove_old(self, newest: str) -> None:
        """Keep the newest few; one that cannot be removed costs a warning, since the new one counts."""
        try:
            if self._keep is not None:
                folders.remove_old(self._folder, self._keep, newest)
        except Exception as error:
            logger.warning("An old checkpoint could not be removed: %s", error)

    def _reports(self) -> dict[int, dict[str, Any]]:
        world = self._ranks.world
        keys = [self._key(f"report/{rank}") for rank in range(world)]
        what = "all ranks to write their part of a checkpoint"
        words = self._ranks.wait(keys, what, self._sign_of_life, self._absent)
        reports = {rank: json.loads(words[key]) for rank, key in enumerate(keys)}
        # All ranks are at this save, so nobody reads the words of the one before it any more.
        self._ranks.forget([self._key(word, self._number - 1) for word in self._all_keys()])
        return reports

    def _commit(self, place: Place, reports: dict[int, dict[str, Any]]) -> Path:
        """Make a checkpoint of what all ranks have written."""
        errors = {rank: report["error"][0] for rank, report in reports.items() if "error" in report}
        if errors:
            raise _Refused("\n".join(errors[rank] for rank in sorted(errors)), self._ranks.shown(min(errors)))
        steps = {self._ranks.shown(rank): f"step {report['step'][0]}" for rank, report in reports.items()}
        if len(set(steps.values())) > 1:
            raise _Refused(f"Ranks save different steps:\n{rank_table(steps)}", None)
        assert self._snapshot is not None
        partial = place.partial(self._folder)
        files = {
            name: (size, digest) for report in reports.values() for name, (size, digest) in report["files"].items()
        }
        indexes, checks = self._read_back(partial, files)
        _compare({self._ranks.shown(rank): told for rank, told in checks.items()})
        manifest = Manifest(
            place.name,
            place.save_id,
            place.serial,
            self._snapshot.step,
            self._ranks.world,
            {"lockstep": __version__, "torch": torch.__version__},
            files,
            unite(indexes.items(), self._ranks.shown),
        )
        write_file(partial / MANIFEST, manifest.to_bytes())
        sync_directory(partial)
        reached(Moment.PARTIAL_SYNCED, partial)
        decided = self._decide(_COUNTS)
        if decided != _COUNTS:
            raise _Refused(f"Rank {decided} had given up rank {self._me}, which stood still.", self._me)
        final = self._folder / place.name
        os.rename(partial, final)
        reached(Moment.RENAMED, final)
        sync_directory(self._folder)
        reached(Moment.FOLDER_SYNCED, self._folder)
        folders.write_latest(self._folder, place.name, place.serial)
        return final

    def _read_back(
        self, partial: Path, files: dict[str, tuple[int, str]]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
        """Read what each rank wrote about itself, which also shows that this rank sees their files."""
        indexes, checks = {}, {}
        for rank in range(self._ranks.world):
            path = partial / state_of(rank)
            try:
                data = read_small(path, MAX_BYTES, files[state_of(rank)][0])
            except CheckpointDamaged as damage:
                raise _Refused(
                    f"Rank {self._me} does not see what rank {self._ranks.shown(rank)} wrote ({damage}): the folder "
                    "must be on a file system that all ranks share.",
                    self._ranks.shown(rank),
                ) from None
            if digest_of(data) != files[state_of(rank)][1]:
                shown = self._ranks.shown(rank)
                raise _Refused(f"{path} of rank {shown} reads back differently from what was written.", shown)
            content = json.loads(data)
            indexes[rank], checks[rank] = content["index"], content["checks"]
        return indexes, checks

    def _failed(self, text: str, rank: int | None) -> CheckpointFailed:
        """Tell all ranks that this checkpoint does not count, and why."""
        message = f"The checkpoint was not saved, and the one before it is untouched.\n{text}"
        self._ranks.tell(self._key("verdict"), json.dumps({"error": message, "rank": rank}))
        return CheckpointFailed(message, rank)

    # ---------------------------------------------------------------- words

    @property
    def _me(self) -> int:
        """This rank as messages and errors name it."""
        return self._ranks.shown(self._ranks.rank)

    def _origin(self, error: BaseException) -> int:
        """The rank at which it went wrong: one that is gone or late, else this one."""
        if isinstance(error, PeerFailed) and error.rank is not None:
            return error.rank
        return error.ranks[0] if isinstance(error, PeerLate) and error.ranks else self._me

    def _words(self, error: BaseException) -> str:
        text = f"Rank {self._me}: {type(error).__name__}: {error}"
        if self._ranks.rank and isinstance(error, FileNotFoundError):
            zero = self._ranks.shown(0)
            text += f" (rank {zero} made this directory; the folder must be on a file system that all ranks share)"
        return text

    def _key(self, word: str, number: int | None = None) -> str:
        return f"save {self._number if number is None else number}/{word}"

    def _all_keys(self) -> list[str]:
        ranks = range(self._ranks.world)
        return ["begin", "decision", "verdict", *(f"{word}/{rank}" for word in ("report", "beat") for rank in ranks)]

    def _note_bytes(self, num_bytes: int) -> None:
        """Show others that this rank is at work."""
        self._num_bytes += num_bytes
        self._on_bytes(num_bytes)
        now = time.monotonic()
        if self._ranks.world > 1 and now >= self._next_beat:
            if self._next_beat:
                self._ranks.tell(self._key(f"beat/{self._ranks.rank}"), str(self._num_bytes))
            self._next_beat = now + _BEAT_SECONDS

    def _sign_of_life(self) -> list[str | None]:
        return [self._ranks.hear(self._key(f"beat/{rank}")) for rank in range(self._ranks.world)]

    def _absent(self) -> list[int]:
        """The ranks that have not begun this save."""
        return [rank for rank, beat in enumerate(self._sign_of_life()) if beat is None]


class _Refused(Exception):
    """A checkpoint must not count."""

    def __init__(self, text: str, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


def _compare(checks: dict[int, dict[str, int]]) -> None:
    """Raise if ranks hold different values in what must be equal: each of them wrote a share of it."""
    zero, first = next(iter(checks.items()))
    for rank, other in checks.items():
        differing = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if differing:
            raise _Refused(
                f"Rank {rank} holds other values than rank {zero} in {len(differing)} of {len(first)} tensors that "
                f"must be equal on all ranks:\n{bullet_list(differing, 5)}\nFix: train with a data-parallel wrapper, "
                "and change parameters on all ranks alike. check=False saves a share of each rank nevertheless.",
                rank,
            )
