"""Faults on a GPU: what is watched, told and dropped there, and what looking for it costs.

    python3 benchmarks/gpu.py --out DIR --only faults

In a world of one on nccl, with the collective forced: a stream that does not reach its collective in time; NaN under
each policy; whether the host runs ahead.  With two ranks on gloo whose CUDA tensors share the GPU: a late rank, one
that is gone.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forcing import force_collective
from gpu_device import BACKEND, DEVICE, IS_GPU, prepare, synchronize
from ranks import RanksFailed, run_ranks
from tables import print_table

STALL = {"LOCKSTEP_STALL_SECONDS": "1", "LOCKSTEP_HEARTBEAT_TIMEOUT": "20"}
SPIN_SECONDS = 25.0


class Listener(logging.Handler):
    """Keeps what the project logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("lockstep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _model(**options: Any) -> Any:
    import lockstep

    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    model = nn.Sequential(*layers).to(DEVICE)
    ddp = lockstep.DDP(model, bucket_cap_mb=1, **options)
    if dist.get_world_size() == 1:
        force_collective(ddp)
    return ddp


def _step(ddp: Any, bad: bool = False) -> None:
    x = torch.ones(4, 512, device=DEVICE) * (float("nan") if bad else 1.0)
    ddp(x).square().mean().backward()


def _spin(seconds: float) -> None:
    """Keep the current stream busy, without the host."""
    if IS_GPU:
        torch.cuda._sleep(int(seconds * 1.7e9))  # cycles; the rate is about right, and need not be


# ---------------------------------------------------------------- a world of one


def stuck_stream() -> dict[str, Any]:
    """A stream that comes to its collective much too late: a warning, then an error, while the host is free."""
    from lockstep.errors import PeerLate

    listener = Listener()
    ddp = _model(late_timeout=6)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        _step(ddp)
        optimizer.step()
    synchronize()
    before = [p.detach().clone() for p in ddp.parameters()]
    _spin(SPIN_SECONDS)
    start = time.monotonic()
    _step(ddp)
    host_seconds = time.monotonic() - start
    watch = ddp.step.reducer.transport.watch
    while watch.verdict is None and time.monotonic() < start + 2 * SPIN_SECONDS:
        time.sleep(0.1)
    raised = ""
    try:
        optimizer.step()
    except PeerLate as error:
        raised = str(error)
    synchronize()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    warned = [m for m in listener.messages if "still waiting" in m]
    return {
        "ok": bool(warned) and "bucket" in raised and "step 3" in raised and unchanged and host_seconds < 3,
        "host seconds of the step": round(host_seconds, 3),
        "warned": warned[:1],
        "raised": raised[:300],
        "weights unchanged": unchanged,
    }


def policies() -> dict[str, Any]:
    """NaN under each policy."""
    from lockstep.errors import NonFinite

    found: dict[str, Any] = {}
    for policy in ("warn", "raise", "skip", "ignore"):
        listener = Listener()
        ddp = _model(nonfinite=policy)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        raised = 0
        for number in range(8):
            try:
                _step(ddp, bad=number == 4)
            except NonFinite:
                raised += 1
                ddp.reset_sync_window()
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            if policy == "warn":
                synchronize()  # so that the warning comes within these few steps
        finite = all(bool(p.isfinite().all()) for p in ddp.parameters())
        told = [m for m in listener.messages if "NaN or Inf" in m]
        logging.getLogger("lockstep").removeHandler(listener)
        found[policy] = {"raised": raised, "told": len(told), "first": told[:1], "finite": finite}
    wanted = {"warn": (0, 1, False), "raise": (1, 0, True), "skip": (0, 1, True), "ignore": (0, 0, False)}
    found["ok"] = all((f["raised"], f["told"], f["finite"]) == wanted[p] for p, f in found.items() if p in wanted)
    return found


def runs_ahead() -> dict[str, Any]:
    """Whether the host goes on while the GPU is behind, with and without looking for NaN."""
    found: dict[str, Any] = {}
    for policy in ("warn", "ignore", "skip"):
        ddp = _model(nonfinite=policy)
        for _ in range(3):
            _step(ddp)
        synchronize()
        _spin(3.0)
        start = time.monotonic()
        _step(ddp)
        found[policy] = round(time.monotonic() - start, 3)
        synchronize()
    found["ok"] = not IS_GPU or (found["warn"] < 1.0 and found["ignore"] < 1.0)
    return found


def cost() -> dict[str, Any]:
    """A step with warn over one with ignore, in turns, at GPT size."""
    import lockstep
    from models import GPT

    options = {"num_symbols": 50304, "context": 1024, "width": 768, "num_layers": 12, "num_heads": 12}
    batch, length = (8, 1024) if IS_GPU else (1, 16)
    if not IS_GPU:
        options = {"num_symbols": 64, "context": 32, "width": 32, "num_layers": 1, "num_heads": 2}
    models = {}
    for policy in ("ignore", "warn", "skip"):
        torch.manual_seed(0)
        models[policy] = lockstep.DDP(GPT(**options).to(DEVICE), nonfinite=policy)
        force_collective(models[policy])
    tokens = torch.randint(options["num_symbols"], (batch, length + 1), device=DEVICE)

    def run(ddp: Any) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(4):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss: Tensor = ddp(tokens)
            loss.backward()
            ddp.zero_grad()
        synchronize()
        return (time.perf_counter() - start) / 4

    for ddp in models.values():
        run(ddp)
    rounds = [{policy: run(ddp) for policy, ddp in models.items()} for _ in range(15 if IS_GPU else 2)]
    answer: dict[str, Any] = {"ok": True, "ms, ignore": round(1e3 * median(r["ignore"] for r in rounds), 2)}
    for policy in ("warn", "skip"):
        ratios = sorted(r[policy] / r["ignore"] for r in rounds)
        quarter = len(ratios) // 4
        answer[f"{policy} over ignore"] = [round(ratios[i], 4) for i in (len(ratios) // 2, quarter, -1 - quarter)]
    return answer


# ---------------------------------------------------------------- two ranks on gloo, CUDA tensors


def late_then_gone(folder: str) -> dict[str, Any]:
    """Rank 1 is late, then ends without a word: the other one says so, in a file, as the run cannot end well."""
    from lockstep.errors import PeerLost

    listener = Listener()
    ddp = _model()
    for _ in range(3):
        _step(ddp)
    if dist.get_rank() == 1:
        time.sleep(5)
    _step(ddp)
    time.sleep(2)
    if dist.get_rank() == 1:
        os._exit(0)
    raised: Any = None
    try:
        _step(ddp)
    except PeerLost as error:
        raised = error
    late = [m for m in listener.messages if "still waiting" in m and "[1]" in m]
    ok = bool(late) and raised is not None and raised.rank == 1 and bool(raised.pid)
    if dist.get_rank() == 0:
        Path(folder, "found").write_text(json.dumps({"ok": ok, "late": late[:1], "raised": str(raised)[:300]}))
    os._exit(0)


WORLD_OF_ONE: dict[str, Callable[[], dict[str, Any]]] = {
    "NaN under each policy": policies,
    "the host runs ahead (seconds of a step behind 3 s of work)": runs_ahead,
    "what looking costs": cost,
    "a stream that does not reach its collective": stuck_stream,  # the last: it aborts the group
}


def check(case: str) -> dict[str, Any]:
    """One case, on one rank of a world of one."""
    prepare()
    answer = WORLD_OF_ONE[case]()
    print("ANSWER", answer, flush=True)
    return answer


def check_two(folder: str) -> dict[str, Any]:
    """The case of two ranks."""
    prepare()
    return late_then_gone(folder)


def faults(wrappers: list[str], quick: bool) -> dict[str, Any]:
    """All of it; ``wrappers`` are not compared here, as torch has none of this."""
    results: dict[str, Any] = {}
    for case in WORLD_OF_ONE:
        if case.startswith("a stream") and not IS_GPU:
            continue
        try:
            (results[case],) = run_ranks(
                "gpu_faults:check", {"case": case}, num_ranks=1, backend=BACKEND, environments=[STALL], time_limit=200
            )
        except RanksFailed as error:
            text = str(error)
            results[case] = {"ok": "ANSWER {'ok': True" in text, "output": text[-1500:]}
    with tempfile.TemporaryDirectory() as folder:
        output = ""
        try:
            run_ranks("gpu_faults:check_two", {"folder": folder}, 2, 120, environments=[STALL, STALL], backend="gloo")
        except (RanksFailed, OSError) as error:
            output = str(error)[-1500:]
        found = Path(folder, "found")
        result = json.loads(found.read_text()) if found.exists() else {"ok": False, "output": output}
    results["two ranks on gloo: a late one, one that is gone"] = result
    print_table(
        "faults on the GPU",
        ["case", "found"],
        [[case, "ok" if found.get("ok") else "WRONG"] for case, found in results.items()],
        "details are in gpu.json",
    )
    for case, found in results.items():
        print(f"  {case}: {found}")
    return results
