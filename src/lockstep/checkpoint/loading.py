"""``load``: the ranks agree on a checkpoint, each verifies what it will read, and only then is anything used."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lockstep.checkpoint import folder as folders
from lockstep.checkpoint.collect import require_folder, require_mapping, require_objects
from lockstep.checkpoint.disk import in_use
from lockstep.checkpoint.hook_state import wrapper_of
from lockstep.checkpoint.ranks import Ranks, ranks_of
from lockstep.checkpoint.reading import Reader
from lockstep.checkpoint.restore import Restoration, Restored, Targets
from lockstep.checkpoint.saving import wait
from lockstep.checkpoint.undo import Undo
from lockstep.errors import CheckpointDamaged, CheckpointFailed, NoCheckpoint, rank_table
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.plan import Plan

logger = logging.getLogger("lockstep")

T = TypeVar("T")
_MOST_GONE = 5


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded; ``notes`` says what could not be restored as it was."""

    path: Path
    step: int
    saved_world: int
    is_bitwise: bool  # whether a run that goes on from here has the bits of one that was not interrupted
    extra: dict[str, Any]
    per_rank: dict[str, Any]
    notes: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    strict: bool = True,
    fallback: bool = False,
    missing_ok: bool = False,
    process_group: Any = None,
) -> Loaded | None:
    """Load the latest checkpoint of a folder, or the one checkpoint at ``path``; called on all ranks.

    Everything that will be read is verified on all ranks first; a damaged checkpoint is refused on all of them and
    nothing is changed.  Another number of ranks than it was saved by is allowed; the result says that bits may differ.

    Args:
        path: what was given to :func:`save`, or one directory in it.
        model: and all other objects: what they were when it was saved, in whatever wrapping.
        extra: objects to restore by the names they were saved by; the result has all values but those of
            optimizers of the model, which are restored; so for ``per_rank``.
        strict: False loads the names that both have, and converts dtypes.
        fallback: take the last complete checkpoint in place of a damaged one, with a warning.
        missing_ok: return None where there is no checkpoint yet.
        process_group: the ranks that load; None for the default group, or for one process alone.
    """
    if optimizer is not None and model is None:
        raise ValueError("an optimizer is loaded by the names of the model's parameters; give the model too")
    require_objects(
        nn.Module() if model is None else model,
        optimizer,
        "load_state_dict",
        scheduler=scheduler,
        scaler=scaler,
        data=data,
    )
    for name, given in (("extra", extra), ("per_rank", per_rank)):
        require_mapping(name, given)
    place = require_folder(path)
    wait()
    ranks = ranks_of(process_group)
    targets = Targets(model, optimizer, scheduler, scaler, data, extra or {}, per_rank or {}, strict)
    tried: list[Path] = []
    num_gone = 0
    directory = None
    with contextlib.ExitStack() as held:
        while True:
            held.close()
            try:
                directory = _agree_on_place(place, ranks, tried)
                if directory is None:
                    if missing_ok:
                        return None
                    raise NoCheckpoint(f"There is no checkpoint in {path}.")
                held.enter_context(in_use(directory))
                is_chosen_here = directory != place and num_gone < _MOST_GONE
                restoration = _prepare(directory, targets, ranks, may_be_gone=is_chosen_here)
                break
            except _Gone:
                num_gone += 1
            except CheckpointDamaged as damage:
                if not fallback or damage.last_complete is None:
                    raise
                tried.append(directory or damage.last_complete.with_name(folders.LATEST))
                logger.warning("%s\nGoing on with %s.", damage, damage.last_complete)
        manifest = restoration.reader.manifest
        restored = _apply(restoration, ranks)
    if listeners:
        reached(StepMoment.LOADED, manifest.step)
    notes = [*_notes(restoration, model, ranks.world), *restored.notes]
    for note in notes:
        logger.warning("Loaded %s: %s.", directory, note)
    return Loaded(directory, manifest.step, manifest.world, not notes, restored.extra, restored.per_rank, tuple(notes))


