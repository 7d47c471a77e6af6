"""The file that holds compiled programs: a digest, a manifest, the graphs, the libraries they call.

    lockstep step 1\\n<sha256 of all that follows>\\n<length of the manifest><manifest><content>

It is code, and whoever can change it can run anything in the processes that load it.  So nothing in it is looked at
before the digest was found to be right; that shows a flipped byte or a cut file, and, where the user gives the digest
that he expects, another file than his.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import torch_private

SUFFIX = ".lockstep"
_MAGIC = b"lockstep step 1\n"
_DIGEST_LENGTH = 64
_LENGTH_BYTES = 8


class Refused(Exception):
    """An artifact is not used, for the reason that the message gives."""


@dataclass(frozen=True)
class Artifact:
    """Compiled programs, and what they were compiled for."""

    facts: dict[str, str]  # what differs, as people call it, and its value
    plan: str  # how gradients are laid out, as JSON; empty without a wrapper
    programs: tuple[str, ...]  # the digests of whole steps in it
    graphs: bytes
    libraries: dict[str, bytes]
    digest: str = ""

    def to_bytes(self) -> tuple[bytes, str]:
        """The file, and its digest."""
        lengths = {name: len(library) for name, library in self.libraries.items()}
        manifest = json.dumps(
            {
                "facts": self.facts,
                "plan": self.plan,
                "programs": list(self.programs),
                "graphs": len(self.graphs),
                "libraries": lengths,
            }
        ).encode()
        rest = b"".join(
            [len(manifest).to_bytes(_LENGTH_BYTES, "little"), manifest, self.graphs, *self.libraries.values()]
        )
        digest = hashlib.sha256(rest).hexdigest()
        return b"".join([_MAGIC, digest.encode(), b"\n", rest]), digest

    def write(self, path: Path) -> str:
        """Write the file, whole or not at all; returns its digest."""
        content, digest = self.to_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # as files are; ranks may run under another name
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return digest


def read(path: Path, expected: str | None = None) -> Artifact:
    """The artifact in a file, or ``Refused`` with the reason; nothing of it is unpickled here."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    header = len(_MAGIC) + _DIGEST_LENGTH + 1
    if not content.startswith(_MAGIC):
        raise Refused(f"{path} is not an artifact of this version of Lockstep ({_MAGIC.decode().strip()!r})")
    told = content[len(_MAGIC) : header - 1]
    digest = hashlib.sha256(memoryview(content)[header:]).hexdigest()
    if content[header - 1 : header] != b"\n" or told != digest.encode():
        raise Refused(f"{path} was changed or cut after it was written: its content has the digest {digest[:16]}...")
    if expected is not None and digest != _plain(expected):
        raise Refused(f"{path} has the digest {digest}, and {_plain(expected)} was asked for")
    try:
        return _parse(memoryview(content)[header:], digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} has a manifest that cannot be read: {error}") from error


def _plain(digest: str) -> str:
    return digest.strip().lower().removeprefix("sha256:")


def _parse(rest: memoryview, digest: str) -> Artifact:
    length = int.from_bytes(rest[:_LENGTH_BYTES], "little")
    manifest: dict[str, Any] = json.loads(bytes(rest[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    position = _LENGTH_BYTES + length

    def take(size: int) -> bytes:
        nonlocal position
        part = bytes(rest[position : position + size])
        position += size
        if size < 0 or len(part) != size:
            raise ValueError("a part is missing")
        return part

    graphs = take(int(manifest["graphs"]))
    libraries = {str(name): take(int(size)) for name, size in manifest["libraries"].items()}
    wrong = [name for name in libraries if not torch_private.is_library_name(name)]
    if wrong or position != len(rest):
        raise ValueError(f"a library is called {wrong[0]!r}" if wrong else "there is more than it tells of")
    facts = {str(name): str(value) for name, value in manifest["facts"].items()}
    return Artifact(facts, str(manifest["plan"]), tuple(manifest["programs"]), graphs, libraries, digest)
