"""The connections of this process to a store, as the kernel knows them: who listens, and how to hang up.

A call to a store has no deadline, and one that comes back while Python ends aborts the process, in torch.  So the
connection is closed under it, which brings it back before.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENS, _CONNECTED = "0A", "01"


def port_of(store: Any) -> int | None:
    """The port of a store that is on the network."""
    address = address_of(store)
    return address[1] if address is not None else None


def address_of(store: Any) -> tuple[str, int] | None:
    """Where a store is that is on the network."""
    for _ in range(8):
        store = getattr(store, "underlying_store", store)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


def listens(port: int | None) -> bool:
    """Whether this process listens on a port; False where this cannot be known."""
    return any(True for _ in _own_sockets(_LISTENS, 1, port))


def hang_up(port: int | None) -> None:
    """End the connections of this process to a port; whoever waits for an answer there gets an error at once."""
    for handle in _own_sockets(_CONNECTED, 2, port):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _own_sockets(state: str, column: int, port: int | None) -> Iterator[int]:
    """The descriptors of this process for sockets in a state, with a port at the near (1) or the far (2) end."""
    if port is None:
        return
    wanted = set()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                row = line.split()
                if row[3] == state and int(row[column].rpartition(":")[2], 16) == port:
                    wanted.add(f"socket:[{row[9]}]")
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd") if wanted else ():
            with contextlib.suppress(OSError):  # the one that lists them is closed by now
                if os.readlink(f"/proc/self/fd/{entry}") in wanted:
                    yield int(entry)