def _agree_on_place(path: Path, ranks: Ranks, tried: list[Path]) -> Path | None:
    """Let rank 0 choose, so that all ranks load the same."""
    key = f"place {ranks.next_number('place')}"
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            chosen = _choose(path, tried)
            word = json.dumps({"path": None if chosen is None else str(chosen)})
        except CheckpointDamaged as damage:
            word = json.dumps(
                {"error": str(damage), "file": str(damage.file), "offer": str(damage.last_complete or "")}
            )
        except Exception as error:  # a folder that cannot be read
            failure, word = error, json.dumps({"failure": f"{type(error).__name__}: {error}"})
        ranks.tell(key, word)
    what = f"rank {ranks.shown(0)} to choose a checkpoint to load"
    choice = json.loads(ranks.wait([key], what, lambda: None, lambda: [0])[key])
    ranks.gather("all ranks to come to the load", "", names_absent=True)
    if ranks.rank == 0:
        ranks.forget([key])
    if failure is not None:
        raise failure
    if "failure" in choice:
        told = {ranks.shown(0): choice["failure"]}
        raise CheckpointFailed(f"No checkpoint could be looked for:\n{rank_table(told)}", ranks.shown(0))
    if "error" in choice:
        raise CheckpointDamaged(
            choice["error"], Path(choice["file"]), Path(choice["offer"]) if choice["offer"] else None
        )
    return None if choice["path"] is None else Path(choice["path"])


def _choose(path: Path, tried: list[Path]) -> Path | None:
    """Return the next checkpoint to try; None if there is none."""
    if folders.is_a_checkpoint(path):
        if not path.is_dir():
            return None
        if not tried:  # a user's own link to a checkpoint is followed, one in the place of a checkpoint is not
            return path if folders.is_checkpoint_name(path.name) else path.resolve()
        return last_complete(path.parent, tried)
    if tried:
        return last_complete(path, tried)
    try:
        latest, there = folders.read_latest(path), folders.candidates(path)
        while latest is not None and latest.name not in [c.path.name for c in there]:
            before, latest, there = latest, folders.read_latest(path), folders.candidates(path)
            if latest == before:  # otherwise a save of another job came in between
                file = path / folders.LATEST
                raise CheckpointDamaged(f"{file} names {before.name}, which is missing.", file=file)
    except CheckpointDamaged as damage:
        raise _with_offer(damage, path, tried) from None
    newest = next((c for c in there if c.manifest is not None), None)
    if newest is None or newest.manifest is None:
        return there[0].path if there else None
    # A rank may have died between the rename, which made it complete, and the update of `latest`.
    if latest is None or newest.manifest.serial > latest.serial:
        return newest.path
    return path / latest.name


def last_complete(folder: Path, but: list[Path]) -> Path | None:
    """Return the newest checkpoint in a folder that verifies in full."""
    for candidate in folders.candidates(folder):
        if candidate.manifest is not None and candidate.path not in but:
            try:
                Reader(candidate.path, candidate.manifest).verify()
                return candidate.path
            except CheckpointDamaged:
                continue
    return None


def _with_offer(damage: CheckpointDamaged, folder: Path, but: list[Path]) -> CheckpointDamaged:
    offer = last_complete(folder, but)
    text = f"The last complete checkpoint is {offer}." if offer else "There is no other complete checkpoint here."
    if offer:
        text += " Load that path, or pass fallback=True."
    return CheckpointDamaged(f"{damage}\nNothing of it was used. {text}", damage.file, offer)


class _Gone(Exception):
    """The checkpoint was removed after it was chosen, by a save of another job that keeps only newer ones."""


