"""Everything that needs a GPU in one call: gradients first, then step time, peak memory, time in hooks and on the host.

    python3 benchmarks/gpu.py --out DIR              # about 8 minutes
    python3 benchmarks/gpu.py --out DIR --only NAME  # one part; may be repeated

One GPU is enough: a world of one on nccl, and two ranks on gloo whose CUDA tensors share it (nccl refuses two
ranks on one GPU). A world of one sends nothing and Lockstep then skips the collective, which torch never does; so it
is also measured with the collective forced. Each part stands alone; what fails is reported and the rest goes on.

``--cpu`` runs the same code with a tiny model where there is no GPU: it shows that it runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from before import DEFAULT_REVISION, NoSuchRevision, importable
from gpu_device import BACKEND, IS_GPU
from gpu_faults import faults
from ranks import RanksFailed, run_ranks
from subjects import (
    ALONE,
    BEFORE_FOLDER,
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
from turns import run_in_turns

NUM_TINY = 2000 if IS_GPU else 50
FORCED = ", collective forced"
WORLDS = {  # name: (number of ranks, backend, whether the collective is forced)
    f"world 1, {BACKEND}": (1, BACKEND, False),
    f"world 1, {BACKEND}{FORCED}": (1, BACKEND, True),
    "world 2, gloo": (2, "gloo", False),
}
# Nothing here is timed by the clock on the wall, so what is independent runs side by side.
NUM_SIDE_BY_SIDE = 6


def _side_by_side(jobs: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    with ThreadPoolExecutor(NUM_SIDE_BY_SIDE) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
    return {name: future.result() for name, future in futures.items()}


def correctness(wrappers: list[str], quick: bool) -> dict[str, Any]:
    from gpu_checks import case_names

    names = case_names()
    # torch always calls its collective: there is nothing to force.
    pairs = [(world, w) for world, (_, _, forced) in WORLDS.items() for w in wrappers if not (forced and w == "torch")]
    found = _side_by_side({(world, w): lambda w=w, x=world: _all_cases(names, w, *WORLDS[x]) for world, w in pairs})
    results: dict[str, Any] = {world: {w: found[world, w] for x, w in pairs if x == world} for world in WORLDS}
    for world, by_wrapper in results.items():
        rows = [[name, *(_verdict(by_wrapper[wrapper].get(name)) for wrapper in by_wrapper)] for name in names]
        print_table(
            f"correctness, {world}: largest error of a gradient, relative to that parameter's largest",
            ["case", *by_wrapper],
            rows,
            "against a single process without a wrapper",
        )
        for wrapper, entries in by_wrapper.items():
            for name, entry in entries.items():
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


def _all_cases(names: list[str], wrapper: str, num_ranks: int, backend: str, forced: bool) -> dict[str, Any]:
    """Runs the cases in few sets of ranks: a case that hangs or kills a rank costs a new set."""
    results: dict[str, Any] = {}
    left = list(names)
    for _ in range(4):
        with tempfile.TemporaryDirectory() as progress:
            failure = ""
            try:
                run_ranks(
                    "gpu_checks:check",
                    {"names": left, "wrapper": wrapper, "progress": progress, "forced": forced},
                    num_ranks=num_ranks,
                    backend=backend,
                    time_limit=150,
                    group_timeout=40,
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
        subjects += [LOCKSTEP_DEFAULT, *([] if quick else LOCKSTEP_GRID[:2])]
    names = [subject.name for subject in subjects]
    if "lockstep" in wrappers:
        names.append(LOCKSTEP_DEFAULT.name + FORCED)
    options = {"subjects": names, "num_rounds": 4 if quick else 16, "num_steps": 4}
    times = run_ranks("gpu_timing:step_times", options, num_ranks=1, backend=BACKEND, time_limit=150)[0]
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
    """Eager and compiled, plain, with the collective forced, and with torch's own all-reduce as a comm hook."""
    eager: dict[str, dict[str, Any]] = {ALONE.name: {}, TORCH_DEFAULT.name: {}, TORCH_VIEW.name: {}}
    compiled: dict[str, dict[str, Any]] = {"alone": {}}
    changes = {"": {}, ", allreduce_hook": {"hook": True}, FORCED: {"forced": True}}
    for wrapper in wrappers:
        for mark, change in changes.items():
            if wrapper == "torch" and mark == FORCED:
                continue
            compiled[wrapper + mark] = {"wrapper": wrapper, **change}
            default = TORCH_DEFAULT if wrapper == "torch" else LOCKSTEP_DEFAULT
            eager[default.name + mark] = {"subject": default.name, **change}
    if "lockstep" in wrappers:
        eager[LOCKSTEP_VIEW.name] = {}
    # A fresh process each: what an earlier subject leaves behind would be taken for this one's.
    where = {"num_ranks": 1, "backend": BACKEND, "time_limit": 200}
    jobs: dict[Any, Callable[[], Any]] = {}
    for name, own in eager.items():
        options = {"subject": name, **own}
        jobs["eager", name] = lambda o=options: run_ranks("gpu_timing:peak_memory", o, **where)[0]
    for name, own in compiled.items():
        subject = {"wrapper": name, **own}
        jobs["compiled", name] = lambda o={"subject": subject}: run_ranks("gpu_compiled:peak_memory", o, **where)[0]
    found = _side_by_side(jobs)
    peaks = {kind: {name: peak for (k, name), peak in found.items() if k == kind} for kind in ("eager", "compiled")}
    for kind, alone in (("eager", ALONE.name), ("compiled", "alone")):
        torchs = {name.removeprefix("torch default").removeprefix("torch"): p for name, p in peaks[kind].items()}
        rows = []
        for name, peak in peaks[kind].items():
            mark = next((m for m in changes if m and name.endswith(m)), "")
            same = torchs.get(mark if mark != FORCED else "", 0)  # torch's of the same kind; it is always forced
            ratio = f"{peak / same:.4f}" if same else ""
            rows.append([name, f"{peak / 2**30:.3f}", f"{peak / peaks[kind][alone]:.4f}", ratio])
        columns = ["subject", "GiB", "over alone", "over torch's default of the same kind"]
        print_table(f"peak memory, GPT-2 size, {kind}", columns, rows, "the target is at most 1 in the last column")
    return peaks


