"""How much longer ``import torch, lockstep`` takes than ``import torch``: new processes, interleaved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from subjects import ROOT
from tables import print_table
from timing import Spread, interleave, spread_of, summarise

STATEMENTS = {"import torch": "import torch", "import torch, lockstep": "import torch, lockstep"}
BASELINE = "import torch"
# The clock runs inside the process: starting Python is in neither number.
PROGRAM = "from time import perf_counter\nbegin = perf_counter()\n{}\nprint(perf_counter() - begin)\n"


def _timed(statement: str) -> Callable[[], float]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", PROGRAM.format(statement)]

    def once() -> float:
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{statement}` failed:\n{done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])

    return once


def import_time(quick: bool) -> dict[str, Any]:
    runs = {name: _timed(statement) for name, statement in STATEMENTS.items()}
    for run in runs.values():
        run()  # the first one fills the disk's cache, and writes the compiled files
    times = interleave(runs, 3 if quick else 15)
    summary = summarise(times, BASELINE)
    more = Spread.of([a - b for a, b in zip(times["import torch, lockstep"], times[BASELINE], strict=True)])
    rows = [
        [name, spread_of(entry["seconds"]).text(2), spread_of(entry["ratio"]).text(3)]
        for name, entry in summary.items()
    ]
    rows.append(["lockstep itself", more.text(2), ""])
    print_table(
        "import_time",
        ["statement", "s", f"ratio to {BASELINE}"],
        rows,
        "median [quartiles] of new processes; differences and ratios within a round",
    )
    return {"summary": summary, "more_seconds": more.json(), "times": times}
