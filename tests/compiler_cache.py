"""Stands in for the C++ compiler in a run of the tests, and keeps what it has made: many tests, and the ranks of each,
hand it the same sources, from caches of Inductor's that are empty on purpose.

``compiler_cache.py COMPILER FOLDER words...`` does what ``COMPILER words...`` does.  What is kept is known by the words
and by what is in the files that they name, wherever those are; a command of another form than Inductor's is passed on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys

SOURCES = (".cpp", ".hpp", ".h")


def key_of(compiler: str, words: list[str]) -> tuple[str, str] | None:
    """What the command makes, by a digest, and where it is to go; None if it is not one source and one output."""
    digest, output, sources = hashlib.sha256(compiler.encode()), "", 0
    following = iter(words)
    for word in following:
        digest.update(b"\0")
        if word == "-o":
            output = next(following, "")
        elif word == "-include":
            digest.update(b"-include" + content_of(next(following, "")))
        elif not word.startswith("-") and word.endswith(SOURCES):
            sources += 1
            digest.update(content_of(word))
        else:
            digest.update(word.encode())
    return (digest.hexdigest(), output) if output and sources == 1 else None


def content_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def hand_out(kept: str, output: str) -> bool:
    """Put what was kept in its place, at once and whole."""
    partial = f"{output}.{os.getpid()}"
    try:
        os.link(kept, partial)
    except OSError:
        return False
    os.replace(partial, output)
    return True


def main() -> int:
    compiler, folder, *words = sys.argv[1:]
    try:
        found = key_of(compiler, words)
    except OSError:
        found = None
    if found is None:
        os.execv(compiler, [compiler, *words])
    key, output = found
    kept = os.path.join(folder, key)
    if hand_out(kept, output):
        return 0
    with contextlib.suppress(OSError):
        os.unlink(output)  # it may be kept by another name, and not every output is written to a new file
    status = subprocess.call([compiler, *words])
    if status == 0:
        with contextlib.suppress(OSError):
            os.link(output, kept)
    return status


if __name__ == "__main__":
    sys.exit(main())
