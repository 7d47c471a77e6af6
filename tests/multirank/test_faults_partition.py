"""A cable that is pulled between two hosts: both sides say so at the deadline, and a short break is no fault."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from launching import Finished, Launch, write_script
from multirank.test_two_hosts import Host, ip, two_hosts

__all__ = ["two_hosts"]  # a fixture

# Of a step that takes 16 s and more: on a busy machine word of an arrival takes its time behind such a link.
LATE_S = 10

SCRIPT = """
    import os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch, torch.distributed as dist
    from lockstep import DDP
    from lockstep.agree.pulse import pulse_of_this_process

    rank, folder, width = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    DDP(torch.nn.Linear(2, 2), late_timeout=240)(torch.ones(1, 2)).sum().backward()  # imports what a step needs
    dist.barrier()
    ddp = DDP(torch.nn.Linear(width, width))
    steps = 0
    try:
        while True:
            # Whether it is enough travels in the gradients, so that the program waits for nothing of its own.
            ddp.zero_grad()
            is_enough = (folder / "enough").exists()
            ddp(torch.full((1, width), float(is_enough))).sum().backward()
            steps += 1
            if steps >= 20 and pulse_of_this_process().last_seen(1 - rank) is not None:
                (folder / f"ready{rank}").touch()
            if ddp.module.weight.grad.sum() > 0:
                break
    except Exception as error:
        ranks, text = getattr(error, "ranks", None), str(error).replace("\\n", " | ")
        print("CAUGHT", type(error).__name__, ranks, text, flush=True)
        time.sleep(15)  # the two namespaces see each other's processes: an end would be seen before the deadline
        os._exit(1)
    print("TRAINED", flush=True)
    (folder / f"trained{rank}").touch()
    while not all((folder / f"trained{r}").exists() for r in (0, 1)):
        time.sleep(0.1)  # what this rank has sent is still on its way
    os._exit(0)
"""


def start(hosts: tuple[Host, Host], tmp_path: Path, width: int = 64, **settings: str) -> list[Launch]:
    script = write_script(tmp_path / "train.py", SCRIPT)
    launches = []
    for rank, host in enumerate(hosts):
        env = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": str(rank)}
        env |= {"GLOO_SOCKET_IFNAME": host.interface, "LOCKSTEP_HEARTBEAT_TIMEOUT": "6", "LOCKSTEP_STALL_SECONDS": "2"}
        command = host.command(sys.executable, script, tmp_path, str(width))
        launches.append(Launch(command, env={**env, **settings}))
    deadline = monotonic() + 240
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)) and monotonic() < deadline:
        sleep(0.1)
    return launches


def finish(launches: list[Launch]) -> list[Finished]:
    try:
        return [launch.finish(limit_s=280) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()


@pytest.mark.slow
def test_a_cable_that_is_pulled_is_an_error_on_both_sides(two_hosts: tuple[Host, Host], tmp_path: Path) -> None:
    launches = start(two_hosts, tmp_path)
    ip("-n", two_hosts[1].namespace, "link", "set", two_hosts[1].interface, "down")
    first, second = finish(launches)
    assert "CAUGHT PeerLate (1,)" in first.output, first
    assert "no sign of life" in first.output
    assert "CAUGHT StoreSilent (0,)" in second.output, second
    assert "store is silent" in second.output


@pytest.mark.slow
def test_a_short_break_is_no_fault(two_hosts: tuple[Host, Host], tmp_path: Path) -> None:
    launches = start(
        two_hosts, tmp_path, LOCKSTEP_HEARTBEAT_TIMEOUT="30"
    )  # what was lost is sent again some time later
    ip("-n", two_hosts[1].namespace, "link", "set", two_hosts[1].interface, "down")
    sleep(2)
    ip("-n", two_hosts[1].namespace, "link", "set", two_hosts[1].interface, "up")
    sleep(1)
    (tmp_path / "enough").touch()
    for done in finish(launches):
        assert done.exit_code == 0, done
        assert "TRAINED" in done.output


@pytest.mark.slow
def test_a_slow_link_is_nobodys_fault(two_hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """A step takes longer than any deadline for ranks, and all have arrived: they wait for bytes."""
    limits = {"LOCKSTEP_HEARTBEAT_TIMEOUT": "6", "LOCKSTEP_LATE_TIMEOUT": str(LATE_S)}
    launches = start(two_hosts, tmp_path, width=1000, **limits)
    for host in two_hosts:
        words = ["tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", "tbf"]
        try:
            subprocess.run([*words, "rate", "2mbit", "burst", "16kb", "latency", "100ms"], check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            (tmp_path / "enough").touch()
            finish(launches)
            pytest.skip(f"a slow link needs `tc` with tbf: {error}")
    (tmp_path / "enough").touch()
    for done in finish(launches):
        assert "TRAINED" in done.output, done
        waits = re.findall(r"still waiting in .*, for (\d+) s\. Ranks that have not arrived there: (.*)", done.errors)
        # Early in a step a rank may be named that this machine has let wait, and a store behind such a link is slow to
        # answer; a rank that is late at the deadline would be an error, and nobody may be named from there on.
        overdue = [words for seconds, words in waits if int(seconds) >= LATE_S]
        assert any("none is known to be late" in words for words in overdue), waits
        assert not any(words.startswith("[") for words in overdue), overdue