def hooks_per_parameter(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = [ALONE, TORCH_DEFAULT, TORCH_VIEW] + [LOCKSTEP_DEFAULT, LOCKSTEP_VIEW] * ("lockstep" in wrappers)
    options = {
        "subjects": [subject.name for subject in subjects],
        "num_rounds": 10 if quick else 40,
        "num_parameters": NUM_TINY,
    }
    times = run_ranks("gpu_timing:hook_times", options, num_ranks=1, backend=BACKEND, time_limit=100)[0]
    over = {
        name: Spread.of([1e6 * (a - b) / NUM_TINY for a, b in zip(values, times[ALONE.name], strict=True)])
        for name, values in times.items()
        if name != ALONE.name
    }
    rows = [[name, spread.text(2)] for name, spread in over.items()]
    print_table(f"time in hooks, {NUM_TINY} tiny parameters", ["subject", "us per parameter"], rows)
    return {name: spread.json() for name, spread in over.items()}


COMPILED: dict[str, Any] = {"wrapper": "alone"}


def compiled_gradients(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """Every parameter against the uncompiled module; what compiling alone costs in precision is the yardstick."""

    def cases_of(world: str) -> list[tuple[str | None, bool, str, int]]:
        if not IS_GPU:
            return [(None, False, "graph", 9)]  # compiling for a CPU takes long, and shows nothing more
        # Two ranks share the one GPU; CUDA graphs are for a world of one there.
        modes = [None, "reduce-overhead"] if WORLDS[world][0] == 1 else [None]
        cases = [(mode, autocast, "graph", 64) for mode in modes for autocast in (False, True)]
        cases += [(None, True, overlap, 64) for overlap in ("split", "none")]
        return [*cases, (None, True, "graph", 9)]  # sizes at which hardly a gradient begins on a round address

    def run(world: str) -> list[dict[str, Any]]:
        num_ranks, backend, forced = WORLDS[world]
        options = {"cases": cases_of(world), "forced": forced}
        try:
            return run_ranks("gpu_compiled:all_gradients", options, num_ranks, backend=backend, time_limit=300)[0]
        except RanksFailed as error:
            return [{"ok": False, "raised": str(error)[:200] + str(error)[-800:]}] * len(cases_of(world))

    results: dict[str, Any] = {}
    rows = []
    for world, answers in _side_by_side({world: lambda x=world: run(x) for world in WORLDS}).items():
        for (mode, autocast, overlap, head_width), found in zip(cases_of(world), answers, strict=True):
            dtype, sizes = "bf16 autocast" if autocast else "fp32", "" if head_width == 64 else ", odd sizes"
            name = f"{world}, {mode or 'default'}, {dtype}, {overlap}{sizes}"
            results[name] = found
            worst = found.get("worst") or [(found.get("raised", "").strip().splitlines() or [""])[0][-80:], 0.0, 0.0]
            state = "ok" if found["ok"] else "FAILED" if "raised" in found else "WRONG"
            rows.append([name, state, str(worst[0]), f"{worst[1]:.1e}", f"{worst[2]:.1e}"])
    columns = ["case", "", "worst parameter", "alone", "in lockstep"]
    print_table("compiled gradients, GPT with layer norms: largest relative error", columns, rows)
    return results


def _compiled_times(
    subjects: dict[str, dict[str, Any]], title: str, quick: bool, with_host: bool = False
) -> dict[str, Any]:
    baseline = "compiled alone"
    options = {"subjects": subjects, "num_rounds": 5 if quick else 16, "num_steps": 5, "with_host": with_host}
    answer = run_ranks("gpu_compiled:step_times", options, num_ranks=1, backend=BACKEND, time_limit=280)[0]
    times = answer["times"]
    ratios = summarise(times, baseline)
    rows = [
        [name, Spread.of([1000 * t for t in values]).text(2), spread_of(ratios[name]["ratio"]).text()]
        for name, values in times.items()
    ]
    print_table(title, ["subject", "ms per step", f"over {baseline}"], rows)
    results = {"ratios": ratios, **answer}
    if with_host:
        host = answer["host_times"]
        results["host_ratios"] = summarise(host, baseline)
        rows = []
        for name, values in host.items():
            more = Spread.of([1e6 * (mine - base) for mine, base in zip(values, host[baseline], strict=True)])
            ratio = spread_of(results["host_ratios"][name]["ratio"]).text()
            rows.append([name, Spread.of([1000 * t for t in values]).text(3), more.text(0), ratio])
        columns = ["subject", "ms on the host", "more than alone, us", f"over {baseline}"]
        print_table("what the host takes to issue a compiled forward and backward", columns, rows)
    for name, note in answer["notes"].items():
        print(f"{name}:\n{note}")
    return results


def compiled_step(wrappers: list[str], quick: bool) -> dict[str, Any]:
    subjects = {"compiled alone": COMPILED}
    for wrapper in wrappers:
        subjects[wrapper] = {**COMPILED, "wrapper": wrapper}
        if wrapper == "lockstep":
            subjects[wrapper + FORCED] = {**COMPILED, "wrapper": wrapper, "forced": True}
        if IS_GPU:
            subjects[f"{wrapper}, link of 60 GB/s"] = {**COMPILED, "wrapper": wrapper, "link": True}
    title = "compiled step, GPT-2 size, bf16 autocast, batch 8 x 1024, world 1 (the emulated link takes 8.3 ms)"
    return _compiled_times(subjects, title, quick, with_host=True)


def compiled_reduce_overhead(wrappers: list[str], quick: bool) -> dict[str, Any]:
    base = {**COMPILED, "mode": "reduce-overhead"}
    subjects = {"compiled alone": base, **{wrapper: {**base, "wrapper": wrapper} for wrapper in wrappers}}
    if "lockstep" in wrappers:
        subjects["lockstep" + FORCED] = {**base, "wrapper": "lockstep", "forced": True}
    return _compiled_times(subjects, 'the same with mode="reduce-overhead"', quick)


def before(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """This version over an earlier one, the collective forced in both; torch beside them."""
    from gpu_before import KINDS

    subjects = ["torch", "before", "lockstep"]
    options = {"num_rounds": 5 if quick else 16, "num_steps": 5}
    try:
        with importable(DEFAULT_REVISION) as revision:
            answers = run_in_turns(
                "gpu_before:measure", options, subjects, num_ranks=1, backend=BACKEND, time_limit=280
            )
    except NoSuchRevision as reason:
        print(f"before skipped: {reason}")
        return {"skipped": str(reason)}
    results: dict[str, Any] = {"revision": revision}
    rows = []
    for kind in KINDS:
        times = {subject: answers[subject][kind] for subject in subjects}
        results[kind] = {"times": times, "to_before": summarise(times, "before"), "to_torch": summarise(times, "torch")}
        for subject in subjects:
            rows.append(
                [
                    f"{kind}, {subject}",
                    Spread.of([1000 * t for t in times[subject]]).text(2),
                    spread_of(results[kind]["to_before"][subject]["ratio"]).text(),
                    spread_of(results[kind]["to_torch"][subject]["ratio"]).text(),
                ]
            )
    title = f"this version against {revision}, GPT-2 size, world 1, the collective forced"
    print_table(title, ["", "ms", "over before", "over torch"], rows)
    return results


def shard(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """Sharded training next to FSDP2: gradients, step, peak memory."""
    from gpu_shard import SUBJECTS

    one = {"num_ranks": 1, "backend": BACKEND, "time_limit": 280}
    two = {"num_ranks": 2, "backend": "gloo", "time_limit": 280}
    jobs: dict[Any, Callable[[], Any]] = {}
    for world, where in (("world 1", one), ("world 2, gloo", two)):
        for compiled in (False, True):
            for low in (False, True):
                key = f"gradients, {world}, {'compiled' if compiled else 'eager'}, {'bf16' if low else 'fp32'}"
                options = {"compiled": compiled, "low": low}
                jobs[key] = lambda o=options, w=where: run_ranks("gpu_shard:gradients", o, **w)[0]
    for name in SUBJECTS:
        jobs[f"memory, {name}"] = lambda n=name: run_ranks("gpu_shard:peak_memory", {"name": n}, **one)[0]
    found: dict[str, Any] = {}
    for key, value in _side_by_side({key: partial(_or_error, job) for key, job in jobs.items()}).items():
        found[key] = value
    rows = [[key, str(value)] for key, value in found.items()]
    print_table("sharded: largest relative error of a gradient, and peak bytes", ["", ""], rows, "")
    options = {"num_rounds": 4 if quick else 12, "num_steps": 4}
    timed = run_ranks("gpu_shard:step_times", options, **one)[0]
    ratios = summarise(timed["times"], "FSDP2 eager") if "FSDP2 eager" in timed["times"] else {}
    rows = [
        [name, f"{1000 * entry['seconds']['median']:.2f} ms", spread_of(entry["ratio"]).text()]
        for name, entry in ratios.items()
    ]
    rows += [[name, "failed", why] for name, why in timed["failed"].items()]
    print_table("sharded: step", ["subject", "step", "over FSDP2 eager"], rows, "bf16 gathers, fp32 reduction")
    return {"found": found, "step": ratios, **timed}


def shard_link(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """Sharded training behind an emulated link, next to max(compute, communication)."""
    options = {"num_rounds": 4 if quick else 12, "num_steps": 4}
    found = run_ranks("gpu_shard:link_times", options, num_ranks=1, backend=BACKEND, time_limit=280)[0]
    rows, over = [], {}
    for name, seconds in found["link_seconds"].items():
        best = [max(compute, seconds) for compute in found["times"]["compute"]]
        over[name] = Spread.of([mine / ideal for mine, ideal in zip(found["times"][name], best, strict=True)])
        step = 1000 * Spread.of(found["times"][name]).median
        rows.append([name, f"{step:.2f} ms", f"{1000 * seconds:.2f} ms", over[name].text()])
    rows.append(["compiled, not sharded", f"{1000 * Spread.of(found['times']['compute']).median:.2f} ms", "", ""])
    columns = ["subject", "step", "link alone", "over max(compute, link)"]
    print_table("sharded, a link of 60 GB/s emulated for gathers and scatters", columns, rows, "")
    return {**found, "over_ideal": {name: spread.json() for name, spread in over.items()}}


def shard_two_ranks(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """Peak memory of two ranks that share the GPU over gloo, and first steps with an empty compiler cache."""
    from gpu_shard import SUBJECTS

    two = {"num_ranks": 2, "backend": "gloo", "time_limit": 280}
    # gloo cannot be captured
    names = [name for name, options in SUBJECTS.items() if "captured" not in options and options["subject"] != "none"]
    memory = {
        name: _or_error(lambda n=name: run_ranks("gpu_shard:peak_memory_of_two", {"name": n}, **two)) for name in names
    }
    cold = {name: _or_error(partial(_cold_step, name)) for name in names if name != "FSDP2 eager"}
    rows = [[f"peak of each rank, {name}", str(value)] for name, value in memory.items()]
    rows += [[f"first and second step, {name}", str(value)] for name, value in cold.items()]
    print_table("sharded: two ranks on one GPU (gloo, batch 2), and cold steps in a world of one", ["", ""], rows, "")
    return {"memory": memory, "cold": cold}


def _cold_step(name: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="cold-step-") as cache:
        environments = [{"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}]
        where: dict[str, Any] = {"num_ranks": 1, "backend": BACKEND, "time_limit": 280}
        return run_ranks("gpu_shard:cold_step", {"name": name}, environments=environments, **where)[0]


def program(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """TrainStep: parameters after 20 steps against a loop by hand, then the step times of two GPTs, and peak memory."""
    from gpu_program import CASES, GRAPH_CASES, MEMORY_ONLY, SUBJECTS

    one = {"num_ranks": 1, "backend": BACKEND}
    results: dict[str, Any] = {"checks": []}
    names = list(CASES)
    parts = [("captured", names[0::2]), ("captured", names[1::2]), ("graph", list(GRAPH_CASES))]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, f"part{index}")) for index in range(len(parts))]
        jobs: dict[Any, Callable[[], Any]] = {}
        for (mode, members), file in zip(parts, files, strict=True):
            options = {"names": members, "mode": mode, "progress": file}
            jobs[file] = partial(
                _or_error, lambda o=options: run_ranks("gpu_program:check", o, **one, time_limit=170)[0]
            )
        for file, failure in _side_by_side(jobs).items():
            if failure is not None:
                print(f"a part of the checks broke: {failure}")
            lines = Path(file).read_text().splitlines() if Path(file).exists() else []
            results["checks"] += [json.loads(line) for line in lines]
    rows = []
    for entry in results["checks"]:
        worst = entry.get("worst", ["", 0.0])
        state = "ok" if entry["ok"] else "RAISED" if "raised" in entry else "WRONG"
        differ = f"{entry.get('different', '')} of {entry.get('of', '')}"
        rows.append([f"{entry['mode']}: {entry['case']}", state, differ, f"{worst[1]:.1e} {worst[0]}"])
    title = "TrainStep after 20 steps against a loop by hand: parameters, buffers, averages, losses"
    print_table(title, ["case", "", "not the same bits", "largest relative error"], rows)
    for entry in results["checks"]:
        if not entry["ok"]:
            print(f"{entry['mode']}: {entry['case']}:\n{entry.get('trace') or entry.get('explained', '')}\n")
    sys.stdout.flush()
    for size in ("22 M", "191 M"):
        options = {
            "size": size,
            "names": [name for name in SUBJECTS if name not in MEMORY_ONLY],
            "num_rounds": 4 if quick else 12,
            "num_steps": 20 if size == "22 M" else 5,
        }
        answer = _or_error(lambda o=options: run_ranks("gpu_program:times", o, **one, time_limit=170)[0])
        results[size] = answer
        if isinstance(answer, str):
            print(f"times of {size}: {answer}")
            continue
        base = "reduce-overhead alone" if size == "22 M" else "compiled alone"
        ratios = summarise(answer["times"], base) if base in answer["times"] else {}
        rows = [
            [
                name,
                Spread.of([1000 * t for t in values]).text(3),
                f"{1000 * sorted(answer['host_times'][name])[1]:.3f}",
                spread_of(ratios[name]["ratio"]).text() if ratios else "",
            ]
            for name, values in answer["times"].items()
        ]
        answer["ratios"] = ratios
        print_table(
            f"step of a GPT of {size}, bf16 autocast", ["subject", "ms", "ms on the host", f"over {base}"], rows
        )
        for name, text in [*answer["notes"].items(), *answer["failed"].items()]:
            print(f"{name}: {text}")
        sys.stdout.flush()
    jobs = {
        name: partial(
            _or_error,
            lambda n=name: run_ranks("gpu_program:peak_memory", {"size": "191 M", "name": n}, **one, time_limit=120)[0],
        )
        for name in (
            "compiled alone",
            "lockstep compiled",
            "lockstep captured",
            "lockstep eager captured",
            *MEMORY_ONLY,
        )
    }
    results["peaks"] = _side_by_side(jobs)
    print(f"peak memory of 191 M: {results['peaks']}")
    return results


def _or_error(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-600:]}"


PARTS: dict[str, Callable[[list[str], bool], dict[str, Any]]] = {
    "correctness": correctness,
    "step_time": step_time,
    "peak_memory": peak_memory,
    "shard": shard,
    "shard_link": shard_link,
    "shard_two_ranks": shard_two_ranks,
    "hooks_per_parameter": hooks_per_parameter,
    "compiled_gradients": compiled_gradients,
    "compiled_step": compiled_step,
    "compiled_reduce_overhead": compiled_reduce_overhead,
    "faults": faults,
    "before": before,
    "program": program,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for gpu.json")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part alone; may be repeated")
    parser.add_argument("--wrapper", action="append", choices=["torch", "lockstep"], help="this one alone")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--before", type=Path, help="folder that before.py --export wrote; else git is asked")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without a GPU: shows that it runs")
    arguments = parser.parse_args()
    if not IS_GPU and not arguments.cpu:
        print("no CUDA device here: nothing to measure (--cpu tries the code)", file=sys.stderr)
        return 2
    if arguments.before:
        os.environ[BEFORE_FOLDER] = str(arguments.before.resolve())
    if not IS_GPU:
        print("no GPU: a CPU and a tiny model stand in, whatever the titles say; no number below means anything\n")
    begin_all = time.time()
    missing = lockstep_is_here()
    if missing:
        print(f"lockstep is left out: {missing}")
    wrappers = ["torch"] if missing else arguments.wrapper or ["torch", "lockstep"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if IS_GPU else "none: a CPU, no measurement",
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
    print(f"all: {time.time() - begin_all:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
