"""Two hosts as two network namespaces joined by one cable, a rank on each, through torch's c10d rendezvous.

The namespaces have no other interface than loopback and their end of the cable, so the ranks can only meet
over it, and nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import LOCKSTEP, Launch, write_script

RENDEZVOUS_PORT = 29400  # inside a namespace of our own no port can be taken


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str

    def command(self, *words: str | Path) -> list[str | Path]:
        return ["ip", "netns", "exec", self.namespace, *words]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@pytest.fixture
def two_hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces: there is no `ip` here (package iproute2)")
    if os.geteuid() != 0:
        pytest.skip("two hosts need network namespaces: only root may make them")
    tag = f"{os.getpid() % 100000}"
    hosts = tuple(Host(f"lockstep-{tag}-{i}", f"ls{tag}e{i}", f"10.231.7.{i + 1}") for i in (0, 1))
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.namespace)
            cable = ["link", "add", hosts[0].interface, "netns", hosts[0].namespace, "type", "veth"]
            ip(*cable, "peer", "name", hosts[1].interface, "netns", hosts[1].namespace)
            for host in hosts:
                ip("-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", host.interface)
                ip("-n", host.namespace, "link", "set", host.interface, "up")
                ip("-n", host.namespace, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts need network namespaces, which this machine refuses: {error.stderr.strip()}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=60)


SCRIPT = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def interfaces():
        lines = open("/proc/net/dev").read().splitlines()[2:]
        rows = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
        return {name: int(row[8]) for name, row in rows.items()}  # bytes sent

    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(rank)  # ranks begin with different weights; wrapping makes them equal
    model = DistributedDataParallel(torch.nn.Linear(300, 300, bias=False), bucket_cap_mb=0.1)
    before = interfaces()
    model(torch.full((1, 300), float(rank + 1))).sum().backward()
    dist.barrier()
    sent = {name: count - before[name] for name, count in interfaces().items()}
    sys.stdout.write(json.dumps({
        "rank": rank,
        "world": dist.get_world_size(),
        "host": os.environ["GROUP_RANK"],
        "local_rank": os.environ["LOCAL_RANK"],
        "namespace": os.readlink("/proc/self/ns/net"),
        "sent": sent,
        "class": type(model).__module__,
        "gradient": sorted(set(model.module.weight.grad.flatten().tolist())),
        "weight": model.module.weight.sum().item(),
    }) + "\\n")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_on_each_of_two_hosts(two_hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", SCRIPT)
    launches = []
    for host in two_hosts:
        words = [*LOCKSTEP, "run", "--nnodes", "2", "--nproc", "1", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"{two_hosts[0].address}:{RENDEZVOUS_PORT}", "--rdzv-id", "two-hosts"]
        # Both namespaces have the machine's one host name, so each host says its address itself.
        words += ["--rdzv-conf", f"is_host={int(host is two_hosts[0])}", "--local-addr", host.address]
        launches.append(Launch(host.command(*words, script), env={"GLOO_SOCKET_IFNAME": host.interface}))
    try:
        finished = [launch.finish(limit_s=250) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    for done in finished:
        assert done.exit_code == 0, done
    facts = [json.loads(done.lines[-1]) for done in finished]

    assert sorted(fact["rank"] for fact in facts) == [0, 1]
    assert sorted(fact["host"] for fact in facts) == ["0", "1"]
    assert {fact["local_rank"] for fact in facts} == {"0"}
    assert {fact["world"] for fact in facts} == {2}
    assert {fact["class"] for fact in facts} == {"lockstep.ddp"}
    assert [fact["gradient"] for fact in facts] == [[1.5], [1.5]]  # the mean of 1 and 2
    assert facts[0]["weight"] == facts[1]["weight"]
    assert facts[0]["namespace"] != facts[1]["namespace"]
    for host, fact in zip(two_hosts, facts, strict=True):
        assert set(fact["sent"]) == {"lo", host.interface}
        # 300 x 300 floats are 360 kB, of which a rank of two sends at least half over the cable.
        assert fact["sent"][host.interface] > 180_000
