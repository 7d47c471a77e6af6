"""What all checks together cost: comparing steps, looking for NaN, and a sign of life each second.

    python3 benchmarks/watching.py [--quick]

The model and the method are in ``variants.py``: the same wrapper with everything turned off that can be, with the
search for NaN alone, and as it is by default take turns in the same ranks.  What is compared is the time in which a
rank's own thread was busy, round by round and between the shortest rounds.  On a machine that does other work such a
difference is lost in the spread of whole steps; so what the checks' own calls take is also added up, call by call,
without what reading the clock takes (a call of the system, two dozen times per step).  That, as the median over blocks
of steps (weights are not looked at in each of them), is held against the budget, 1 % of a step of 20 ms.  A sign of
life is made many times in a row by the thread that makes it once a second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from ranks import run_ranks
from tables import print_table
from timing import Spread, summarise
from variants import NUM_PARAMETERS, least_more, measure_variants, more, scaled

VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"check": "off", "nonfinite": "ignore"},
    "nonfinite": {"check": "off", "nonfinite": "warn"},
    "all": {},
}
NUM_SIGNS = 200
NUM_INSIDE, STEPS_INSIDE = 300, 4
STEP_SECONDS, BUDGET = 0.020, 0.01


def measure(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    """In each rank."""
    result, models, steps_of = measure_variants(VARIANTS, num_rounds, steps_per_block)
    pulse = models["all"].step.reducer.transport.watch.pulse

    def many_signs(store: Any) -> float:
        begin = time.thread_time()
        for _ in range(NUM_SIGNS):
            pulse._self.take_turn(store)
        return (time.thread_time() - begin) / NUM_SIGNS

    return {
        **result,
        "inside_seconds": seconds_inside(steps_of["all"], NUM_INSIDE),
        "sign_seconds": pulse.line.ask(many_signs, 120.0),
    }


def seconds_inside(steps: Callable[[int], None], num_steps: int) -> list[float]:
    """In each rank: what this thread spends in the checks' own calls per step, by block of steps."""
    from lockstep.agree.stamp import Stamp
    from lockstep.engine import step_guard
    from lockstep.engine.closing import Closing
    from lockstep.engine.drift import Drift
    from lockstep.engine.nonfinite import Finiteness

    calls = (
        *((Finiteness, name) for name in ("open", "look", "mark")),
        *((Drift, name) for name in ("look_before_forward", "open", "words", "judge")),
        (step_guard, "_note_settings"),
        (Closing, "_stamp"),
        (Stamp, "digest"),
    )
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                end = time.thread_time()
                # Less what it takes to read this clock, which is a call of the system; it is read once more to know.
                spent[0] += (end - begin) - (time.thread_time() - end)

        return run

    def one_block(_: int) -> float:
        spent[0] = 0.0
        steps(STEPS_INSIDE)
        return spent[0] / STEPS_INSIDE

    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        return list(map(one_block, range(num_steps // STEPS_INSIDE)))


def watching(quick: bool) -> dict[str, Any]:
    """In the parent."""
    results: dict[str, Any] = {}
    rows = []
    for num_ranks in (2, 3):
        options = {"num_rounds": 15 if quick else 100, "steps_per_block": 3}
        ranks = run_ranks("watching:measure", options, num_ranks=num_ranks, time_limit=900)
        times = ranks[0]["times"]
        per_rank = [more(rank["host_seconds"], "all", "nothing") for rank in ranks]
        dearest = max(per_rank, key=lambda spread: spread.median)
        search = more(ranks[0]["host_seconds"], "nonfinite", "nothing")
        sign = max(rank["sign_seconds"] for rank in ranks)
        least = max(least_more(rank["host_seconds"], "all", "nothing") for rank in ranks)
        inside = max((Spread.of(rank["inside_seconds"]) for rank in ranks), key=lambda spread: spread.median)
        share = inside.median / STEP_SECONDS + sign
        results[f"world{num_ranks}"] = {
            "to_nothing": summarise(times, "nothing"),
            "more_host_seconds": dearest.json(),
            "least_more_host_seconds": least,
            "inside_seconds": inside.json(),
            "sign_seconds": sign,
            "share": share,
            "ranks": ranks,
        }
        rows.append(
            [
                str(num_ranks),
                scaled(Spread.of(times["nothing"]), 1000).text(2),
                Spread.of([a / n for a, n in zip(times["all"], times["nothing"], strict=True)]).text(3),
                scaled(search, 1e6).text(0),
                scaled(dearest, 1e6).text(0),
                f"{1e6 * least:.0f}",
                scaled(inside, 1e6).text(0),
                f"{1e6 * sign:.0f}",
                f"{100 * share:.2f} % ({'within' if share <= BUDGET else 'OVER'} {100 * BUDGET:g} %)",
            ]
        )
    print_table(
        f"watching, eager, gloo, {NUM_PARAMETERS} parameters: what all checks cost",
        [
            "ranks",
            "ms, all off",
            "default over it",
            "NaN, us",
            "all, us",
            "shortest, us",
            "inside, us",
            "sign, us/s",
            f"of {1000 * STEP_SECONDS:.0f} ms",
        ],
        rows,
        "median [quartiles] of differences and ratios within a round, us of the dearest rank's own thread (NaN: of "
        "rank 0's); quartiles on both sides of 0 are a tie; sign: a thread's time each second",
    )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    shown = ("to_nothing", "more_host_seconds", "least_more_host_seconds", "inside_seconds", "sign_seconds", "share")
    results = watching(parser.parse_args().quick)
    print(json.dumps({key: {name: value[name] for name in shown} for key, value in results.items()}))
