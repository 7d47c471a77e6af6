"""Updates bucket by bucket: the bits of one update for all, fewer gradients at once, a reason where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from program.live_bytes import LiveBytes
from program.loops import Mlp, batch_of, loss_of

pytestmark = pytest.mark.usefixtures("world_of_one")
ONE_EACH = 1e-5
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def train(make: Any, by_bucket: bool, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = lockstep.DDP(Mlp(), bucket_cap_mb=ONE_EACH)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    optimizer = make([{"params": weights}, {"params": biases, "lr": 0.05}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = lockstep.TrainStep(
        model, optimizer, loss_of, mode="loop", scheduler=schedule, update_by_bucket=by_bucket, **options
    )
    losses = [step(batch_of(index))[0] for index in range(20)]
    values = [*losses, *(p.detach() for p in model.parameters())]
    values += [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    if step._recipe.average is not None:
        values += step._recipe.average.values
    assert model.step.num_updates == model.step.num_windows == 20
    return values, step


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{}, {"clip_value": 0.01, "average": 0.9}], ids=["plain", "more"])
def test_the_bits_are_those_of_one_update_for_all(name: str, options: dict[str, Any]) -> None:
    right, _ = train(KINDS[name], False, **options)
    found, step = train(KINDS[name], True, **options)
    assert "bucket by bucket" in str(step.explain())
    assert len(right) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert all(p.grad is None for p in step._options.model.parameters())


def test_a_bucket_without_gradients_is_passed_by() -> None:
    """A frozen one, where others are clipped: the bits of one update for all."""
    found = []
    for by_bucket in (False, True):
        torch.manual_seed(0)
        model = lockstep.DDP(Mlp(), bucket_cap_mb=ONE_EACH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode="loop", clip_value=0.01, update_by_bucket=by_bucket)
        for index in range(6):
            model.module.first.weight.requires_grad_(index < 3)
            step(batch_of(index))
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def peak(by_bucket: bool) -> int:
    """Of a step of a model whose gradients are most of what there is."""
    torch.manual_seed(0)
    model = lockstep.DDP(nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)]), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = lockstep.TrainStep(
        model, optimizer, lambda m, x: m(x).square().mean(), mode="loop", update_by_bucket=by_bucket
    )
    x = torch.randn(2, 128)
    with LiveBytes() as live:  # from the first step on: buffers that are kept count, and so does the optimizer's state
        for _ in range(3):
            step(x)
    return live.peak


def test_gradients_need_not_all_exist_at_once() -> None:
    together, by_bucket = peak(False), peak(True)
    gradients = 12 * 129 * 128 * 4
    assert together > 3 * gradients
    assert by_bucket < together - 0.7 * gradients


def test_what_needs_all_gradients_first_says_so() -> None:
    def reason(wrap: Any = lockstep.DDP, make: Any = torch.optim.AdamW, hook: bool = False, **options: Any) -> str:
        model = wrap(Mlp())
        optimizer = make(model.parameters(), lr=0.01)
        if hook:
            optimizer.register_step_post_hook(lambda *_: None)
        step = lockstep.TrainStep(model, optimizer, loss_of, **{"mode": "loop", "update_by_bucket": True, **options})
        step(batch_of(0))
        (note,) = step.explain().notes
        return note

    assert "norm" in reason(clip_norm=1.0)
    assert "scaler" in reason(scaler=torch.amp.GradScaler("cpu"))
    assert "micro-batches" in reason(accumulate=2)
    assert "no one lockstep.DDP" in reason(wrap=lambda m: m)
    assert "hooks look at the steps" in reason(hook=True)
    assert "nonfinite='raise'" in reason(wrap=lambda m: lockstep.DDP(m, nonfinite="raise"))
    assert "kept" in reason(wrap=lambda m: lockstep.DDP(m, gradient_as_bucket_view=True))
    assert "find_unused" in reason(wrap=lambda m: lockstep.DDP(m, find_unused_parameters=True))
    assert "compiled backward" in reason(wrap=lambda m: torch.compile(lockstep.DDP(m), backend="aot_eager"))
    assert "Adafactor" in reason(make=torch.optim.Adafactor)


def test_a_hook_that_comes_later_sees_all_gradients() -> None:
    model = lockstep.DDP(Mlp(), bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, loss_of, mode="loop", update_by_bucket=True)
    step(batch_of(0))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(sum(p.grad is not None for p in model.parameters())))
    step(batch_of(1))
    assert seen == [4]


def test_a_flag_is_a_flag() -> None:
    model = lockstep.DDP(Mlp())
    with pytest.raises(ValueError, match="update_by_bucket must be True or False"):
        lockstep.TrainStep(model, torch.optim.SGD(model.parameters()), loss_of, update_by_bucket=1)
