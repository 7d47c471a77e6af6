"""All benchmarks that need no GPU, side by side with torch's DDP."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from artifact import artifact
from before import before
from cold_start import cold_start
from compiled import compiled_graphs, compiled_link
from eager import eager_link, eager_step
from import_time import import_time
from memory import memory
from per_parameter import hooks_per_parameter, wrap_time
from ranks import RanksFailed
from shard import shard_cold, shard_link
from stamp import stamp
from watching import watching
from whole_step import whole_step

CASES = {
    "eager_step": eager_step,
    "eager_link": eager_link,
    "compiled_link": compiled_link,
    "compiled_graphs": compiled_graphs,
    "shard_link": shard_link,
    "shard_cold": shard_cold,
    "memory": memory,
    "hooks_per_parameter": hooks_per_parameter,
    "wrap_time": wrap_time,
    "cold_start": cold_start,
    "artifact": artifact,
    "before": before,
    "stamp": stamp,
    "watching": watching,
    "whole_step": whole_step,
    "import_time": import_time,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case alone; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON")
    arguments = parser.parse_args()
    # A terminated run must still remove its namespaces and ranks, so SIGTERM ends it like an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out.mkdir(parents=True, exist_ok=True)

    failed = []
    for name in arguments.only or CASES:
        begin = time.time()
        try:
            result = CASES[name](arguments.quick)
        except RanksFailed as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed.append(name)
            continue
        file = arguments.out / f"{name}.json"
        record = {"case": name, "quick": arguments.quick, "machine": machine(), "result": result}
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.time() - begin:.0f} s, written to {file}\n")
    return 1 if failed else 0


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
