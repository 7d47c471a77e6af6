"""What stands around a step, or happens inside of it, that a trace does not show: the result is that of the loop."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.program.guards import Surroundings
from lockstep.program.randomness import Draws, HostRandomness
from program.loops import Dropping, Mlp, batch_of

NUM_STEPS = 8


def plain_loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def hook_on_all_modules() -> Iterator[None]:
    def double(module: Any, _: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


def reads_torch(model: Any, batch: Any) -> Tensor:
    factor = 1 + torch.are_deterministic_algorithms_enabled() + 2 * torch.is_anomaly_enabled()
    factor += 4 * (torch.get_default_dtype() is torch.float64) + 8 * (torch.get_num_threads() == 2)
    return plain_loss(model, batch) * factor


AROUND: dict[str, tuple[Any, Callable[[], Any]]] = {
    "deterministic": (reads_torch, deterministic),
    "anomaly": (reads_torch, torch.autograd.detect_anomaly),
    "default dtype": (reads_torch, default_dtype),
    "threads": (reads_torch, lambda: threads(2)),
    "function mode": (plain_loss, Doubling),
    "hook on all modules": (plain_loss, hook_on_all_modules),
}


def train(mode: str, model: nn.Module, loss: Any, before: Callable[[int], Any], batch: Any = batch_of) -> Any:
    """Some steps, each within what ``before`` returns; losses, parameters, and the step."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, loss, mode=mode)
    found = []
    for index in range(NUM_STEPS):
        with before(index) or nullcontext():
            found.append(step(batch(index)))
    found += [p.detach().clone() for p in model.parameters()]
    return [*found, torch.rand(1)], step


def compare(make: Callable[[], tuple[nn.Module, Any, Callable[[int], Any], Any]]) -> Any:
    right, _ = train("loop", *make())
    found, step = train("graph", *make())
    torch.testing.assert_close(found, right)
    return step.explain()


def in_single(index: int) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in batch_of(index).items()}


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
@pytest.mark.parametrize("name", AROUND)
def test_what_torch_is_set_to_around_a_step(name: str, uncompiled: None) -> None:
    loss, around = AROUND[name]
    explained = compare(lambda: (seeded(Mlp), loss, lambda i: around() if i in (3, 4, 5) else None, in_single))
    assert explained.num_program_calls >= NUM_STEPS - 4


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_a_step_without_gradients_is_an_error_in_every_mode(mode: str, around: Any, uncompiled: None) -> None:
    model = Mlp()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plain_loss, mode=mode)
    for index in range(3):
        step(batch_of(index))
    with around(), pytest.raises(ValueError, match="does not depend on any parameter"):
        step(batch_of(3))
    step.reset()
    step(batch_of(4))
    assert step.num_updates == 4


PAIRS = {"true and one": (True, 1), "zeros": (0.0, -0.0), "numbers": (1, 1.0)}


@pytest.mark.parametrize("where", ["batch", "model", "closure"])
@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_that_are_equal_and_not_the_same(pair: str, where: str, uncompiled: None) -> None:
    def make() -> Any:
        model, held = seeded(Mlp), [0]

        def before(index: int) -> None:
            held[0] = model.number = PAIRS[pair][index % 2]

        def loss(model: Any, batch: Any) -> Tensor:
            number = {"batch": batch["number"], "model": model.number, "closure": held[0]}[where]
            is_other = number is True or isinstance(number, float)
            return plain_loss(model, batch) * (3 if is_other and math.copysign(1, number) > 0 else 1)

        return model, loss, before, lambda i: {**batch_of(i), "number": PAIRS[pair][i % 2] if where == "batch" else 0}

    assert compare(make).num_program_calls == NUM_STEPS - 2


def test_tensors_of_a_batch_that_share_memory(uncompiled: None) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        batch["x"].mul_(0.5)
        return F.mse_loss(model(batch["same"]), batch["y"])

    def batch(index: int) -> dict[str, Tensor]:
        found = batch_of(index)
        return {**found, "same": found["x"] if index % 2 else found["x"].clone()}

    found = compare(lambda: (seeded(Mlp), loss, lambda _: None, batch))
    assert found.num_program_calls == NUM_STEPS // 2 - 1
    assert any("share memory" in reason for reason in found.reasons)


def test_slices_of_one_data_set_are_alike(uncompiled: None) -> None:
    data = torch.randn(NUM_STEPS + 5, 10, generator=torch.Generator().manual_seed(7))

    def batch(index: int) -> dict[str, Tensor]:
        return {"x": data[index : index + 5, :6], "y": data[index : index + 5, 6:]}

    assert compare(lambda: (seeded(Mlp), plain_loss, lambda _: None, batch)).num_program_calls == NUM_STEPS - 1


def test_a_loss_that_puts_another_model_into_eval_mode(uncompiled: None) -> None:
    def make() -> Any:
        teacher = seeded(Dropping)

        def loss(model: Any, batch: Any) -> Tensor:
            teacher.eval()
            return F.mse_loss(model(batch["x"]), teacher(batch["x"]).detach())

        return seeded(Mlp), loss, lambda _: None, batch_of

    assert compare(make).num_program_calls == NUM_STEPS - 2


def test_whether_another_model_trains(uncompiled: None) -> None:
    def make() -> Any:
        teacher = Dropping().eval()

        def loss(model: Any, batch: Any) -> Tensor:
            return F.mse_loss(model(batch["x"]), teacher(batch["x"]).detach())

        return seeded(Mlp), loss, lambda i: teacher.train(i == 5) and None, batch_of

    compare(lambda: (torch.manual_seed(2), make())[1])


