"""Steps of several passes: more than one backward, parts of a model, no_sync, errors, uneven batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multirank.harness import lockstep_only, run_ranks
from multirank.mixes import (
    BLOCKS,
    COMPILE_THEN_WRAP,
    EAGER,
    INDUCTOR,
    MODES,
    PRELOAD,
    TWO_AND_THREE,
    WHOLE,
    WRAP_THEN_COMPILE,
    Mix,
    Net,
    Side,
    TowersWithBreak,
    average,
    loss_of,
    one_net,
    params_of,
    run_mix,
    towers,
    train,
)

pytestmark = [pytest.mark.multirank, lockstep_only]

COMPILED = (WRAP_THEN_COMPILE, COMPILE_THEN_WRAP)


def keep_buffers(side: Side) -> None:
    """What torch asks for where a compiled backward runs with retain_graph."""
    torch._functorch.config.donated_buffer = False


# ---------------------------------------------------------------- two losses


def rank_0_in_two_passes(is_late: bool) -> Callable[[Side, int], None]:
    """Rank 0 calls backward for each loss, the others for the sum; in every step, or from step 3 on."""

    def step(side: Side, t: int) -> None:
        left, right = (loss_of(output, t) for output in side.models[0](side.draw(t)))
        if side.rank == 0 and (t >= 3 or not is_late):
            left.backward(retain_graph=True)
            right.backward()
        else:
            (left + right).backward()

    return step


def towers_with_break() -> list[nn.Module]:
    return [TowersWithBreak()]


def penalty_of(side: Side, is_by_rank: bool) -> Tensor:
    scale = 0.1 * (1 + side.rank) if is_by_rank else 0.1
    weights = [side.parameters["0.blocks.1.linear.weight"], side.parameters["0.head.bias"]]
    return scale * torch.stack([weight.pow(2).sum() for weight in weights]).sum()


def then_a_penalty(is_by_rank: bool, clips: str = "") -> Callable[[Side, int], Iterator[None]]:
    """From step 2 on, in a backward of its own after that of the loss; clipped in between or before the update."""

    def step(side: Side, t: int) -> Iterator[None]:
        side.loss(t).backward()
        yield
        if clips == "between":
            nn.utils.clip_grad_norm_(side.parameters.values(), 0.1)
        if t >= 2:
            penalty_of(side, is_by_rank).backward()
        yield
        if clips == "after":
            nn.utils.clip_grad_norm_(side.parameters.values(), 0.1)

    return step


def retained(side: Side, t: int) -> None:
    """From step 3 on, two backward passes through one graph."""
    loss = side.loss(t)
    if t >= 3:
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    else:
        loss.backward()


PASSES = {
    "rank_0_in_two_passes": Mix(rank_0_in_two_passes(False), towers, modes=(EAGER,), worlds=TWO_AND_THREE, soaks=(2,)),
    "rank_0_in_two_passes_later": Mix(rank_0_in_two_passes(True), towers, modes=(EAGER,), worlds=(3,)),
    "rank_0_in_two_passes_over_two_graphs": Mix(
        rank_0_in_two_passes(True),
        towers_with_break,
        after_wrapping=keep_buffers,
        modes=COMPILED,
        by_inductor=True,
        soaks=(COMPILE_THEN_WRAP, INDUCTOR),
    ),
    "then_a_penalty": Mix(then_a_penalty(False), one_net, compares_before_step=False, by_inductor=True, worlds=(3,)),
    "then_a_penalty_by_rank": Mix(
        then_a_penalty(True), one_net, compares_before_step=False, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)
    ),
    "then_a_penalty_and_clipping": Mix(then_a_penalty(True, "after"), one_net, soaks=(COMPILE_THEN_WRAP,)),
    "clipping_then_a_penalty": Mix(then_a_penalty(True, "between"), one_net, soaks=(WRAP_THEN_COMPILE,)),
    "retained": Mix(retained, one_net, after_wrapping=keep_buffers),
}


# ---------------------------------------------------------------- an encoder of two wrappers


class Headed(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def shared_encoder() -> list[nn.Module]:
    encoder = Net(8, 8)
    return [Headed(encoder), Headed(encoder)]


def by_turns(num_alone: int) -> Callable[[Side, int], None]:
    """The two in turn, then both in one loss."""

    def step(side: Side, t: int) -> None:
        if t < num_alone:
            side.loss(t, index=t % 2).backward()
        else:
            (side.loss(t, index=0) + 0.5 * side.loss(t, 1, index=1)).backward()

    return step


SHARED = {
    "shared_encoder_by_turns": Mix(by_turns(6), shared_encoder, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)),
    "shared_encoder_in_one_loss": Mix(
        by_turns(0), shared_encoder, num_steps=4, by_inductor=True, soaks=(COMPILE_THEN_WRAP,)
    ),
    "shared_encoder_by_turns_then_in_one_loss": Mix(
        by_turns(4), shared_encoder, num_steps=7, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)
    ),
}


# ---------------------------------------------------------------- passes without synchronisation


def flag_by_hand(side: Side, t: int) -> None:
    """In step 3, a pass over one tower with the flag off; it is reduced with the next, for which it is on again."""
    if t == 3:
        for ddp in side.wrappers:
            ddp.require_backward_grad_sync = False
        loss_of(side.models[0](side.draw(t, 1))[0]).backward()
        for ddp in side.wrappers:
            ddp.require_backward_grad_sync = True
    left, right = side.models[0](side.draw(t))
    (loss_of(left) + loss_of(right, 1)).backward()


def uneven_micro_batches(side: Side, t: int) -> None:
    num = [3, 1, 2][side.rank] if t % 2 else [1, 4, 2][side.rank]
    for index in range(num):
        with side.no_sync(index < num - 1):
            (side.loss(t, index) / num).backward()


UNSYNCHRONISED = {
    "flag_by_hand": Mix(flag_by_hand, towers, by_inductor=True, worlds=TWO_AND_THREE, soaks=(2,)),
    "uneven_micro_batches": Mix(uneven_micro_batches, one_net, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)),
}


# ---------------------------------------------------------------- forwards that lead nowhere


def one_of_three_used(side: Side, t: int) -> None:
    """From step 3 on, there are forwards before and after the one whose output is in the loss."""
    before = side.loss(t, 1) if t >= 3 else None
    loss = side.loss(t)
    after = side.loss(t, 2) if t >= 3 else None
    loss.backward()
    del before, after


def failing_forward(side: Side, t: int) -> None:
    if t in (3, 4):
        side.modules[0].fails = True
        with contextlib.suppress(ZeroDivisionError):
            side.models[0](side.draw(t, 1))
        side.modules[0].fails = False
    side.loss(t).backward()


def by_autograd_grad(side: Side, t: int) -> None:
    """In step 3, gradients are asked for instead; they are this rank's own, and no step is lost by it."""
    if t == 3:
        gradients = torch.autograd.grad(side.loss(t, 1), list(side.parameters.values()))
        plain = side.memory.setdefault("plain", Net().to(side.draw(0).dtype))
        plain.load_state_dict(side.modules[0].state_dict())
        expected = torch.autograd.grad(loss_of(plain(side.draw(t, 1)), t), list(plain.parameters()))
        torch.testing.assert_close(gradients, expected)
    side.loss(t).backward()


