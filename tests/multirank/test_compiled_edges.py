"""Compiled models where something else happens: other compiled code inside, a second model, a detour, an error.

As in test_compiled_features.py, a compiled wrapped model trains next to its twin, the plain module on the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from multirank.harness import inductor_cache, lockstep_only, run_ranks
from multirank.models import MLP, squared_error
from multirank.test_compiled_features import DTYPE, MODES, ONE_EACH, PRELOAD, VIEWS, Pair

pytestmark = [pytest.mark.multirank, lockstep_only]


# ---------------------------------------------------------------- flex_attention, compiled on its own


class Attends(nn.Module):
    """What it attends to is detached: on the CPU, torch 2.13 has no backward for flex_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 6 * 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(6 * 16, 3)
        self.attend: Callable[..., Tensor] = flex_attention

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(torch.tanh(self.lift(x)).unflatten(1, (6, 16)))
        q = h.detach().unflatten(-1, (2, -1)).transpose(1, 2)
        h = h + self.attend(q, q, q, score_mod=nearer_is_better).transpose(1, 2).flatten(2)
        return self.head(torch.tanh(h).flatten(1))


def nearer_is_better(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - (query - key).abs()


def train_with_flex(way: str, hows: list[str | None], overlaps: list[str | None], dtype: torch.dtype) -> None:
    for how in hows:
        for overlap in overlaps:
            torch._dynamo.reset()
            pair = Pair(Attends, way, bucket_cap_mb=ONE_EACH, overlap=overlap, dtype=dtype)
            if how is not None:
                pair.module.attend = torch.compile(flex_attention, backend=how)
            is_launched = way == "wrap_then_compile" and overlap != "split"
            pair.steps(4).require_delivered(4 if is_launched else 0)


@pytest.mark.parametrize(
    ("hows", "overlaps"),
    [
        ([None, "aot_eager"], [None, "split"]),  # None: torch compiles it all the same, by its backend "eager"
        pytest.param(["eager"], [None, "graph", "split"], marks=pytest.mark.soak),
        pytest.param([None, "aot_eager"], ["graph"], marks=pytest.mark.soak),
    ],
)
def test_flex_attention_compiled_in_an_uncompiled_model(hows: list[str | None], overlaps: list[str | None]) -> None:
    run_ranks(2, train_with_flex, "left", hows, overlaps, DTYPE, preload=PRELOAD)


def test_flex_attention_compiled_on_its_own_in_a_compiled_model() -> None:
    hows, overlaps = ["eager", "aot_eager"], [None, "split"]
    run_ranks(2, train_with_flex, "wrap_then_compile", hows, overlaps, DTYPE, preload=PRELOAD)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("left", marks=pytest.mark.soak), "wrap_then_compile"])
def test_flex_attention_compiled_by_inductor(way: str) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": inductor_cache(), "LOCKSTEP_TEST_COMPILER": "inductor"}
    run_ranks(2, train_with_flex, way, ["inductor"], [None], torch.float32, env=env, preload=PRELOAD, limit_s=500)


# ---------------------------------------------------------------- two models in one loss


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, y: Tensor) -> Tensor:
        return self.layers(y)


def both_together(make: Any, judge: Any, batch: Any) -> None:
    made = make(batch["x"])
    (judge(made).mean() + (made - batch["y"]).pow(2).mean()).backward()


def critic_used_twice(make: Any, judge: Any, batch: Any) -> None:
    (judge(make(batch["x"])).pow(2).mean() - judge(batch["y"]).mean()).backward()


def one_after_the_other(make: Any, judge: Any, batch: Any) -> None:
    made = make(batch["x"])
    (judge(made.detach()).pow(2).mean() - judge(batch["y"]).mean()).backward()
    judge.requires_grad_(False)
    judge(made).mean().backward()
    judge.requires_grad_(True)


def check_adversaries() -> None:
    maker, critic = Pair(MLP), Pair(Critic, bucket_cap_mb=ONE_EACH)
    for phase, backward in enumerate([both_together, critic_used_twice, one_after_the_other]):
        for step, _ in zip(maker.each(4, 4 * phase), critic.each(4, 4 * phase), strict=True):
            backward(maker.model, critic.model, maker.mine(step))
            backward(maker.plain, critic.plain, maker.case.batch(step, DTYPE))
        maker.require_delivered(4 * (phase + 1))
        critic.require_delivered(4 * (phase + 1))


def check_teacher_and_student() -> None:
    teacher, student = Pair(MLP), Pair(MLP, bucket_cap_mb=ONE_EACH)
    for step, _ in zip(teacher.each(4), student.each(4), strict=True):
        for teach, learn, batch in (
            (teacher.model, student.model, teacher.mine(step)),
            (teacher.plain, student.plain, teacher.case.batch(step, DTYPE)),
        ):
            taught = teach(batch["x"])
            ((learn(batch["x"] * 2) - taught).pow(2).mean() + (taught - batch["y"]).pow(2).mean()).backward()
    teacher.require_delivered(4)
    student.require_delivered(4)


# ---------------------------------------------------------------- gradients of inputs


def sent_by(pair: Pair) -> list[int]:
    """Filled with the index of every bucket whose collective starts from now on."""
    sent: list[int] = []
    exchange = pair.ddp.step.reducer.exchange
    start = exchange.start

    def start_and_note(bucket: Any, flat: Tensor, *, is_last: bool) -> Any:
        sent.append(bucket.index)
        return start(bucket, flat, is_last=is_last)

    exchange.start = start_and_note
    return sent


