"""Artifacts: made of what a step has compiled, and loaded by all ranks or by none.

[Note: all or none]  Each rank reads and checks its file by itself: another version of torch, another model, a flipped
byte on one host's disk.  What it found goes with the comparison of the first call, in which all ranks take part
anyway.  Only if every rank has the same artifact and nothing against it do they load it; otherwise all compile, and
each says why.  So ranks never run programs of different origin because one of them could not read a file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import errors, settings, torch_private
from lockstep.plan import Plan
from lockstep.program import artifact as files
from lockstep.program.artifact import Artifact, Refused
from lockstep.program.facts import differences
from lockstep.program.parts import Parallel

logger = logging.getLogger("lockstep")

_READY = "ready "
_num_steps = 0


@dataclass(frozen=True)
class Source:
    """Where a user said that an artifact is."""

    path: Path
    digest: str | None = None


def source_for_next_step() -> Source | None:
    """What the environment says of the next step of this process: they are numbered as they are made."""
    global _num_steps
    number, _num_steps = _num_steps, _num_steps + 1
    folder = settings.artifacts()
    return None if folder is None else Source(folder / file_name(number))


def file_name(number: int) -> str:
    """What the artifact of the n-th step of a program is called in a folder."""
    return f"step-{number}{files.SUFFIX}"


class Loading:
    """One step's way to its artifact, if it was given one."""

    def __init__(self, source: Source | None, parallel: Parallel) -> None:
        self._source = source
        self._parallel = parallel
        self._artifact: Artifact | None = None
        self._why = ""
        self._before = {"found": 0, "compiled": 0}
        self.is_loaded = False

    @property
    def is_wanted(self) -> bool:
        """Whether the user gave an artifact."""
        return self._source is not None

    def look(self, facts: Mapping[str, str]) -> str:
        """Read and check the file; returns what this rank has to say of it to the others."""
        if self._source is None:
            return ""
        try:
            self._artifact = self._checked(files.read(self._source.path, self._source.digest), dict(facts))
            return _READY + self._artifact.digest
        except (Refused, ValueError, KeyError, TypeError) as refused:  # a plan of another version, too
            self._artifact, self._why = None, str(refused) or type(refused).__name__
            return self._why

    def _checked(self, artifact: Artifact, facts: dict[str, str]) -> Artifact:
        found = differences(artifact.facts, facts)
        if found:
            raise Refused("it was made for something else; " + "; ".join(found))
        why = torch_private.why_nothing_is_kept() or self._why_not_its_plan(artifact)
        if why:
            raise Refused(why)
        return artifact

    def _why_not_its_plan(self, artifact: Artifact) -> str:
        for wrapper in self._parallel.wrappers:
            if not artifact.plan:
                return "it has no plan for a wrapped model"
            plan = Plan.from_json(artifact.plan)
            if plan.digest == wrapper.plan.digest:
                continue
            if not wrapper._parts.compilation.sizes_are_open:
                return "its plan has other buckets than the plan= or bucket_cap_mb= given here"
            if set(plan.parameters) != set(wrapper.plan.parameters):
                return "its plan is for other parameters"
            if wrapper.step.num_windows:
                return "its plan has other buckets, and this model has trained already"
        return ""

    def decide(self, told: Mapping[int, str]) -> str:
        """Load the artifact if all ranks can; returns a line for people, empty where nobody was given one."""
        words = dict(told) or {0: _READY + self._artifact.digest if self._artifact is not None else self._why}
        if not any(words.values()):
            return ""
        where = self._source.path if self._source is not None else "an artifact"
        ready = {word for word in words.values() if word.startswith(_READY)}
        if len(ready) == 1 and ready == set(words.values()):
            return self._load(str(where))
        return _refuse(str(where), words)

    def _load(self, where: str) -> str:
        artifact = self._artifact
        assert artifact is not None
        for wrapper in self._parallel.wrappers:
            wrapper._parts.compilation.keep(Plan.from_json(artifact.plan))
        self._before = torch_private.compile_counts()
        try:
            num_graphs = torch_private.load_compiled(artifact.graphs, artifact.libraries)
        except (OSError, ValueError) as error:
            text = f"the artifact {where} could not be put into the compiler's cache here: {error}"
            logger.warning("%s; this rank compiles, the others do not.", text)
            return text
        self.is_loaded = True
        return f"artifact {where} (sha256 {artifact.digest[:16]}..., {num_graphs} graphs) was loaded"

    def shown(self) -> str:
        """What came of the artifact so far: empty if there is none."""
        if not self.is_loaded:
            return ""
        now = torch_private.compile_counts()
        since = {name: now[name] - self._before[name] for name in now}
        return f"since it was loaded: {since['found']} graphs found, {since['compiled']} compiled here"


def _refuse(where: str, words: Mapping[int, str]) -> str:
    """Say why no rank loads it."""
    shown = {
        rank: word or "was given no artifact"
        for rank, word in words.items()
        if not word.startswith(_READY) or len({w for w in words.values() if w.startswith(_READY)}) > 1
    }
    table = next(iter(shown.values())) if len(set(shown.values())) == 1 and len(shown) == len(words) else ""
    text = f"the artifact {where} is not used: " + (table or "\n" + errors.rank_table(shown))
    logger.warning("%s\nAll ranks compile, as without it.", text)
    return text


def make(facts: dict[str, str], parallel: Parallel, programs: Sequence[str]) -> Artifact:
    """An artifact of all that this process has compiled."""
    graphs, num_graphs = torch_private.save_compiled()
    if not num_graphs:
        why = torch_private.why_nothing_is_kept() or "run at least two windows of batches first"
        raise RuntimeError(f"Nothing was compiled that could be saved: {why}. step.explain() says what runs.")
    plan = parallel.wrappers[0].plan.to_json() if parallel.wrappers else ""
    return Artifact(facts, plan, tuple(programs), graphs, torch_private.compiled_libraries())


_DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}")


def check_digest(digest: Any) -> str | None:
    """The digest that a user expects, or an error that says how one looks."""
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest.strip())):
        raise ValueError(f"digest must be the 64 hexadecimal digits that step.save returned, got {digest!r}.")
    return digest