def gradient_penalty(side: Side, t: int) -> None:
    """From step 3 on; this is a double backward, which torch does not compile."""
    x = side.draw(t).requires_grad_()
    output = side.models[0](x)
    loss = loss_of(output, t)
    if t >= 3:
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = loss + (gradient.norm(dim=1) - 1).pow(2).mean()
    loss.backward()


DETOURS = {
    "one_of_three_forwards_is_used": Mix(one_of_three_used, one_net, soaks=(WRAP_THEN_COMPILE,)),
    "a_forward_that_fails": Mix(
        failing_forward,
        one_net,
        by_inductor=True,
        soaks=(COMPILE_THEN_WRAP, INDUCTOR),
    ),
    "autograd_grad_in_between": Mix(by_autograd_grad, one_net, soaks=(WRAP_THEN_COMPILE,)),
    "a_gradient_penalty": Mix(gradient_penalty, one_net, modes=(EAGER,), worlds=(3,)),
}


# ---------------------------------------------------------------- parameters


def simple(side: Side, t: int) -> None:
    side.loss(t).backward()


def frozen_from_step_3(side: Side, t: int) -> None:
    """A block, on all ranks; in the last step it trains again."""
    side.modules[0].blocks[1].requires_grad_(t < 3 or t == 6)
    side.loss(t).backward()


