"""What it costs that ranks compare their steps: ``check="step"`` against ``check="off"``.

The model and the method are in ``variants.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from ranks import run_ranks
from subjects import lockstep_ddp, lockstep_is_here
from tables import print_table
from timing import Spread, summarise
from variants import NUM_PARAMETERS, measure_variants, more, scaled

MODES = ("off", "step")


def keyword_is_here() -> str | None:
    """None where the wrapper can be told what to compare, otherwise why it cannot be measured."""
    missing = lockstep_is_here()
    if missing:
        return missing
    if "check" not in inspect.signature(lockstep_ddp()).parameters:
        return "this version of lockstep has no keyword check=, so there is nothing to turn off"
    return None


# In each rank


def measure(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    result, _, _ = measure_variants({mode: {"check": mode} for mode in MODES}, num_rounds, steps_per_block)
    return {**result, "num_parameters": NUM_PARAMETERS}


# In the parent


def stamp(quick: bool) -> dict[str, Any]:
    missing = keyword_is_here()
    if missing:
        print(f"stamp skipped: {missing}")
        return {"skipped": missing}
    results: dict[str, Any] = {}
    rows = []
    for num_ranks in (1, 2, 3):
        options = {"num_rounds": 10 if quick else 60, "steps_per_block": 5}
        ranks = run_ranks("stamp:measure", options, num_ranks=num_ranks, time_limit=900)
        # The step's time is that of the slowest rank, the same number on each; the host's time is each rank's own.
        times, host = ranks[0]["times"], ranks[0]["host_seconds"]
        longer, more_host = more(times, "step", "off"), more(host, "step", "off")
        results[f"world{num_ranks}"] = {
            "to_off": summarise(times, "off"),
            "more_seconds_per_step": longer.json(),
            "more_host_seconds_per_step": more_host.json(),
            "ranks": ranks,
        }
        rows.append(
            [
                str(num_ranks),
                Spread.of([1000 * t for t in times["off"]]).text(2),
                Spread.of([1000 * t for t in times["step"]]).text(2),
                _milliseconds(longer),
                f"{100 * longer.median / Spread.of(times['off']).median:+.2f} %",
                _milliseconds(more_host),
            ]
        )
    print_table(
        f"stamp, eager, gloo, {NUM_PARAMETERS} parameters: what comparing each step costs",
        ["ranks", 'ms per step, check="off"', 'check="step"', "more, ms", "share", "more on rank 0's thread, ms"],
        rows,
        "median [quartiles]; differences are taken within a round; a rank alone has nobody to compare with",
    )
    return results


def _milliseconds(spread: Spread) -> str:
    return scaled(spread, 1000).text()
