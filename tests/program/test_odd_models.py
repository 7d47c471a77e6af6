"""Models of which no program can be made: the reason is a sentence that names the place, and the loop runs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import lockstep
from program.loops import Mlp, assert_close, assert_same, batch_of

HERE = r"\(at test_odd_models\.py:\d+\)"


class Nonzero(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        kept = (x.sum(1) > -100).nonzero().squeeze(1)
        return super().forward(x)[kept]


class Masked(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y.sum(1) == y.sum(1)]


class Equal(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.equal(x, x) else 1)


class ByIdentity(Mlp):
    """Looks a parameter up by its ``id``, which in a trace is that of a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {id(self.first.weight): 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factors[id(self.first.weight)]


class Stopping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        known = [w for w in (self.first.weight,) if type(w) is nn.Parameter]
        return super().forward(x) * (1 + 0 * next(iter(known)).sum())


class Asserting(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return super().forward(x)


class Numpy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.detach().numpy().mean())


class Listing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * len(x.tolist()))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if gradient.abs().max() > 1e9:
            raise ValueError("too large")
        return 2 * x * gradient


class Custom(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(super().forward(x))


def train_both(model: type[nn.Module], num_steps: int) -> tuple[list[dict[str, Tensor]], lockstep.TrainStep]:
    """The losses and the state of a model after the loop, and after mode "graph" with its step."""
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        module = model()
        step = lockstep.TrainStep(
            module, torch.optim.SGD(module.parameters(), lr=0.01), lambda m, b: m(b["x"]).square().mean(), mode=mode
        )
        losses = torch.stack([step(batch_of(index)) for index in range(num_steps)])
        ends.append({"losses": losses, **module.state_dict()})
    return ends, step


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Nonzero, rf"the shape of what nonzero\(\) returns depends on the values of a tensor {HERE}"),
        (Masked, rf"the shape of what \w+\(\) returns depends on the values of a tensor {HERE}"),
        (Equal, rf"needs the value of a tensor while it is traced, for .* {HERE}"),
        (ByIdentity, rf"own code raises KeyError when it is traced with tensors that have no values {HERE}"),
        (Stopping, rf"own code raises StopIteration when it is traced .* {HERE}"),
        (Asserting, rf"own code raises AssertionError.* when it is traced .* {HERE}"),
        (Numpy, rf"needs the value of a tensor.* {HERE}|asks for a number at test_odd_models.py"),
        (Listing, rf"needs the value of a tensor.* {HERE}|asks for a number at test_odd_models.py"),
        (Custom, rf"needs the value of a tensor.* {HERE}"),
    ],
)
def test_the_reason_is_a_sentence_with_a_place(model: type[nn.Module], words: str, uncompiled: None) -> None:
    ends, step = train_both(model, num_steps=4)
    (reason,) = step.explain().reasons
    assert re.search(words, reason), reason
    assert step.explain().num_program_calls == 0
    assert_same(*ends)


class Written(Mlp):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 0.5
        return super().forward(x) * self.total


class Centre(nn.Module):
    """Writes to a buffer that is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, y: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(y.detach().mean(0))
        return (y - self.centre).square().mean()


def test_a_criterion_that_writes_to_its_buffer(uncompiled: None) -> None:
    model, criterion = Mlp(), Centre()
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: criterion(m(b["x"])), mode="graph"
    )
    seen = []
    for index in range(5):
        step(batch_of(index))
        seen.append(criterion.centre.clone())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert step.explain().num_program_calls == 0
    assert any("Centre" in reason for reason in step.explain().reasons), step.explain()


class Nested(Mlp):
    """Its checkpoint runs a backward inside of the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


class Choosing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Written, "the step writes to a tensor that is no buffer of the model (Written)"),
        (Nested, "a checkpoint with use_reentrant=True"),
        (Choosing, ""),
    ],
)
def test_what_a_trace_would_miss_has_the_result_of_the_loop(
    model: type[nn.Module], words: str, uncompiled: None
) -> None:
    ends, step = train_both(model, num_steps=6)
    assert words in " ".join(step.explain().reasons)
    assert "0x" not in str(step.explain())
    assert_close(*ends)
    if words:
        assert_same(*ends)
        assert step.explain().num_program_calls == 0


def test_a_tensor_that_the_loss_adds_to_is_noticed(uncompiled: None) -> None:
    total = torch.zeros(())

    def loss(model: Any, batch: Any) -> Tensor:
        value = model(batch["x"]).square().mean()
        total.add_(value.detach())
        return value

    module = Mlp()
    step = lockstep.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.01), loss, mode="graph")
    losses = [step(batch_of(index)) for index in range(6)]
    torch.testing.assert_close(total, torch.stack(losses).sum())
    assert "no buffer of the model" in step.explain().reasons[0]


def test_the_first_steps_may_all_be_skipped(uncompiled: None) -> None:
    """An optimizer has no state until a scaler lets it step; a program would make it anew in every run."""
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        module = Mlp()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        step = lockstep.TrainStep(
            module, optimizer, lambda m, b: 1e3 * m(b["x"]).square().mean(), scaler=scaler, mode=mode
        )
        for index in range(24):
            step(batch_of(index))
        ends.append({"steps": optimizer.state[module.last.bias]["step"], **module.state_dict()})
    assert 0 < ends[0]["steps"] < 24
    assert step.explain().num_program_calls > 4
    assert_close(*ends)


class Recurrent(nn.Module):
    """A recurrent layer by torch's own function, which no module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(*shape) for shape in ((16, 6), (16, 4), (16,), (16,))])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, start = x.unsqueeze(1), torch.zeros(1, 1, 4)
        return tuple(torch.lstm(x, [start, start], list(self.weights), True, 1, 0.0, True, False, False)[0].unbind(1))


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: nn.LSTM(6, 4), "LSTM is a recurrent layer"), (Recurrent, "a recurrent layer runs by oneDNN")],
)
def test_a_recurrent_layer_runs_by_the_loop(make: Any, words: str, uncompiled: None) -> None:
    def run(mode: str) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = make()
        step = lockstep.TrainStep(model, torch.optim.Adam(model.parameters(), lr=0.1), recurrent_loss, mode=mode)
        for index in range(4):
            step(batch_of(index))
        return [p.detach() for p in model.parameters()], step.explain()

    found, explained = run("graph")
    assert words in " ".join(explained.reasons) or not torch.backends.mkldnn.is_available()
    torch.testing.assert_close(found, run("loop")[0])


def recurrent_loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"])[0], batch["y"])