def empty_on_rank_1(side: Side, t: int) -> None:
    x = side.draw(t, shape=(0 if side.rank == 1 and t in (3, 4) else 4, 8))
    side.models[0](x).pow(2).sum().backward()


def used_on_rank_1(side: Side, t: int) -> None:
    """Of a block that not all ranks use; in step 4 none does."""
    side.modules[0].uses_extra = side.rank == 1 and t != 4
    side.loss(t).backward()


def net_with_extra() -> list[nn.Module]:
    return [Net(has_extra=True)]


class TwoDtypes(Net):
    """The blocks in the middle compute in half the precision of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.blocks[1].float()

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x).float())
        return self.head(self.blocks[2](h.double()))


def two_dtypes() -> list[nn.Module]:
    return [TwoDtypes()]


FINDS_UNUSED = {"find_unused_parameters": True}
WIDE = {"bucket_cap_mb": 0.0022}  # of parts of two blocks
KEPT = {**WIDE, "gradient_as_bucket_view": True}
PARAMETERS = {
    "zeroed_in_place": Mix(simple, one_net, set_to_none=False, soaks=(COMPILE_THEN_WRAP,)),
    # A bucket of several graphs, in which gradients that are zeroed in place still lie when the first graph delivers.
    "zeroed_in_a_bucket_that_is_kept": Mix(
        simple, one_net, options=KEPT, set_to_none=False, modes=MODES, soaks=(WRAP_THEN_COMPILE,)
    ),
    "zeroed_in_a_bucket_of_several_graphs": Mix(simple, one_net, options=WIDE, set_to_none=False, modes=(BLOCKS,)),
    "frozen_in_a_later_step": Mix(frozen_from_step_3, one_net, num_steps=8, worlds=(3,)),
    "an_empty_batch_on_rank_1": Mix(empty_on_rank_1, one_net, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)),
    "used_on_one_rank": Mix(
        used_on_rank_1, net_with_extra, options=FINDS_UNUSED, by_inductor=True, soaks=(COMPILE_THEN_WRAP,)
    ),
    "two_dtypes": Mix(simple, two_dtypes, dtype=None, tolerance=1e-5, soaks=(WRAP_THEN_COMPILE,)),
}


# ---------------------------------------------------------------- checkpoints around blocks


class Checkpointed(Net):
    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    is_reentrant = True


def checkpointed() -> list[nn.Module]:
    return [Checkpointed()]


def reentrant() -> list[nn.Module]:
    return [Reentrant()]


def in_two_micro_batches(side: Side, t: int) -> None:
    for index in range(2):
        with side.no_sync(index == 0):
            side.loss(t, index).backward()


CHECKPOINTS = {
    "checkpoints": Mix(in_two_micro_batches, checkpointed, modes=(EAGER, BLOCKS, WRAP_THEN_COMPILE)),
    "reentrant_checkpoints": Mix(in_two_micro_batches, reentrant, modes=(EAGER, BLOCKS)),
}


MIXES = {**PASSES, **SHARED, **UNSYNCHRONISED, **DETOURS, **PARAMETERS, **CHECKPOINTS}


def run(name: str, mode: str, backend: str) -> list[str]:
    return train(MIXES[name], mode, backend)


@pytest.mark.parametrize(("name", "mode", "backend", "world"), params_of(MIXES))
def test_mix(name: str, mode: str, backend: str, world: int) -> None:
    run_mix(run, MIXES, name, mode, backend, world)


# ---------------------------------------------------------------- two passes through one graph


def two_passes_through_one_graph(mode: str) -> tuple[str, int, list[bool]]:
    """By what error and in which step this rank was stopped, and for each step whether its gradients were right."""
    import lockstep

    mix = Mix(rank_0_in_two_passes(True), towers, after_wrapping=keep_buffers)
    ours = Side(mix, torch.distributed.get_rank(), mode)
    copies = [Side(mix, rank, None) for rank in range(ours.world)]
    are_right = []
    for step in range(6):
        try:
            for side in (ours, *copies):
                side.optimizers[0].zero_grad()
                mix.step(side, step)
            expected = average(copies)
            for side in (ours, *copies):
                side.optimizers[0].step()
        except lockstep.errors.LockstepError as error:
            return type(error).__name__, step, are_right
        gradients = ours.gradients()
        are_right.append(all(torch.allclose(gradients[name], expected[name]) for name in expected))
    return "", 6, are_right


@pytest.mark.parametrize("mode", COMPILED)
def test_two_passes_through_one_graph(mode: str) -> None:
    """Each gives every parameter a gradient, zero or not; so they look like two windows of a rank that has one more.

    Either gradients are right, or all ranks are told before their next update.
    """
    values = run_ranks(3, two_passes_through_one_graph, mode, preload=PRELOAD, limit_s=300)
    if any(type_name for type_name, _, _ in values):
        assert {type_name for type_name, _, _ in values} == {"Disagreement"}, values
        assert all(step in (3, 4) and are_right[:3] == [True] * 3 for _, step, are_right in values), values
    else:
        assert values == [("", 6, [True] * 6)] * 3


# ---------------------------------------------------------------- bf16 after wrapping


class Normed(nn.Module):
    """Linears that may be in another dtype than the norms, which lie between them and so share their buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(5):
            linear, norm = nn.Linear(16 if index else 8, 16), nn.LayerNorm(16)
            # In either order, as the first of a bucket may be the one that is asked for its dtype.
            named = {"linear": linear, "norm": norm} if index % 2 else {"norm": norm, "linear": linear}
            self.layers.append(nn.ModuleDict(named))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            linear = layer["linear"]
            x = layer["norm"](torch.tanh(linear(x.to(linear.weight.dtype))).float())
        return x