def backward_inside(model: Any, batch: Any) -> Tensor:
    plain_loss(model, batch).backward()
    return plain_loss(model, batch)


def checkpointed(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(checkpoint(model, batch["x"], use_reentrant=False), batch["y"])


def seeds(model: Any, batch: Any) -> Tensor:
    torch.manual_seed(3)
    return plain_loss(model, batch)


def forks(model: Any, batch: Any) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return plain_loss(model, batch)


def seeds_the_generator(model: Any, batch: Any) -> Tensor:
    torch.default_generator.manual_seed(3)
    return plain_loss(model, batch)


def seeds_and_puts_back(model: Any, batch: Any) -> Tensor:
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(3)
    loss = plain_loss(model, batch)
    torch.default_generator.set_state(before)
    return loss


def draws_the_same_twice(model: Any, batch: Any) -> Tensor:
    before = torch.default_generator.get_state()
    loss = plain_loss(model, batch)
    torch.default_generator.set_state(before)
    return loss + 0.5 * plain_loss(model, batch)


def draws_of_its_own(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(7))
    return plain_loss(model, {**batch, "x": batch["x"] + noise})


def draws_of_a_copy(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(batch["x"].shape, generator=torch.default_generator.clone_state())
    return plain_loss(model, {**batch, "x": batch["x"] + noise})


def names_the_default(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(batch["x"].shape, generator=torch.default_generator)
    return plain_loss(model, {**batch, "x": batch["x"] + noise})


def asks_for_the_seed(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) * (1 + torch.initial_seed() % 7)


class DroppingBefore(Dropping):
    """Drops outside of what is checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        first, drop, *rest = self.inner
        return checkpoint(nn.Sequential(*rest), drop(first(x)), use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Dropping, seeds_the_generator, "random numbers are set back"),
        (Mlp, seeds_the_generator, "random numbers are set back"),
        (Dropping, seeds_and_puts_back, "random numbers are set back"),
        (Mlp, seeds_and_puts_back, ""),  # nothing random in it
        (Dropping, draws_the_same_twice, "random numbers are set back"),
        (Mlp, draws_of_its_own, "a generator of its own"),
        (Mlp, draws_of_a_copy, "a generator of its own"),
        (Dropping, names_the_default, ""),
        (Mlp, asks_for_the_seed, "asks for the seed"),
        (DroppingBefore, plain_loss, ""),
        (Mlp, backward_inside, "a backward of its own"),
        (Dropping, checkpointed, "random numbers are set back"),
        (Dropping, seeds, "random numbers are set back"),
        (Dropping, forks, "random numbers are set back"),
        (Mlp, seeds, "random numbers are set back"),
        (Mlp, checkpointed, ""),  # nothing random in it
    ],
)
def test_what_a_trace_does_not_show(model: type[nn.Module], loss: Any, words: str, uncompiled: None) -> None:
    explained = compare(lambda: (seeded(model), loss, lambda _: None, batch_of))
    assert words in " ".join(explained.reasons)
    assert bool(explained.num_program_calls) is not bool(words)


@pytest.mark.parametrize("later", [False, True])
def test_a_step_of_an_optimizer_that_was_replaced(later: bool, uncompiled: None) -> None:
    def run(mode: str) -> tuple[list[Tensor], Any]:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # it replaces it too, and is no reason
        step = lockstep.TrainStep(model, optimizer, plain_loss, mode=mode, scheduler=schedule)
        plain = optimizer.step

        def halved() -> None:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            plain()

        for index in range(NUM_STEPS):
            if index == (4 if later else 0):
                optimizer.step = halved
            step(batch_of(index))
        return [p.detach() for p in model.parameters()], step.explain()

    found, explained = run("graph")
    torch.testing.assert_close(found, run("loop")[0])
    assert explained.num_program_calls == (3 if later else 0)


def test_a_hook_on_the_steps_of_all_optimizers(uncompiled: None) -> None:
    handles: list[Any] = []

    def double(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    def before(index: int) -> None:
        if index == 4:
            handles.append(register_optimizer_step_pre_hook(double))
        elif index == 6:
            handles.pop().remove()

    explained = compare(lambda: (seeded(Mlp), plain_loss, before, batch_of))
    assert explained.num_program_calls == NUM_STEPS - 3


@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_a_step_is_not_copied(mode: str) -> None:
    model = Mlp()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plain_loss, mode=mode)
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            how(step)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_without_dropout_draws_nothing(dropout: float) -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in operator.tags
    q = torch.ones(1, 1, 2, 4)
    with torch.random.fork_rng(devices=[]):
        host = HostRandomness(elsewhere=True)
        draws = Draws(torch.device("cpu"))
        draws.before(operator, (q, q, q, dropout), {})
        torch.manual_seed(5)  # as a checkpoint sets numbers back
        draws.before(operator, (q, q, q), {"dropout_p": dropout})
        host.restore()
    assert draws._draws is (dropout > 0)
    assert draws._is_moved is (dropout > 0)


def test_where_no_step_can_be_a_program_python_is_not_looked_at(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.num = nn.Linear(4, 1), 0

        def forward(self, x: Tensor) -> Tensor:
            self.num += 1
            return self.linear(x) * self.num  # type: ignore[no-any-return]

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode="graph")
    for _ in range(3):
        step(torch.ones(2, 4))
    looks: list[int] = []
    values = Surroundings.values
    monkeypatch.setattr(Surroundings, "values", lambda self: looks.append(1) or values(self))
    for _ in range(3):
        step(torch.ones(2, 4))
    assert not looks
    assert model.num == 6
    assert "changes a number in Python: num" in " ".join(step.explain().reasons)
