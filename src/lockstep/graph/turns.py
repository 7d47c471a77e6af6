"""Ranks that compile the same graph take turns: one compiles, the others find its work in Inductor's cache.

Without it the ranks of a host all compile at the same time, and take its cores from each other.

A turn is a lock on one byte of a file in the cache directory, and what is compiled says which byte: ranks that compile
something else, or cache elsewhere, do not meet.  It is a POSIX lock, which the kernel takes from a process that ends
and which a forked child does not have.  Turns are a courtesy, so no wait for one may cost more than it can save:

    - Who has waited keeps no lock.  The work is in the cache now; if it is not, the first one failed, and all compile.
    - Who has a turn, or waits for one, does not wait for another: compilations inside of one, and other threads.
    - Where Inductor runs collectives while it compiles, ranks have to compile at the same time.
    - Whatever else the first one may wait for, a peer among it, is waited for until the deadline only.  It is shorter
      than the time that collectives have by default.
    - Where there are no locks (Windows, some network file systems, a directory that cannot be written) nobody waits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, TypeVar

from lockstep import settings, torch_private
from lockstep.agree.alive import is_standing_still

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("lockstep")

T = TypeVar("T")
_busy = threading.Lock()
_STOPPED_SECONDS = 2.0  # one that is stopped for a moment is waited for


def take_turn(graph: Any, compile: Callable[[], T]) -> T:
    """What ``compile`` returns for ``graph``: called after another process that is compiling it, if there is one."""
    directory = torch_private.inductor_cache_directory()
    if directory is None or torch_private.inductor_meets_ranks() or not torch_private.inductor_can_cache(graph):
        return compile()
    return in_turn(directory, torch_private.inductor_input(graph), compile)


def in_turn(directory: str, what: str, compile: Callable[[], T]) -> T:
    """Call ``compile`` when no other process that shares ``directory`` is at ``what``."""
    if fcntl is None or not _busy.acquire(blocking=False):
        return compile()
    file = None
    try:
        try:
            file = os.open(os.path.join(directory, "lockstep.lock"), os.O_RDWR | os.O_CREAT, 0o666)
            _lock(file, int.from_bytes(hashlib.blake2b(what.encode(), digest_size=3).digest()))
        except OSError as error:
            logger.debug("No turns to compile in %s: %s", directory, error)
        return compile()
    finally:
        if file is not None:
            os.close(file)  # and the lock goes with it
        _busy.release()


def _lock(file: int, byte: int) -> None:
    """Lock this byte; if another process has it, only wait until that one is done."""
    begin = monotonic()
    limit = settings.compile_timeout()
    waited = 0.0
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            break
        except BlockingIOError:
            if not waited:
                logger.info("waiting for another process that compiles the same graph")
        waited = monotonic() - begin
        if waited >= _STOPPED_SECONDS and is_standing_still(_holder(file, byte)):
            logger.warning("Compiling what another process was compiling when it was stopped (SIGSTOP, a debugger).")
            return
        if waited >= limit:
            logger.warning("Compiling what another process has been compiling for %.0f s.", waited)
            return
        sleep(min(0.05 + waited / 20, 1.0, limit - waited))
    if waited:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def _holder(file: int, byte: int) -> int:
    """The process that has locked this byte; 0 where this is not known."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return 0
    form = "hhqqi0q"  # type, from where, start, length, process
    asked = struct.pack(form, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        kind, *_, pid = struct.unpack(form, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except (OSError, struct.error):
        return 0
    return 0 if kind == fcntl.F_UNLCK else int(pid)