def input_gradient(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    x = batch["x"].clone().requires_grad_()
    loss = squared_error(model, {**batch, "x": x})
    return loss, *torch.autograd.grad(loss, [x], retain_graph=True)


def check_gradients_of_inputs() -> None:
    """Before the first step, between steps, and of the very loss that is then used."""
    with torch._functorch.config.patch(donated_buffer=False):  # torch's condition for retain_graph
        for options in VIEWS + MODES:
            train_beside_gradients_of_inputs(options)


def train_beside_gradients_of_inputs(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    pair = Pair(**options)
    sent = sent_by(pair)
    for step in pair.each(6):
        losses = pair.losses(step)
        if step != 2:
            (loss, ours), (_, theirs) = (input_gradient(m, pair.mine(step)) for m in (pair.model, pair.plain))
            torch.testing.assert_close(ours, theirs)
            losses[0] = losses[0] if step % 2 else loss
        assert sent == [], "gradients of inputs were reduced"
        assert all(bucket.flat is None for bucket in pair.ddp.reducer.buckets), "buffers are kept that nobody needs"
        for loss in losses:
            loss.backward()
        assert sent == list(range(len(pair.ddp.reducer.buckets)))
        sent.clear()
    pair.require_delivered(5 if "static_graph" in options else 6)


# ---------------------------------------------------------------- compiled, uncompiled, compiled anew


class TwoModes(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if self.training else 0.5 * x)


def set_stance(stance: str, ranks: tuple[int, ...] = (0, 1)) -> None:
    if dist.get_rank() in ranks:
        torch.compiler.set_stance(stance)


def check_stances_and_resets() -> None:
    for way in ("wrap_then_compile", "compile_then_wrap", "compile_in_place"):
        for ranks in ((0, 1), (1,)):
            torch._dynamo.reset()
            pair = Pair(TwoModes, way).steps(3)
            set_stance("force_eager", ranks)
            pair.steps(2, first=3)
            set_stance("default")
            num_windows = 3 if dist.get_rank() in ranks else 8
            pair.steps(3, first=5).require_delivered(num_windows)
            if dist.get_rank() in ranks:
                torch._dynamo.reset()
            pair.steps(2, first=8).require_delivered(num_windows + 2)
            for step in range(10, 15):  # trains in both modes, and is evaluated in between
                for model in (pair.model, pair.plain):
                    with torch.no_grad():
                        model.eval()(pair.mine(step)["x"])
                    model.train(step % 2 == 0)
                pair.steps(1, first=step)
            pair.require_delivered(num_windows + 7)


def begin_uncompiled(way: str, ranks: tuple[int, ...], cap: float | None) -> None:
    """Some ranks do not compile at first; with no size given, the others must not wait for them to choose one."""
    set_stance("force_eager", ranks)
    pair = Pair(way=way, bucket_cap_mb=cap).steps(2)
    set_stance("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a bucket is not launched by its graph yet is no news
        pair.steps(4, first=2)
    assert set(pair.delivered().values()) == {4 if dist.get_rank() in ranks else 6}


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one_rank", "all_ranks"])
@pytest.mark.parametrize("way", ["wrap_then_compile", "compile_then_wrap", "compile_in_place"])
def test_beginning_uncompiled(way: str, ranks: tuple[int, ...]) -> None:
    for cap in (None, 0.001):
        run_ranks(2, begin_uncompiled, way, ranks, cap, env={"LOCKSTEP_AGREEMENT_TIMEOUT": "60"}, preload=PRELOAD)


# ---------------------------------------------------------------- a forward that raises


class Fragile(nn.Module):
    """Fails where it is asked to: in Python, while it is traced, or in the middle of a graph that runs."""

    fails = ""
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.table = nn.Embedding(4, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        if self.fails == "in_python":
            raise ZeroDivisionError
        h = h + self.table((h[:, 0] > 0).long() + (9 if self.fails == "when_run" else 0))
        return self.second(h @ self.first.weight.t() if self.fails == "when_traced" else h)


class FragileWithBreak(Fragile):
    breaks = True


def check_failing_forward() -> None:
    """By itself, after a forward that is still to be used, and after a pass that did not synchronise."""
    for build in (Fragile, FragileWithBreak):
        for what in ("when_run", "when_traced", "in_python"):
            torch._dynamo.reset()
            pair = Pair(build, compile_options={"fullgraph": False}, bucket_cap_mb=0.0003).steps(3)
            for step in pair.each(6, first=3):
                losses = pair.losses(step) if step % 3 == 1 else None
                if step % 3 == 2:
                    with pair.ddp.no_sync():
                        pair.backward(step + 50)
                pair.module.fails = what
                with pytest.raises((ZeroDivisionError, IndexError, RuntimeError)):
                    pair.model(pair.mine(step)["x"])
                pair.module.fails = ""
                for loss in losses or pair.losses(step):
                    loss.backward()
            if what != "in_python":  # torch does not compile a frame again that raised while it was traced
                pair.require_delivered(9)


CHECKS = [value for name, value in globals().items() if name.startswith("check_")]


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__[6:])
def test_compiled_edges(function: Callable[[], None]) -> None:
    run_ranks(2, function, preload=PRELOAD)
