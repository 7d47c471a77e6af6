"""The end of a process whose store stands still: no hang, and no abort when it answers while Python ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from launch.jobs import wait_until
from launching import Launch, write_script
from lockstep.agree.alive import is_standing_still
from multirank.harness import lockstep_only

pytestmark = [pytest.mark.multirank, lockstep_only]

HOST = """
import os, sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with open(f"{sys.argv[1]}/port.partial", "w") as file:
    file.write(str(store.port))
os.rename(f"{sys.argv[1]}/port.partial", f"{sys.argv[1]}/port")
time.sleep(100_000)
"""

# What is made first is freed last: so the note comes when Python has ended its threads, and waits a while there.
RANK = """
import os, sys, time
import torch, torch.distributed as dist
import lockstep

class Last:
    def __del__(self, touch=open, sleep=time.sleep, folder=sys.argv[1], rank=sys.argv[2]):
        touch(f"{folder}/ending-{rank}", "w").close()
        sleep(2)

sys.last_of_all = Last()
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", int(open(f"{folder}/port").read()), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ddp = lockstep.DDP(torch.nn.Linear(4, 2))
for _ in range(3):
    ddp(torch.ones(1, 4)).sum().backward()
open(f"{folder}/ready-{rank}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
time.sleep(1.5)  # the thread that gives signs of life is inside the store by now
"""


def test_a_process_ends_well_while_its_store_stands_still(tmp_path: Path) -> None:
    host = Launch([sys.executable, write_script(tmp_path / "host.py", HOST), tmp_path])
    try:
        wait_until((tmp_path / "port").exists, host)
        rank = write_script(tmp_path / "rank.py", RANK)
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        ranks = [Launch([sys.executable, rank, tmp_path, str(number)], env=env) for number in range(2)]
        wait_until(lambda: all((tmp_path / f"ready-{number}").exists() for number in range(2)), ranks[0])
        host.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_standing_still(host.process.pid), host)
        (tmp_path / "go").touch()
        wait_until(lambda: any((tmp_path / f"ending-{number}").exists() for number in range(2)))
        host.process.send_signal(signal.SIGCONT)
        for launch in ranks:
            done = launch.finish(280)
            assert done.exit_code == 0, done
    finally:
        host.kill()