def _prepare(directory: Path, targets: Targets, ranks: Ranks, *, may_be_gone: bool) -> Restoration:
    """Verify and compare on every rank, and go on only if it is well on all of them."""
    restoration, failure = None, None
    try:
        reader = Reader(directory)
        restoration = Restoration(reader, targets, ranks.rank, ranks.world)
        restoration.check()
        # What this rank reads; and of what no rank may read, its share, so that no damage goes unseen.
        names = sorted(reader.manifest.files)
        reader.verify(restoration.files() | set(names[ranks.rank :: ranks.world]))
        restoration.try_out()
    except Exception as error:
        failure = error
    word = "" if failure is None else f"{type(failure).__name__}: {failure}"
    file = str(getattr(failure, "file", "") or "")
    is_gone = failure is not None and not directory.exists()
    words = {
        r: json.loads(w)
        for r, w in ranks.gather("all ranks to verify the checkpoint", json.dumps([word, file, is_gone])).items()
    }
    words = {ranks.shown(rank): word for rank, word in words.items()}
    told = {rank: text for rank, (text, _, _) in words.items() if text}
    if not told:
        assert restoration is not None
        return restoration
    if may_be_gone and any(is_gone for _, _, is_gone in words.values()):
        raise _Gone
    damaged = [rank for rank, text in told.items() if text.startswith(CheckpointDamaged.__name__)]
    if not damaged:
        if failure is not None:
            raise failure
        raise CheckpointFailed(
            f"The checkpoint was not loaded, and nothing was changed:\n{rank_table(told)}", min(told)
        )
    text = told[damaged[0]].partition(": ")[2] if len(told) == ranks.world == 1 else rank_table(told)
    damage = CheckpointDamaged(
        f"The checkpoint {directory} is damaged:\n{text}", Path(words[damaged[0]][1] or directory)
    )
    raise _with_offer(damage, directory.parent, [directory])


def _apply(restoration: Restoration, ranks: Ranks) -> Restored:
    """Change the live objects, on all ranks or on none; all that is read was verified before."""
    undo = Undo()
    try:
        restored = _together(ranks, "all ranks to take the state over", lambda: restoration.apply_to_objects(undo))
    except BaseException as error:
        stuck = undo.put_back()
        if stuck:
            error.add_note(f"These could not be put back to what they were, so do not go on from here: {stuck}.")
        raise
    try:
        _together(ranks, "all ranks to write the model", restoration.apply_to_model)
    except BaseException as error:
        error.add_note("The checkpoint was loaded in part only, so do not go on from here.")
        raise
    return restored


def _together(ranks: Ranks, what: str, do: Callable[[], T]) -> T:
    """Do something on all ranks; an error of one is an error of all."""
    result, failure = None, None
    try:
        result = do()
    except Exception as error:
        failure = error
    told = ranks.gather(what, "" if failure is None else f"{type(failure).__name__}: {failure}")
    failed = {ranks.shown(rank): text for rank, text in told.items() if text}
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointFailed(f"The checkpoint was not loaded:\n{rank_table(failed)}", min(failed))
    return cast(T, result)


def _notes(restoration: Restoration, model: nn.Module | None, world: int) -> list[str]:
    notes = []
    saved = restoration.reader.manifest.world
    if saved != world:
        notes.append(
            f"it was saved by {saved} ranks and is loaded by {world}: gradients are summed in another order, so bits "
            "may differ from a run that was not interrupted"
        )
    wrapper = None if model is None else wrapper_of(model)
    plan, current = restoration.plan, getattr(wrapper, "plan", None)
    if plan is not None and current is not None and plan.digest != current.digest:
        notes.append(
            "the model lays its gradients out differently from the saved run, so bits may differ; wrap it with "
            "plan=lockstep.checkpoint.plan_of(path)"
        )
    return notes


def plan_of(path: str | os.PathLike[str], *, fallback: bool = False) -> Plan | None:
    """Return the plan that a checkpoint was saved with, to wrap the model with; None if there is none.

    With ``fallback`` a checkpoint that is damaged does not matter: :func:`load` says so, with another one.
    """
    place = require_folder(path)
    try:
        directory = _choose(place, [])
        text = None if directory is None else Reader(directory).shared().get("plan")
    except CheckpointDamaged as damage:
        if not fallback:
            raise
        offer = damage.last_complete or last_complete(place, [])
        text = None if offer is None else Reader(offer).shared().get("plan")
    return Plan.from_json(text) if text else None


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that ``load`` would take from a folder; None if there is none yet."""
    return _choose(require_folder(path), [])


def verify(path: str | os.PathLike[str]) -> None:
    """Verify every byte of a checkpoint, or of the latest one in a folder; raise CheckpointDamaged."""
    directory = _choose(require_folder(path), [])
    if directory is None:
        raise NoCheckpoint(f"There is no checkpoint in {path}.")
    try:
        reader = Reader(directory)
        reader.verify()
        reader.shared()
    except CheckpointDamaged as damage:
        raise _with_offer(damage, directory.parent, [directory]) from None
