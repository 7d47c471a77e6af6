"""The store that the launcher has: where it listens, and what does not take it away."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.jobs import RUN, train, wait_for_first_step
from launching import free_port, run_command, write_script
from lockstep.launch.store import HostedStore, NoLoopback, PortTaken

LISTEN = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(pids: set[int]) -> set[tuple[int, str, int]]:
    """(process, address, port) of every socket on which one of these processes accepts connections."""
    owners = {}
    for pid in pids:
        try:
            entries = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it has ended
        for entry in entries:
            try:
                target = str(entry.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                owners[target[8:-1]] = pid
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == LISTEN and words[9] in owners:
                found.add((owners[words[9]], address, int(port, 16)))
    return found


@pytest.mark.multirank
def test_a_job_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    launch = train(tmp_path)
    try:
        wait_for_first_step(tmp_path, launch)
        sockets = listening(set(launch._marked()))
        assert sockets
        assert {address for _, address, _ in sockets} <= LOOPBACK, sockets
        assert [pid for pid, _, _ in sockets].count(launch.process.pid) == 1  # the store, and it is the launcher's
    finally:
        launch.kill()
        launch.process.communicate()


def test_the_store_serves_clients_and_goes_when_it_is_closed() -> None:
    store = HostedStore()
    client = dist.TCPStore(store.address, store.port, None, False, wait_for_workers=False)
    client.set("key", "value")
    assert client.get("key") == b"value"
    port = store.port
    del client
    store.close()
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) != 0


def test_two_stores_share_nothing() -> None:
    first, second = HostedStore(), HostedStore()
    for store, value in ((first, "1"), (second, "2")):
        dist.TCPStore(store.address, store.port, None, False, wait_for_workers=False).set("key", value)
    reader = dist.TCPStore(first.address, first.port, None, False, wait_for_workers=False)
    assert reader.get("key") == b"1"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port}"):
            HostedStore(port)
        script = write_script(tmp_path / "train.py", "print('hello')\n")
        done = run_command([*RUN, "--master-port", str(port), script])
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in done.errors


@pytest.mark.multirank
@pytest.mark.parametrize("option", [[], ["--no-install"]])
def test_ranks_use_the_port_that_was_asked_for(tmp_path: Path, option: list[str]) -> None:
    port = free_port()
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        sys.stdout.write(os.environ["MASTER_PORT"] + "\\n")
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    done = run_command([*RUN, *option, "--nproc", "2", "--master-port", str(port), script])
    assert done.exit_code == 0, done
    assert done.lines == [str(port)] * 2


@pytest.mark.multirank
def test_a_program_may_make_its_group_again(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import sys
        import torch
        import torch.distributed as dist
        for number in range(3):
            dist.init_process_group()
            value = torch.tensor([dist.get_rank() + 1.0 + number])
            dist.all_reduce(value)
            sys.stdout.write(f"{value.item()}\\n")
            dist.barrier()
            dist.destroy_process_group()
        """,
    )
    done = run_command([*RUN, "--nproc", "2", script])
    assert done.exit_code == 0, done
    assert sorted(done.lines) == ["3.0", "3.0", "5.0", "5.0", "7.0", "7.0"]


def test_a_host_without_loopback_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(NoLoopback, match=r"127\.0\.0\.1 \(.*Network is unreachable\); is the loopback interface up"):
        HostedStore()
