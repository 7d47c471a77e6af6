"""The store of one attempt, in the launcher's process: no rank that dies or is stopped takes it along.

Torch binds a store to every interface of the host; a socket that is bound beforehand and handed over listens where it
was told to.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 1024
_REACH_SECONDS = 60.0  # for one that is only busy


class PortTaken(Exception):
    """The port that was asked for belongs to someone else."""


class NoLoopback(Exception):
    """Processes of this host cannot reach each other; the message says so, in a line."""


class HostedStore:
    """A store that listens on loopback only; ``port`` says where."""

    def __init__(self, port: int = 0) -> None:
        _require_reachable()
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, port))
        except OSError as error:
            listening.close()
            raise PortTaken(f"port {port} of {LOOPBACK} cannot be used: {error.strerror}") from error
        listening.listen(_BACKLOG)
        self.port: int = listening.getsockname()[1]
        self.address = LOOPBACK
        self._store: Any = TCPStore(
            LOOPBACK,
            self.port,
            None,
            True,
            _TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def close(self) -> None:
        """Stop listening; what the ranks of this attempt wrote is gone with it."""
        self._store = None


def _require_reachable() -> None:
    """Raise where the loopback interface is down, as in a sandbox without a network: torch would try for minutes."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listening:
            socket.create_connection(listening.getsockname(), _REACH_SECONDS).close()
    except OSError as error:
        raise NoLoopback(
            f"processes of this host cannot reach each other at {LOOPBACK} ({error}); is the loopback interface up "
            "(ip link set lo up)?"
        ) from error
