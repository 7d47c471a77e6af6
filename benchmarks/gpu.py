"""Everything that needs a GPU in one call: gradients first, then step time, peak memory and time in hooks.

    python3 benchmarks/gpu.py --out DIR

One GPU is enough: a world of one on nccl, and two ranks on gloo whose CUDA tensors share it (nccl refuses two
ranks on one GPU). Each part stands alone; what fails is reported and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ranks import RanksFailed, run_ranks
from subjects import (
    ALONE,
    LOCKSTEP_DEFAULT,
    LOCKSTEP_GRID,
    LOCKSTEP_VIEW,
    TORCH_DEFAULT,
    TORCH_GRID,
    TORCH_VIEW,
    lockstep_is_here,
)
from tables import print_table
from timing import Spread, spread_of, summarise

NUM_TINY = 2000
WORLDS = {"world 1, nccl": (1, "nccl"), "world 2, gloo": (2, "gloo")}


def correctness(wrappers: list[str], quick: bool) -> dict[str, Any]:
    from gpu_checks import case_names

    names = case_names()
    results: dict[str, Any] = {}
    for world, (num_ranks, backend) in WORLDS.items():
        results[world] = {wrapper: _all_cases(names, wrapper, num_ranks, backend) for wrapper in wrappers}
        rows = []
        for name in names:
            row = [name]
            for wrapper in wrappers:
                row.append(_verdict(results[world][wrapper].get(name)))
            rows.append(row)
        print_table(
            f"correctness, {world}: largest error of a gradient, relative to that parameter's largest",
            ["case", *wrappers],
            rows,
            "against a single process without a wrapper",
        )
        for wrapper in wrappers:
            for name, entry in results[world][wrapper].items():
                if not entry["ok"]:
                    reason = entry.get("raised") or f"{entry.get('parameter')} off by {entry.get('error')}"
                    print(f"  {wrapper}, {name}: {reason[:300]}")
    return results


def _verdict(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "not run"
    if "raised" in entry:
        return "raised " + entry["raised"].split(":")[0]
    return f"{'ok' if entry['ok'] else 'WRONG'} {entry['error']:.1e}" + (
        "" if entry["ranks_equal"] else " ranks differ"
    )


def _all_cases(names: list[str], wrapper: str, num_ranks: int, backend: str) -> dict[str, Any]:
    """Runs the cases in few sets of ranks: a case that hangs or kills a rank costs a new set."""
    results: dict[str, Any] = {}
    left = list(names)
    for _ in range(4):
        with tempfile.TemporaryDirectory() as progress:
            failure = ""
            try:
                run_ranks(
                    "gpu_checks:check",
                    {"names": left, "wrapper": wrapper, "progress": progress},
                    num_ranks=num_ranks,
                    backend=backend,
                    time_limit=100,
                    group_timeout=20,
                )
            except RanksFailed as error:
                failure = str(error)[-500:]
            for name, entries in _by_case(progress, num_ranks).items():
                if len(entries) == num_ranks:
                    worst = [entry for entry in entries if not entry["ok"]]
                    results[name] = (worst or entries)[0]
        left = [name for name in left if name not in results]
        if not left or not failure:
            break
        results[left[0]] = {"ok": False, "raised": f"rank lost or late: {failure}"}
        left = left[1:]
    return results


def _by_case(progress: str, num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in range(num_ranks):
        file = Path(progress, f"rank{rank}")
        for line in file.read_text().splitlines() if file.exists() else []:
            entry = json.loads(line)
            found.setdefault(entry.pop("case"), []).append(entry)
    return found


def step_time(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = [ALONE, TORCH_DEFAULT, *([TORCH_VIEW] if quick else TORCH_GRID)]
    if "lockstep" in wrappers:
        subjects += [LOCKSTEP_DEFAULT, *([] if quick else LOCKSTEP_GRID)]
    names = [subject.name for subject in subjects]
    options = {"subjects": names, "num_rounds": 4 if quick else 16, "num_steps": 4}
    times = run_ranks("gpu_timing:step_times", options, num_ranks=1, backend="nccl", time_limit=150)[0]
    to_default = summarise(times, TORCH_DEFAULT.name)
    torch_names = [name for name in names if name.startswith("torch")]
    torch_best = min(torch_names, key=lambda name: to_default[name]["ratio"]["median"])
    to_best = summarise(times, torch_best)
    rows = [
        [
            name + (" (torch's best)" if name == torch_best else ""),
            Spread.of([1000 * t for t in times[name]]).text(2),
            spread_of(to_default[name]["ratio"]).text(),
            spread_of(to_best[name]["ratio"]).text(),
        ]
        for name in names
    ]
    print_table(
        "step time, GPT-2 size (124 M), bf16 autocast, batch 8 x 1024, world 1 on nccl",
        ["subject", "ms per step", "ratio to torch default", "ratio to torch best"],
        rows,
    )
    return {
        "torch_best": torch_best,
        "to_torch_default": to_default,
        "to_torch_best": to_best,
        "times": times,
    }


def peak_memory(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = [ALONE, TORCH_DEFAULT, TORCH_VIEW] + [LOCKSTEP_DEFAULT, LOCKSTEP_VIEW] * ("lockstep" in wrappers)
    # A fresh process each: what an earlier subject leaves behind would be taken for this one's.
    peaks = {
        subject.name: run_ranks(
            "gpu_timing:peak_memory", {"subject": subject.name}, num_ranks=1, backend="nccl", time_limit=60
        )[0]
        for subject in subjects
    }
    reference = peaks[TORCH_VIEW.name]
    rows = [[name, f"{peak / 2**30:.3f}", f"{peak / reference:.4f}"] for name, peak in peaks.items()]
    print_table("peak memory, GPT-2 size", ["subject", "GiB", "ratio to torch view"], rows)
    return peaks


def hooks_per_parameter(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = [ALONE, TORCH_DEFAULT, TORCH_VIEW] + [LOCKSTEP_DEFAULT, LOCKSTEP_VIEW] * ("lockstep" in wrappers)
    options = {
        "subjects": [subject.name for subject in subjects],
        "num_rounds": 10 if quick else 40,
        "num_parameters": NUM_TINY,
    }
    times = run_ranks("gpu_timing:hook_times", options, num_ranks=1, backend="nccl", time_limit=100)[0]
    over = {
        name: Spread.of([1e6 * (a - b) / NUM_TINY for a, b in zip(values, times[ALONE.name], strict=True)])
        for name, values in times.items()
        if name != ALONE.name
    }
    rows = [[name, spread.text(2)] for name, spread in over.items()]
    print_table(f"time in hooks, {NUM_TINY} tiny parameters", ["subject", "us per parameter"], rows)
    return {name: spread.json() for name, spread in over.items()}


COMPILED = {"wrapper": "alone", "mode": None, "link": False}


def compiled_gradients(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """Every parameter against the uncompiled module; what compiling alone costs in precision is the yardstick."""
    results: dict[str, Any] = {}
    rows = []
    for world, (num_ranks, backend) in WORLDS.items():
        # Two ranks share the one GPU; CUDA graphs are for a world of one there.
        modes = [None, "reduce-overhead"] if num_ranks == 1 else [None]
        cases = [(mode, autocast, "graph", 64) for mode in modes for autocast in (False, True)]
        cases += [(None, True, overlap, 64) for overlap in ("split", "none")]
        cases += [(None, True, "graph", 9)]  # sizes at which hardly a gradient begins on a round address
        try:
            answers = run_ranks(
                "gpu_compiled:all_gradients", {"cases": cases}, num_ranks=num_ranks, backend=backend, time_limit=250
            )[0]
        except RanksFailed as error:
            answers = [{"ok": False, "raised": str(error)[-800:]}] * len(cases)
        for (mode, autocast, overlap, head_width), found in zip(cases, answers, strict=True):
            dtype, sizes = "bf16 autocast" if autocast else "fp32", "" if head_width == 64 else ", odd sizes"
            name = f"{world}, {mode or 'default'}, {dtype}, {overlap}{sizes}"
            results[name] = found
            worst = found.get("worst") or [found.get("raised", "")[-200:], 0.0, 0.0]
            state = "ok" if found["ok"] else "WRONG"
            rows.append([name, state, str(worst[0]), f"{worst[1]:.1e}", f"{worst[2]:.1e}"])
    columns = ["case", "", "parameter that is off most", "compiled alone", "compiled in lockstep"]
    print_table("compiled gradients, GPT with layer norms: largest relative error", columns, rows)
    return results


def _compiled_times(subjects: dict[str, dict[str, Any]], baseline: str, title: str, quick: bool) -> dict[str, Any]:
    options = {"subjects": subjects, "num_rounds": 5 if quick else 16, "num_steps": 5}
    answer = run_ranks("gpu_compiled:step_times", options, num_ranks=1, backend="nccl", time_limit=280)[0]
    times = answer["times"]
    ratios = summarise(times, baseline)
    rows = [
        [name, Spread.of([1000 * t for t in values]).text(2), spread_of(ratios[name]["ratio"]).text()]
        for name, values in times.items()
    ]
    print_table(title, ["subject", "ms per step", f"over {baseline}"], rows)
    for name, note in answer["notes"].items():
        print(f"{name}:\n{note}")
    return {"ratios": ratios, **answer}


def compiled_step(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = {"compiled alone": COMPILED}
    for wrapper in wrappers:
        subjects[wrapper] = {**COMPILED, "wrapper": wrapper}
        subjects[f"{wrapper}, link of 60 GB/s"] = {**COMPILED, "wrapper": wrapper, "link": True}
    title = "compiled step, GPT-2 size, bf16 autocast, batch 8 x 1024, world 1 (the emulated link takes 8.3 ms)"
    return _compiled_times(subjects, "compiled alone", title, quick)


def compiled_reduce_overhead(wrappers: list[str], quick: bool) -> dict[str, Any]:
    base = {**COMPILED, "mode": "reduce-overhead"}
    subjects = {"compiled alone": base, **{wrapper: {**base, "wrapper": wrapper} for wrapper in wrappers}}
    return _compiled_times(subjects, "compiled alone", 'the same with mode="reduce-overhead"', quick)


def compiled_memory(wrappers: list[str], quick: bool) -> dict[str, Any]:
    names = ["alone", *wrappers]
    peaks = {
        name: run_ranks(
            "gpu_compiled:peak_memory",
            {"subject": {**COMPILED, "wrapper": name}},
            num_ranks=1,
            backend="nccl",
            time_limit=100,
        )[0]
        for name in names
    }
    rows = [[name, f"{peak / 2**30:.3f}", f"{peak / peaks['alone']:.4f}"] for name, peak in peaks.items()]
    print_table("peak memory of compiled steps, GPT-2 size", ["subject", "GiB", "over compiled alone"], rows)
    return peaks


PARTS: dict[str, Callable[[list[str], bool], dict[str, Any]]] = {
    "correctness": correctness,
    "step_time": step_time,
    "peak_memory": peak_memory,
    "hooks_per_parameter": hooks_per_parameter,
    "compiled_gradients": compiled_gradients,
    "compiled_step": compiled_step,
    "compiled_memory": compiled_memory,
    "compiled_reduce_overhead": compiled_reduce_overhead,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for gpu.json")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure", file=sys.stderr)
        return 2
    missing = lockstep_is_here()
    if missing:
        print(f"lockstep is left out: {missing}")
    wrappers = ["torch"] if missing else ["torch", "lockstep"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "parts": {},
    }
    failed = []
    for name in arguments.only or PARTS:
        begin = time.time()
        try:
            record["parts"][name] = PARTS[name](wrappers, arguments.quick)
        except Exception as error:
            failed.append(name)
            record["parts"][name] = {"failed": traceback.format_exc()[-3000:]}
            print(f"{name} failed: {error}", file=sys.stderr)
        print(f"{name}: {time.time() - begin:.0f} s\n", flush=True)
        # Written after every part, so that a run that is cut off keeps what it has.
        (arguments.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
