"""Models of the transformers library in a TrainStep: twenty steps of a program against twenty of the loop."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import lockstep_only, run_ranks

pytestmark = [
    pytest.mark.multirank,
    lockstep_only,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
PRELOAD = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._functorch.aot_autograd", "transformers")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip, schedule, average": {"clip_norm": 0.1, "average": 0.9},
    "accumulate": {"accumulate": 4, "clip_norm": 0.1},
    "scaler": {"scale": 16.0},
}


def loss_of(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def batch_of(index: int, rank: int) -> dict[str, torch.Tensor]:
    from multirank.models import SEQUENCE, VOCABULARY

    generator = torch.Generator().manual_seed(100 * index + rank)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train(model: str, mode: str, option: str) -> tuple[dict[str, torch.Tensor], Any]:
    import lockstep
    from multirank import models

    options = dict(OPTIONS[option])
    scale = options.pop("scale", None)
    torch.manual_seed(0)
    ddp = lockstep.DDP(getattr(models, f"tiny_{model}")())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3) if scale else None
    step = lockstep.TrainStep(ddp, optimizer, loss_of, mode=mode, scheduler=schedule, scaler=scaler, **options)
    num_calls = 20 * options.get("accumulate", 1)
    found = {f"loss {i}": step(batch_of(i, dist.get_rank())) for i in range(num_calls)}
    found |= {name: p.detach().clone() for name, p in ddp.named_parameters()}
    if "average" in options:
        found |= {f"average of {name}": value for name, value in step.averaged_state_dict().items()}
    return found, step


def compare_modes(model: str, names: tuple[str, ...]) -> list[str]:
    from lockstep import torch_private
    from program.loops import assert_close

    torch_private.compile_program = lambda graph, *_: graph
    digests = []
    for name in names:
        right, _ = train(model, "loop", name)
        found, step = train(model, "graph", name)
        explained = step.explain()
        assert not explained.reasons, str(explained)
        assert explained.num_program_calls >= 18 * OPTIONS[name].get("accumulate", 1)
        assert_close(right, found)
        digests += [program.digest for program in step._runner.programs]
    return digests


@pytest.mark.parametrize(
    ("model", "names"),
    [("bert", ("plain", "accumulate")), ("llama", ("clip, schedule, average", "scaler"))],
    ids=["bert", "llama"],
)
def test_a_program_is_close_to_the_loop(model: str, names: tuple[str, ...]) -> None:
    mine, *others = run_ranks(2, compare_modes, model, names, preload=PRELOAD)
    assert all(other == mine for other in others)
