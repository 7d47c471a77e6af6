"""NaN or Inf on one rank: which rank, which parameters, and the same answer on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import lockstep_only, run_ranks
from multirank.test_waiting import Listener

pytestmark = [pytest.mark.multirank, lockstep_only]

BAD_STEPS = (2, 3, 6)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, spoil: bool) -> torch.Tensor:
        y = self.second(self.first(x))
        if spoil:
            handle = self.first.weight.register_hook(lambda g: g * float("nan"))
            self.handle = handle
        return y


def train(kind: str, policy: str, how: str = "eager") -> dict[str, Any]:
    import lockstep

    torch.manual_seed(0)
    rank = dist.get_rank()
    listener = Listener(lambda message: None)
    model = TwoLayers()
    if kind == "shard":
        wrapped: Any = lockstep.fully_shard(model)
        wrapped.set_nonfinite(policy)
    else:
        wrapped = lockstep.DDP(model, nonfinite=policy)
        if how == "hook":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            wrapped.register_comm_hook(None, allreduce_hook)
    run = torch.compile(wrapped, backend="aot_eager") if how == "compiled" else wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu") if how == "scaler" else None
    raised: list[tuple[int, tuple[int, ...], tuple[str, ...]]] = []
    changed = []
    for number in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        try:
            is_bad = number in BAD_STEPS and rank == 1
            x = torch.full((1, 4), float("nan") if is_bad and how == "compiled" else rank + 1.0)
            loss = run(x, is_bad and how != "compiled").sum()
            (scaler.scale(loss) if scaler is not None else loss).backward()
        except lockstep.errors.NonFinite as error:
            raised.append((number, error.ranks, error.parameters))
            wrapped.reset_sync_window()
            optimizer.zero_grad()
            continue
        finally:
            if hasattr(model, "handle"):
                model.handle.remove()
                del model.handle
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    finite = all(bool(getattr(p, "to_local", lambda p=p: p)().isfinite().all()) for p in model.parameters())
    steps = {state["step"].item() for state in optimizer.state.values()}
    return {"messages": listener.messages, "raised": raised, "changed": changed, "finite": finite, "steps": steps}


@pytest.mark.parametrize("kind", ["replicated", "shard"])
def test_raise_stops_all_ranks_before_the_optimizer(kind: str) -> None:
    for found in run_ranks(3, train, kind, "raise"):
        assert [(number, ranks) for number, ranks, _ in found["raised"]] == [(n, (1,)) for n in BAD_STEPS]
        assert found["finite"]
    names = {name for found in run_ranks(2, train, kind, "raise") for _, _, ns in found["raised"] for name in ns}
    assert names == {"first.weight"}


@pytest.mark.parametrize(
    ("kind", "how"), [("replicated", "eager"), ("replicated", "hook"), ("replicated", "compiled"), ("shard", "eager")]
)
def test_skip_leaves_the_same_steps_out_on_all_ranks(kind: str, how: str) -> None:
    for found in run_ranks(3, train, kind, "skip", how):
        assert found["changed"] == [n not in BAD_STEPS for n in range(8)]
        assert found["finite"]
        assert found["steps"] == {8 - len(BAD_STEPS)}  # momentum and the like were left alone too


def test_warn_says_once_per_episode_who_and_where() -> None:
    first, second, third = run_ranks(3, train, "replicated", "warn")
    for found in (first, second):
        told = [m for m in found["messages"] if "NaN or Inf" in m]
        # Weights that became NaN keep it going, on all ranks: one episode.
        assert len(told) == 1, told
        assert "rank(s) [1]" in told[0]
        assert "step 2" in told[0]
        assert "first.weight" in told[0]
        assert not found["finite"]
    assert not [m for m in third["messages"] if "NaN or Inf" in m]


def test_ignore_does_not_look_and_a_scalers_infinities_are_its_own() -> None:
    for found in run_ranks(2, train, "replicated", "ignore"):
        assert not [m for m in found["messages"] if "NaN or Inf" in m]
        assert not found["finite"]
    for found in run_ranks(2, train, "replicated", "raise", "scaler"):
        assert not found["raised"]
        assert found["finite"]
        assert found["changed"] == [n not in BAD_STEPS for n in range(8)]


def be_slow() -> list[dict[int, float]]:
    """What rank 2 makes the others wait; and again when rank 0 has run out of data, and waits for nobody."""
    from time import sleep

    import lockstep

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def train(ddp: nn.Module, others: list[int]) -> None:
        for number in range(12):
            output = ddp(torch.ones(1, 4))
            if rank == 2:  # slower than the others, however slow they are
                store.wait([f"step {number} of {other}, {len(others)}" for other in others])
                sleep(0.2)
            else:
                store.set(f"step {number} of {rank}, {len(others)}", "")
            output.sum().backward()

    models = [lockstep.DDP(nn.Linear(4, 2)) for _ in range(2)]
    train(models[0], [0, 1])
    with models[1].join():
        if rank:
            train(models[1], [1])
    text = models[0].timeline.to_json()
    assert lockstep.Timeline.from_json(text).stragglers.seconds == models[0].timeline.stragglers.seconds
    return [model.timeline.stragglers.seconds for model in models]


def test_the_rank_that_others_wait_for_is_in_the_timeline() -> None:
    (first, joined), *others = run_ranks(3, be_slow)
    assert max(first, key=first.__getitem__) == 2
    assert first[2] > 1.0  # of about two seconds, whatever else the machine does
    assert all(other == first for other, _ in others)
    assert joined == {}
    for _, seconds in others:
        assert 0 not in seconds
        assert seconds[2] > 1.0
