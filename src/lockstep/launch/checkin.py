"""Which hosts have come: each says so at the store of the first one, so that a missing one has a name.

Only where hosts are numbered (``--node-rank``, torch's static rendezvous): a rendezvous that numbers them itself knows
how many are missing, and not which.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun

from lockstep.launch.attempt import say

_TRY_SECONDS = 2.0
_TELL_AFTER_SECONDS = 30.0


class HostCheckin:
    """This host among the others; a thread, since torch's launcher waits in the main one."""

    def __init__(self, address: str, port: int, host: int, num_hosts: int, *, is_numbered: bool, wanted: str) -> None:
        self._address, self._port, self._host, self._num_hosts = address, port, host, num_hosts
        self._is_numbered, self._wanted = is_numbered, wanted
        self._stop = threading.Event()
        self._here: dict[int, str] = {}
        self._twice = ""
        self._reached = False
        self._thread = threading.Thread(target=self._run, name="lockstep hosts", daemon=True)

    @classmethod
    def of(cls, args: argparse.Namespace) -> HostCheckin:
        """From the options of the command line."""
        least, most = torchrun.parse_min_max_nnodes(args.nnodes)
        is_numbered = args.rdzv_backend == "static" and most > 1
        endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
        address, _, port = endpoint.rpartition(":")
        wanted = f"{least}" if least == most else f"at least {least}"
        number = int(port) if port.isdecimal() else 29500
        return cls(address or endpoint, number, args.node_rank, most, is_numbered=is_numbered, wanted=wanted)

    def start(self) -> None:
        if self._is_numbered:
            self._thread.start()

    def stop(self) -> None:
        """Stop looking; a thread that is inside of torch when python exits would abort it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10 * _TRY_SECONDS)

    def explain(self) -> str:
        """Say which hosts are missing, or as much as is known; empty where all have come."""
        where = f"{self._address}:{self._port}"
        if not self._is_numbered:
            return f"{self._wanted} host(s) did not come to {where} in time" if self._num_hosts > 1 else ""
        if self._twice:
            return self._twice
        if not self._reached and self._host != 0:
            return f"host 0 (--node-rank 0) does not answer at {where}"
        missing = [host for host in range(self._num_hosts) if host not in self._here]
        if not missing:
            return ""
        here = ", ".join(f"{host} is {name}" for host, name in sorted(self._here.items()))
        return f"host(s) {missing} (--node-rank) of {self._num_hosts} did not come to {where}; {here}"

    def _run(self) -> None:
        began = time.monotonic()
        told = False
        store: Any = None
        while not self._stop.is_set():
            with contextlib.suppress(RuntimeError, OSError):
                if store is None:
                    # Torch prints a page about a store that does not answer; a plain connection says it in silence.
                    socket.create_connection((self._address, self._port), _TRY_SECONDS).close()
                    limit = timedelta(seconds=5 * _TRY_SECONDS)
                    store = TCPStore(self._address, self._port, None, False, limit, wait_for_workers=False)
                self._look(store)
                if len(self._here) == self._num_hosts:
                    return
            if not told and time.monotonic() - began > _TELL_AFTER_SECONDS:
                told = True
                say(f"still waiting: {self.explain()}")
            self._stop.wait(_TRY_SECONDS / 2)

    def _look(self, store: Any) -> None:
        own = f"{socket.gethostname()} (pid {os.getpid()})"
        if not self._reached:
            before = store.compare_set(f"lockstep/hosts/{self._host}", "", own).decode()
            self._reached = True
            if before != own:
                self._twice = f"two hosts say --node-rank {self._host}: {before} and {own}"
                say(self._twice)
        for host in range(self._num_hosts):
            key = f"lockstep/hosts/{host}"
            if host not in self._here and store.check([key]):
                self._here[host] = store.get(key).decode()
