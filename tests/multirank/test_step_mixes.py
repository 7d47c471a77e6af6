"""Steps in which something begins, ends or differs by rank after several that were all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from multirank.harness import lockstep_only
from multirank.mixes import (
    BLOCKS,
    COMPILE_THEN_WRAP,
    EAGER,
    INDUCTOR,
    TWO_AND_THREE,
    WHOLE,
    WRAP_THEN_COMPILE,
    Mix,
    Net,
    NetWithBreak,
    Side,
    loss_of,
    one_net,
    params_of,
    run_mix,
    train,
)

pytestmark = [pytest.mark.multirank, lockstep_only]

COMPILED = (WRAP_THEN_COMPILE, COMPILE_THEN_WRAP)
FIRST_BLOCK = "0.blocks.0.linear.weight"


# ---------------------------------------------------------------- several wrapped models in one loss


def in_one_loss(uncompiled: int, how: str = "stance", is_chained: bool = False) -> Callable[[Side, int], None]:
    """In step 4, rank 1 runs one of the models uncompiled."""

    def step(side: Side, t: int) -> None:
        outputs = [side.draw(t)]
        for index, model in enumerate(side.models):
            is_odd = t == 4 and side.rank == 1 and index == uncompiled
            if is_odd and how == "wrapper" and side.wrappers:
                model = side.wrappers[index]
            with side.uncompiled(is_odd and how == "stance"):
                outputs.append(model(outputs[-1 if is_chained else 0]))
        torch.stack([loss_of(output, t) for output in outputs[1:]]).sum().backward()

    return step


def two_nets() -> list[nn.Module]:
    return [Net(), Net()]


def three_nets() -> list[nn.Module]:
    return [Net(), Net(), Net()]


def chain() -> list[nn.Module]:
    return [Net(8, 8), Net(8, 8)]


MODELS = {
    "two_models": Mix(in_one_loss(0), two_nets, by_inductor=True, worlds=TWO_AND_THREE),
    "two_models_the_wrapper_is_called": Mix(
        in_one_loss(1, "wrapper"), two_nets, modes=(WRAP_THEN_COMPILE,), worlds=(3,)
    ),
    "two_models_wrapped_in_the_other_order": Mix(
        in_one_loss(0), two_nets, is_built_backwards=True, modes=COMPILED, soaks=(COMPILE_THEN_WRAP,)
    ),
    "three_models": Mix(in_one_loss(1), three_nets, modes=COMPILED, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)),
    "chained_models": Mix(in_one_loss(0, is_chained=True), chain, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)),
    "chained_models_wrapped_in_the_other_order": Mix(
        in_one_loss(1, is_chained=True), chain, is_built_backwards=True, modes=COMPILED, soaks=(COMPILE_THEN_WRAP,)
    ),
}


# ---------------------------------------------------------------- hooks of the user on a parameter


def clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def with_hook(kind: str, first: int) -> Callable[[Side, int], None]:
    """From a step on, between its forward and its backward; "first" 0 is right after wrapping."""

    def step(side: Side, t: int) -> None:
        parameter = side.parameters["0.blocks.1.linear.weight"]
        loss = side.loss(t)
        if t == first and kind == "clamp":
            parameter.register_post_accumulate_grad_hook(clamp)
        if t == first and kind == "scale":
            parameter.register_hook(lambda gradient: gradient * (2.0 + side.rank))
        (20 * loss).backward()

    return step


def clamp_from_the_start(side: Side) -> None:
    side.modules[0].blocks[1].linear.weight.register_post_accumulate_grad_hook(clamp)


def plain_step(side: Side, t: int) -> None:
    (20 * side.loss(t)).backward()


HOOKS = {
    "a_hook_that_clamps_after_wrapping": Mix(
        plain_step, one_net, after_wrapping=clamp_from_the_start, by_inductor=True, worlds=(3,)
    ),
    "a_hook_that_clamps_between_forward_and_backward": Mix(
        with_hook("clamp", 3), one_net, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)
    ),
    "a_tensor_hook_that_scales": Mix(with_hook("scale", 3), one_net, soaks=(WRAP_THEN_COMPILE,)),
}


# ---------------------------------------------------------------- ranks that run in different ways


def rank_0_alone(how: str) -> Callable[[Side, int], None]:
    """Has hooks on all parameters, or runs uncompiled; from step 4 on there are two forwards, on all ranks."""

    def step(side: Side, t: int) -> None:
        if t == 0 and side.rank == 0 and how == "hooks":
            norms: list[Tensor] = []
            for parameter in side.parameters.values():
                parameter.register_hook(lambda gradient: norms.append(gradient.norm()))
                parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        with side.uncompiled(side.rank == 0 and how == "uncompiled"):
            loss = side.loss(t)
            if t >= 4:
                loss = loss + 0.5 * side.loss(t, 1)
        loss.backward()

    return step


def uneven_forwards(side: Side, t: int) -> None:
    """In step 4, ranks run two forwards, one, and three before their one backward."""
    num_forwards = [2, 1, 3][side.rank] if t == 4 else 1
    torch.stack([side.loss(t, index) for index in range(num_forwards)]).sum().backward()


RANKS = {
    "rank_0_logs_then_two_forwards": Mix(rank_0_alone("hooks"), one_net, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)),
    "rank_0_uncompiled_then_two_forwards": Mix(
        rank_0_alone("uncompiled"), one_net, modes=COMPILED, by_inductor=True, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)
    ),
    "uneven_forwards": Mix(uneven_forwards, one_net, worlds=TWO_AND_THREE, soaks=(2,)),
}


# ---------------------------------------------------------------- a generator and a critic


def adversarial(frozen: tuple[str, ...] = (), has_hook: bool = False) -> Callable[[Side, int], Iterator[None]]:
    """The critic on real and on fake, then the generator through the critic; each with its optimizer."""

    def step(side: Side, t: int) -> Iterator[None]:
        generator, critic = side.models
        of_generator, of_critic = side.optimizers
        if t == 0 and has_hook:
            side.modules[1].blocks[1].linear.weight.register_post_accumulate_grad_hook(lambda p: None)
        fake = generator(side.draw(t, shape=(4, 4)))
        of_critic.zero_grad()
        (loss_of(critic(side.draw(t, 1)), 1) + loss_of(critic(fake.detach()), 2)).backward()
        yield
        of_critic.step()
        of_generator.zero_grad()
        held = [p for name, p in side.modules[1].named_parameters() if name.startswith(frozen)]
        for parameter in held:
            parameter.requires_grad_(False)
        loss_of(critic(fake), 1).backward()
        for parameter in held:
            parameter.requires_grad_(True)
        yield
        of_generator.step()

    return step


def generator_and_critic() -> list[nn.Module]:
    return [Net(4, 8), Net(8, 1)]


def generator_and_critic_with_break() -> list[nn.Module]:
    return [Net(4, 8), NetWithBreak(8, 1)]


def gan(step: Any, build: Any = generator_and_critic, **options: Any) -> Mix:
    return Mix(step, build, one_optimizer=False, num_steps=5, **options)


ADVERSARIES = {
    "gan": gan(adversarial(), worlds=TWO_AND_THREE, soaks=(2,)),
    "gan_with_a_break": gan(
        adversarial(), generator_and_critic_with_break, modes=COMPILED, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)
    ),
    "gan_in_blocks": gan(adversarial(), modes=(BLOCKS,), worlds=(3,)),
    "gan_with_a_hook": gan(adversarial(has_hook=True), modes=WHOLE, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)),
    "gan_with_a_frozen_critic": gan(
        adversarial(("blocks", "head")), modes=(EAGER, *COMPILED, BLOCKS), soaks=(COMPILE_THEN_WRAP,)
    ),
    "gan_with_half_a_bucket_frozen": gan(
        adversarial(("head.bias",)),
        modes=(EAGER, *COMPILED),
        by_inductor=True,
        worlds=(3,),
        soaks=(WRAP_THEN_COMPILE, INDUCTOR),
    ),
}


# ---------------------------------------------------------------- uses that begin in a later step


def late_penalty(kind: str, ranks: tuple[int, ...] = (0, 1, 2)) -> Callable[[Side, int], None]:
    """A penalty on the head from the start, so that its bucket is left to hooks; one on a block from step 3 on."""

    def step(side: Side, t: int) -> None:
        loss = side.loss(t) + 0.2 * side.parameters["0.head.weight"].pow(2).sum()
        weight = side.parameters[FIRST_BLOCK]
        if t >= 3 and side.rank in ranks:
            scale = side.draw(t).mean(0) if kind == "of_data" else 0.5
            loss = loss + (scale * weight).pow(2).sum()
        loss.backward()

    return step


def twice_from_step_3(side: Side, t: int) -> None:
    side.modules[0].twice = t >= 3
    side.loss(t).backward()


def two_forwards_from_step_3(side: Side, t: int) -> None:
    loss = side.loss(t)
    (loss + 0.5 * side.loss(t, 1) if t >= 3 else loss).backward()


def late_in_the_bucket_of_an_unused_one(side: Side, t: int) -> None:
    """From step 3 on, a penalty on the head, which shares its bucket with a layer that no rank uses."""
    loss = side.loss(t)
    if t >= 3 and side.rank == 0:
        loss = loss + 0.3 * side.parameters["0.head.weight"].pow(2).sum()
    loss.backward()


def net_with_unused() -> list[nn.Module]:
    return [Net(has_extra=True)]


def with_comm_hook(hook: Any) -> Callable[[Side], None]:
    def register(side: Side) -> None:
        for ddp in side.wrappers:
            ddp.register_comm_hook(None, hook)

    return register


LATER = {
    "a_late_penalty": Mix(late_penalty("of_weight"), one_net, by_inductor=True, worlds=TWO_AND_THREE, soaks=(2,)),
    "a_late_penalty_under_a_linear_hook": Mix(
        late_penalty("of_weight", (1,)),
        one_net,
        after_wrapping=with_comm_hook(default_hooks.allreduce_hook),
        worlds=(3,),
        soaks=(COMPILE_THEN_WRAP,),
    ),
    "a_late_penalty_in_blocks": Mix(late_penalty("of_weight"), one_net, modes=(BLOCKS,)),
    "a_late_penalty_of_data": Mix(late_penalty("of_data"), one_net, worlds=(3,), soaks=(WRAP_THEN_COMPILE,)),
    "a_late_penalty_on_one_rank": Mix(late_penalty("of_data", (1,)), one_net, soaks=(COMPILE_THEN_WRAP,)),
    "a_block_used_twice": Mix(twice_from_step_3, one_net, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)),
    "a_block_used_twice_in_blocks": Mix(twice_from_step_3, one_net, modes=(BLOCKS,)),
    "two_forwards_with_unused": Mix(
        two_forwards_from_step_3,
        net_with_unused,
        options={"find_unused_parameters": True},
        worlds=(3,),
        soaks=(WRAP_THEN_COMPILE,),
    ),
}


for view in (None, True, False):
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.0022, "gradient_as_bucket_view": view}
    LATER[f"late_in_the_bucket_of_an_unused_one_{view}"] = Mix(
        late_in_the_bucket_of_an_unused_one,
        net_with_unused,
        options=options,
        num_steps=5,
        soaks=() if view is None else (COMPILE_THEN_WRAP,),
    )


MIXES = {**MODELS, **HOOKS, **RANKS, **ADVERSARIES, **LATER}


def run(name: str, mode: str, backend: str) -> list[str]:
    return train(MIXES[name], mode, backend)


@pytest.mark.parametrize(("name", "mode", "backend", "world"), params_of(MIXES))
def test_mix(name: str, mode: str, backend: str, world: int) -> None:
    run_mix(run, MIXES, name, mode, backend, world)
