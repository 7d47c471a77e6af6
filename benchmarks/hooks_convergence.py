"""What compression costs in loss and saves in bytes: the demo's GPT on the demo's text, once per hook.

Every run starts from the same weights and sees the same batches; only the hook differs. The loss is that of
text the model was not trained on, after the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ranks import run_ranks
from subjects import ROOT, Subject, lockstep_hooks
from tables import print_table

NO_HOOK = "none"
HOOKS = (NO_HOOK, "bf16", "int8", "topk 0.1", "topk 0.01")


# In each rank


def train(hook: str, wrapper: str, num_steps: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import DATA, GPT

    symbols = sorted(set(DATA.read_text()))
    codes = {symbol: code for code, symbol in enumerate(symbols)}
    text = torch.tensor([codes[symbol] for symbol in DATA.read_text()])
    split = int(0.9 * len(text))
    length, batch_size = 64, 8

    def batch(part: torch.Tensor, seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(part) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
        windows = torch.stack([part[start : start + length + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]

    torch.manual_seed(0)
    module = GPT(len(symbols), length, width=96, num_layers=3, num_heads=4)
    model = Subject(wrapper, wrapper, {"bucket_cap_mb": 0.25}).wrap(module)
    state = _register(model, hook)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    # Up for a twentieth of the run, then down along a cosine to a tenth, as a real run does.
    num_warm = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / num_warm) * (0.55 + 0.45 * math.cos(math.pi * step / num_steps)),
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(num_steps):
        loss = model(*batch(text[:split], step * num_ranks + rank, batch_size))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    with torch.no_grad():
        held_out = float(module(*batch(text[split:], 10**6, 64)))
    num_parameters = sum(p.numel() for p in module.parameters())
    plain_bytes = num_steps * 2 * (num_ranks - 1) * num_parameters * 4 // num_ranks
    return {
        "losses": losses,
        "held_out_loss": held_out,
        "bytes_on_wire": state.bytes_on_wire if state else plain_bytes,
        "bytes_uncompressed": state.bytes_uncompressed if state else plain_bytes,
        "residual_bytes": getattr(state, "residual_bytes", 0),
        "num_parameters": num_parameters,
        "weights_digest": _digest(module),
    }


def _register(model: Any, hook: str) -> Any:
    hooks = lockstep_hooks()
    if hook == NO_HOOK:
        return None
    kind, *ratio = hook.split()
    state, function = {
        "bf16": lambda: (hooks.Bf16State(), hooks.bf16_hook),
        "int8": lambda: (hooks.Int8State(), hooks.int8_hook),
        "topk": lambda: (hooks.TopKState(ratio=float(ratio[0])), hooks.topk_hook),
    }[kind]()
    model.register_comm_hook(state, function)
    return state


def _digest(module: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


# In the parent


def compare(wrapper: str, num_steps: int, num_ranks: int, hooks: tuple[str, ...] = HOOKS) -> dict[str, Any]:
    results = {}
    for hook in hooks:
        begin = time.perf_counter()
        ranks = run_ranks(
            "hooks_convergence:train",
            {"hook": hook, "wrapper": wrapper, "num_steps": num_steps},
            num_ranks=num_ranks,
        )
        digests = {rank["weights_digest"] for rank in ranks}
        results[hook] = {**ranks[0], "ranks_equal": len(digests) == 1, "seconds": time.perf_counter() - begin}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrapper", choices=["lockstep", "torch"], default="lockstep")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--hooks", nargs="+", choices=HOOKS, default=HOOKS, help=f"always with {NO_HOOK!r}, before them"
    )
    parser.add_argument("--json", type=Path, help="write everything, with all losses, to this file")
    arguments = parser.parse_args()
    hooks = (NO_HOOK, *(hook for hook in arguments.hooks if hook != NO_HOOK))
    results = compare(arguments.wrapper, arguments.steps, arguments.ranks, hooks)
    plain = results[NO_HOOK]
    rows = [
        [
            hook,
            f"{result['held_out_loss']:.4f}",
            f"{100 * (result['held_out_loss'] / plain['held_out_loss'] - 1):+.2f} %",
            f"{result['bytes_on_wire'] / arguments.steps / 2**10:.1f}",
            f"{result['bytes_uncompressed'] / result['bytes_on_wire']:.2f}",
            f"{result['residual_bytes'] / 2**10:.0f}",
            "yes" if result["ranks_equal"] else "NO",
        ]
        for hook, result in results.items()
    ]
    print_table(
        f"{plain['num_parameters']} parameters, {arguments.ranks} ranks, {arguments.steps} steps, {arguments.wrapper}",
        [
            "hook",
            "held-out loss",
            "against none",
            "KiB sent per step",
            "times fewer bytes",
            "residual KiB",
            "ranks equal",
        ],
        rows,
        "bytes are what one rank sends, by formula",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
