"""Two network namespaces joined by a link of a given rate: two hosts on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class LinkNotAllowed(RuntimeError):
    """This machine does not let us make namespaces or shape traffic."""


@dataclass(frozen=True)
class Link:
    prefixes: list[list[str]]
    """Per host, the command to put in front of what shall run there."""
    addresses: list[str]
    interfaces: list[str]

    @property
    def where(self) -> dict[str, Any]:
        """What ``run_ranks`` needs to put a rank on each host."""
        return {
            "prefixes": self.prefixes,
            "master_address": self.addresses[0],
            "environments": [{"GLOO_SOCKET_IFNAME": interface} for interface in self.interfaces],
        }


@contextmanager
def link_between_two_hosts(rate: str = "1gbit") -> Iterator[Link]:
    """The namespaces are removed at the end, whatever happened; the veth pair goes with them."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkNotAllowed(f"the command {tool!r} is not installed (package iproute2)")
    tag = f"ls{os.getpid() % 100000}"
    hosts, interfaces = [f"{tag}a", f"{tag}b"], [f"{tag}va", f"{tag}vb"]
    subnet = f"10.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
    addresses = [f"{subnet}.1", f"{subnet}.2"]
    made: list[str] = []
    try:
        for host in hosts:
            _run("ip", "netns", "add", host)
            made.append(host)
        _run("ip", "link", "add", interfaces[0], "type", "veth", "peer", "name", interfaces[1])
        for host, interface, address in zip(hosts, interfaces, addresses, strict=True):
            inside = ["ip", "netns", "exec", host]
            _run("ip", "link", "set", interface, "netns", host)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", interface, "up")
            # 256 kB of burst: enough for 1 Gbit/s at the kernel's timer, too little to hide a bucket in.
            _run(
                *inside, "tc", "qdisc", "add", "dev", interface, "root",
                "tbf", "rate", rate, "burst", "256kb", "latency", "50ms",
            )  # fmt: skip
        yield Link([["ip", "netns", "exec", host] for host in hosts], addresses, interfaces)
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
        # Only there if we failed before it was moved into a namespace.
        subprocess.run(["ip", "link", "del", interfaces[0]], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkNotAllowed(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
