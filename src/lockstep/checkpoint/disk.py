"""Files and directories, in the only ways a checkpoint touches them.

Writing: a new file only, digested while it is written, on the disk before it counts.  Reading: a regular file only,
never through a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lockstep.checkpoint.moments import Moment, reached
from lockstep.errors import CheckpointDamaged

CHUNK_BYTES = 4 << 20
_LOCK_SECONDS = 10.0


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Digest bytes in memory."""
    return hashlib.sha256(data).hexdigest()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor, which must outlive the view."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")


# ---------------------------------------------------------------- write


class NewFile:
    """A file that did not exist before; ``finish`` returns its size and digest once it is on the disk."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self.path = path
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        with _names(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            reached(Moment.FILE_OPENED, path)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, in chunks."""
        view = memoryview(data)
        with _names(self.path):
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self._digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(self._descriptor, chunk) :]
                done = min(CHUNK_BYTES, len(view) - start)
                self.num_bytes += done
                self._on_bytes(done)
                reached(Moment.BYTES_WRITTEN, self.path)

    def finish(self) -> tuple[int, str]:
        """Wait until the disk has it all."""
        with _names(self.path):
            os.fsync(self._descriptor)
            reached(Moment.FILE_SYNCED, self.path)
        return self.num_bytes, self._digest.hexdigest()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def write_file(path: Path, data: bytes, on_bytes: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """Write a new file and return its size and digest."""
    with NewFile(path, on_bytes) as file:
        file.write(data)
        return file.finish()


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a small file, at once or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        write_file(temporary, data)
        with _names(path):
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory."""
    with _names(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, so that they outlive a loss of power."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory of ours; a link is removed as a link, and nothing else is opened: a pipe would wait."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder while a checkpoint is saved into it; the kernel lets go of it when a process dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(
                        errno.EBUSY, "another process is saving a checkpoint into this folder", str(folder)
                    ) from None
                time.sleep(0.05)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Hold a checkpoint while it is read, so that no save removes it; where it cannot be held it is only read."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_in_use(directory: Path) -> bool:
    """Tell whether someone reads a checkpoint just now."""
    descriptor = None
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def _names(path: Path) -> Iterator[None]:
    """Put the path into an error of the operating system that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# ---------------------------------------------------------------- read


@contextlib.contextmanager
def opened(path: Path, num_bytes: int | None = None) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor; anything else, or another size, is damage."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = {errno.ENOENT: "is missing", errno.ELOOP: "is a symbolic link"}.get(error.errno or 0, error.strerror)
        raise CheckpointDamaged(f"{path} {why}.", file=path) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointDamaged(f"{path} is not a regular file.", file=path)
        if num_bytes is not None and found.st_size != num_bytes:
            raise CheckpointDamaged(f"{path} has {found.st_size:,} bytes, and {num_bytes:,} were written.", file=path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_small(path: Path, most_bytes: int, num_bytes: int | None = None) -> bytes:
    """Read a file that must not be larger than ``most_bytes``."""
    with opened(path, num_bytes) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise CheckpointDamaged(f"{path} has {size:,} bytes; at most {most_bytes:,} make sense.", file=path)
        data = b""
        while chunk := os.read(descriptor, most_bytes + 1):
            data += chunk
    return data


def digest_of_file(path: Path, num_bytes: int) -> str:
    """Digest a file of a known size."""
    digest = hashlib.sha256()
    buffer = bytearray(min(CHUNK_BYTES, max(1, num_bytes)))
    view = memoryview(buffer)
    with opened(path, num_bytes) as descriptor:
        while got := os.readv(descriptor, [buffer]):
            digest.update(view[:got])
    return digest.hexdigest()


def read_into(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill ``view`` from a place in a file."""
    while view:
        got = os.preadv(descriptor, [view[: 1 << 30]], offset)
        if got == 0:
            raise CheckpointDamaged(f"{path} ended while it was read.", file=path)
        view, offset = view[got:], offset + got
