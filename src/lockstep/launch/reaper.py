"""A small process that outlives the launcher: when that has gone without a word, it ends what the ranks have started.

Run by path, with the standard library only.  It reads lines: ``watch VARIABLE=FOLDER`` for each attempt, ``forget
VARIABLE=FOLDER`` when its ranks have ended.  At the end of its input the launcher has gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

ROUNDS = 20  # of looking for processes that started others meanwhile


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    watched: list[bytes] = []  # a path may hold what is no text
    for line in sys.stdin.buffer:
        word, _, mark = line.rstrip(b"\n").partition(b" ")
        if word == b"watch":
            watched.append(mark)
        elif mark in watched:
            watched.remove(mark)
    for mark in watched:
        end_all(mark)
        shutil.rmtree(os.path.dirname(mark.partition(b"=")[2]), ignore_errors=True)


def end_all(mark: bytes) -> None:
    for _ in range(ROUNDS):
        found = carriers(mark)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not found:
            return
        time.sleep(0.05)


def carriers(mark: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    main()