def normed() -> list[nn.Module]:
    return [Normed()]


def lower_the_linears(mode: str) -> list[str]:
    mix = Mix(simple, normed, dtype=torch.float32, options={"bucket_cap_mb": 0.002})
    ours = Side(mix, torch.distributed.get_rank(), mode)
    copies = [Side(mix, rank, None) for rank in range(ours.world)]
    digests = []
    for step in range(6):
        for side in (ours, *copies):
            if step == 2:
                for layer in side.modules[0].layers:
                    layer["linear"].to(torch.bfloat16)
            side.optimizers[0].zero_grad()
            loss_of(side.models[0](side.draw(step).float()), step).backward()
        expected = average(copies)
        for name, gradient in ours.gradients().items():
            is_norm = "norm" in name
            tolerance = 1e-6 if is_norm or step < 2 else 2e-2
            torch.testing.assert_close(
                gradient, expected[name], rtol=tolerance, atol=0.1 * tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert gradient.dtype == (torch.float32 if is_norm or step < 2 else torch.bfloat16)
            if is_norm:
                assert not torch.equal(gradient, gradient.bfloat16().float()), f"{name} was rounded on its way"
        for side in (ours, *copies):
            side.optimizers[0].step()
        for copy in copies:  # in bf16, the last bit of a mean is not defined
            copy.modules[0].load_state_dict(ours.modules[0].state_dict())
        digests.append(ours.digest())
    return digests


@pytest.mark.parametrize("mode", WHOLE)
def test_linears_in_bf16_after_wrapping(mode: str) -> None:
    digests = run_ranks(3, lower_the_linears, mode, preload=PRELOAD, limit_s=300)
    assert digests == [digests[0]] * 3
