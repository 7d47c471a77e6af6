"""Updates bucket by bucket on several ranks, and one exchange per step where a program was compared before it began."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._functorch.aot_autograd")
ONE_EACH = 1e-5


def count_exchanges(model: Any) -> list[int]:
    control = model.step.closing.union.control
    start, found = control.start, [0]

    def counted(*args: Any) -> Any:
        found[0] += 1
        return start(*args)

    control.start = counted
    return found


def train_both_ways() -> None:
    import lockstep
    from program.loops import MODELS, batch_of, loss_of

    rank = dist.get_rank()
    for name in ("mlp", "cnn", "gpt"):
        ends = []
        for by_bucket in (False, True):
            torch.manual_seed(0)
            model = lockstep.DDP(MODELS[name](), bucket_cap_mb=ONE_EACH)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            exchanges = count_exchanges(model)
            step = lockstep.TrainStep(model, optimizer, loss_of, mode="loop", update_by_bucket=by_bucket, average=0.9)
            losses = [step(batch_of(index, rank))[0] for index in range(20)]
            assert ("bucket by bucket" in str(step.explain())) is by_bucket
            assert exchanges == [20]
            assert model.step.num_updates == model.step.num_windows == 20
            ends.append([*losses, *(p.detach() for p in model.parameters()), *step._recipe.average.values])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), name


@pytest.mark.parametrize("world", [3])
def test_the_bits_are_those_of_one_update_for_all(world: int) -> None:
    run_ranks(world, train_both_ways)


def update_where_ranks_differ() -> None:
    import lockstep
    from program.loops import Mlp, batch_of, loss_of

    torch.manual_seed(0)
    model = lockstep.DDP(Mlp(), bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, loss_of, mode="loop", update_by_bucket=True)
    step(batch_of(0))
    before = [p.detach().clone() for p in model.parameters()]
    if dist.get_rank() == 1:
        model.module.last.bias.requires_grad_(False)
    try:
        step(batch_of(1))
    finally:
        assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


def test_ranks_that_differ_learn_it_before_anything_is_updated() -> None:
    errors = expect_errors(2, [0, 1], update_where_ranks_differ)
    assert all("last.bias" in errors[rank].text for rank in errors)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def see_nan(mode: str, by_bucket: bool) -> list[str]:
    import lockstep
    from lockstep import torch_private
    from program.loops import Mlp, batch_of, loss_of

    torch_private.compile_program = lambda graph, *_: graph
    handler = Lines()
    logging.getLogger("lockstep").addHandler(handler)
    model = lockstep.DDP(Mlp(), bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exchanges = count_exchanges(model)
    step = lockstep.TrainStep(model, optimizer, loss_of, mode=mode, update_by_bucket=by_bucket)
    for index in range(6):
        batch = batch_of(index)
        if index == 3 and dist.get_rank() == 1:
            batch["x"][0] = float("nan")
        step(batch)
    if mode == "graph":
        assert step.explain().num_program_calls == 5
        # The first walks through the loop, which compares at its end; in the second, which traces, ranks say once more
        # whether they can.
        assert exchanges == [6 + 1 + 1], exchanges
    return [line for line in handler.lines if "NaN" in line]


@pytest.mark.parametrize(("mode", "by_bucket"), [("graph", False), ("loop", True)])
def test_a_nan_is_told_with_the_next_step(mode: str, by_bucket: bool) -> None:
    for lines in run_ranks(2, see_nan, mode, by_bucket, preload=PRELOAD):
        assert len(lines) == 1
        assert "rank(s) [1] were NaN or Inf in step 3," in lines[0]
        assert "first.weight" in lines[0] or "first.bias" in lines[0] or "last" in lines[0]
