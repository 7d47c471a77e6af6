"""What Python changes between two steps is seen by a program: another world, another program, or the loop."""

from __future__ import annotations

import ctypes
import logging
import math
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.program.code import modules_of, reads_of
from lockstep.program.world import World

factor = 1.0
tree = {"a": {"b": {"c": {"d": {"e": 1.0}}}}}
step = 1.0  # the name of an attribute of the model, too
numbers = ModuleType("numbers_of_a_test")
array = numpy.ones(3)
variable: ContextVar[float] = ContextVar("variable", default=1.0)


logger = logging.getLogger("lockstep.test_of_worlds")


class Settings:
    gamma = 1.0


class Slotted:
    __slots__ = ("delta",)


slotted = Slotted()


def helper() -> float:
    return helper.epsilon * numbers.zeta  # type: ignore[attr-defined, no-any-return]


def bare() -> float:
    """Has no attribute yet."""
    return float(getattr(bare, "amount", 1.0) * globals()["by_word"])


by_word = 1.0


class Answering:
    """Answers for what it does not have, and with errors of its own."""

    __slots__ = ("known",)

    def __getattr__(self, name: str) -> float:
        return self.known[name]  # type: ignore[no-any-return]


answering = Answering()
answering.known = {"iota": 1.0}
count = ctypes.c_double(1.0)
shown = memoryview(bytearray([1]))
kept = torch.ones(1)


class Config:
    def __init__(self) -> None:
        self.alpha = 1.0


class Kind(type):
    @property
    def kappa(cls) -> float:
        return Kind.value

    value = 1.0


class OfKind(metaclass=Kind):
    pass


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Tripled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def reset_python() -> None:
    """All that is set below, as it is in the beginning."""
    global factor
    factor = Settings.gamma = slotted.delta = Net.eta = array[0] = 1.0
    tree["a"]["b"]["c"]["d"]["e"] = 1.0
    helper.epsilon = numbers.zeta = 1.0  # type: ignore[attr-defined]
    vars(bare).clear()
    globals()["by_word"] = 1.0
    variable.set(1.0)
    answering.known["iota"] = count.value = Kind.value = 1.0
    shown[0] = 1
    vars(kept).clear()


class Net(nn.Module):
    eta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)
        self.register_buffer("shift", torch.zeros(1))
        self.config = Config()
        self.table = {"beta": 1.0}
        self.scales = [1.0]
        self._hidden = [{"theta": 1.0}]
        self.long = dict.fromkeys(range(1000), 1.0)
        self.step = 1.0
        self.first.weight.factor = 2.0  # type: ignore[attr-defined]
        self.shift.mark = {"lambda": 1.0}  # type: ignore[attr-defined]
        self.passed = Plain()

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.step * self.long[700]

    def forward(self, x: Tensor) -> Tensor:
        y = self.passed(self.scaled(self.last(F.relu(self.act(self.first(x))))))
        y = y * getattr(self.first.weight, "factor", 1.0) * getattr(self.shift, "mark", {"lambda": 5.0})["lambda"]
        y = y * self.config.alpha * self.table["beta"] * self.scales[0] + self.shift
        return y * self.eta * self._hidden[0]["theta"] * Settings.gamma


class Loss:
    weight = 1.0

    def __getitem__(self, index: int) -> float:
        return tree["a"]["b"]["c"]["d"]["e"]

    def __call__(self, model: nn.Module, x: Tensor, *, by_keyword: float = 1.0) -> Tensor:
        x = (lambda y: torch.tanh(y) * math.sqrt(by_keyword))(x) * self[0]
        more = slotted.delta * helper() * bare() * float(array[0]) * variable.get()
        more *= answering.iota * count.value * shown[0] * OfKind.kappa * getattr(kept, "mu", 1.0)
        penalty = sum((p.square().sum() for p in model.parameters() if hasattr(p, "factor")), torch.zeros(()))
        return model(x).square().mean() * self.weight * factor * more + 0.01 * penalty


class Scene(SimpleNamespace):
    model: Net
    loss: Loss
    optimizer: torch.optim.Optimizer
    patch: pytest.MonkeyPatch


def set_global(scene: Scene) -> None:
    global factor
    factor = 3.0


def set_class(scene: Scene) -> None:
    Settings.gamma = 3.0


def set_class_of_model(scene: Scene) -> None:
    Net.eta = 3.0


def set_module(scene: Scene) -> None:
    numbers.zeta = 3.0  # type: ignore[attr-defined]


def set_function(scene: Scene) -> None:
    helper.epsilon = 3.0  # type: ignore[attr-defined]


def set_new_attribute_of_function(scene: Scene) -> None:
    bare.amount = 3.0  # type: ignore[attr-defined]


def set_by_word(scene: Scene) -> None:
    globals()["by_word"] = 3.0


def set_slot(scene: Scene) -> None:
    slotted.delta = 3.0


def set_array(scene: Scene) -> None:
    array[0] = 3.0


def set_variable(scene: Scene) -> None:
    variable.set(3.0)


def set_answer(scene: Scene) -> None:
    answering.known["iota"] = 3.0


def set_ctypes(scene: Scene) -> None:
    count.value = 3.0


def set_through_a_view(scene: Scene) -> None:
    shown[0] = 3


def set_metaclass(scene: Scene) -> None:
    Kind.value = 3.0


def set_attribute_of_parameter(scene: Scene) -> None:
    scene.model.first.weight.factor = 3.0  # type: ignore[attr-defined]


def set_new_attribute_of_parameter(scene: Scene) -> None:
    scene.model.last.weight.factor = 3.0  # type: ignore[attr-defined]


def set_attribute_of_buffer(scene: Scene) -> None:
    scene.model.shift.mark["lambda"] = 3.0  # type: ignore[attr-defined]


def set_attribute_of_tensor(scene: Scene) -> None:
    kept.mu = 3.0  # type: ignore[attr-defined]


def replace_entries_of_object(scene: Scene) -> None:
    scene.model.config.__dict__ = {"alpha": 3.0}


def replace_class_of_module(scene: Scene) -> None:
    scene.model.passed.__class__ = Tripled


def set_hidden(scene: Scene) -> None:
    scene.model._hidden[0]["theta"] = 3.0


def delete_state_of_one(scene: Scene) -> None:
    del scene.optimizer.state[scene.model.last.weight]


def set_deep(scene: Scene) -> None:
    tree["a"]["b"]["c"]["d"]["e"] = 3.0


def set_long(scene: Scene) -> None:
    scene.model.long[700] = 3.0


def replace_function_of_torch(scene: Scene) -> None:
    scene.patch.setattr(torch, "tanh", torch.sin)


def replace_functional(scene: Scene) -> None:
    scene.patch.setattr(F, "relu", torch.sin)


def replace_functional_that_torch_calls(scene: Scene) -> None:
    scene.patch.setattr(F, "linear", lambda x, weight, bias: 2 * (x @ weight.t()) + bias)


def replace_forward_of_torch(scene: Scene) -> None:
    scene.patch.setattr(nn.Tanh, "forward", lambda self, x: torch.sin(x))


def replace_method_of_tensors(scene: Scene) -> None:
    scene.patch.setattr(Tensor, "square", lambda self: self.abs(), raising=False)


def replace_function_of_python(scene: Scene) -> None:
    scene.patch.setattr(math, "sqrt", lambda x: 3.0)


def replace_method(scene: Scene) -> None:
    scene.patch.setattr(Net, "scaled", lambda self, y: 3 * y)


def replace_operator(scene: Scene) -> None:
    scene.patch.setattr(Loss, "__getitem__", lambda self, index: 3.0)


def set_default(scene: Scene) -> None:
    scene.patch.setattr(Loss.__call__, "__kwdefaults__", {"by_keyword": 3.0})


def set_loss(scene: Scene) -> None:
    scene.loss.weight = 3.0


def set_config(scene: Scene) -> None:
    scene.model.config.alpha = 3.0


def set_table(scene: Scene) -> None:
    scene.model.table["beta"] = 3.0


def set_list(scene: Scene) -> None:
    scene.model.scales[0] = 3.0


def assign_buffer(scene: Scene) -> None:
    scene.model.shift = torch.ones(1)


def swap_module(scene: Scene) -> None:
    scene.model.act = nn.ReLU()


def replace_forward(scene: Scene) -> None:
    scene.model.forward = lambda x: scene.model.first(x).sum(1)  # type: ignore[method-assign]


def add_forward_hook(scene: Scene) -> None:
    scene.model.last.register_forward_hook(lambda module, given, out: out * 3)


def add_gradient_hook(scene: Scene) -> None:
    scene.model.last.weight.register_hook(lambda gradient: gradient * 3)


def add_optimizer_hook(scene: Scene) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in scene.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    scene.optimizer.register_step_pre_hook(halve)


def clear_state(scene: Scene) -> None:
    scene.optimizer.state.clear()


def replace_head(scene: Scene) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        scene.model.last = nn.Linear(6, 1)
    scene.optimizer.param_groups[0]["params"][2:] = list(scene.model.last.parameters())


def replace_head_alone(scene: Scene) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        scene.model.last = nn.Linear(6, 1)


EVENTS: list[Callable[[Scene], None]] = [
    *(set_global, set_loss, set_config, set_table, set_list, assign_buffer, swap_module, replace_forward),
    *(
        set_class,
        set_class_of_model,
        set_module,
        set_function,
        set_new_attribute_of_function,
        set_by_word,
        set_slot,
        set_array,
        set_variable,
        set_hidden,
    ),
    *(set_answer, set_ctypes, set_through_a_view, set_metaclass, set_attribute_of_tensor, set_attribute_of_buffer),
    *(set_attribute_of_parameter, set_new_attribute_of_parameter, replace_entries_of_object, replace_class_of_module),
    delete_state_of_one,
    *(set_deep, set_long, set_default, replace_method, replace_operator, replace_function_of_python),
    *(replace_function_of_torch, replace_functional, replace_functional_that_torch_calls, replace_forward_of_torch),
    replace_method_of_tensors,
    *(add_forward_hook, add_gradient_hook, add_optimizer_hook, clear_state, replace_head, replace_head_alone),
]


def by_hand(scene: Scene, x: Tensor) -> Tensor:
    scene.optimizer.zero_grad()
    loss = scene.loss(scene.model, x)
    loss.backward()
    scene.optimizer.step()
    return loss.detach()


def train(mode: str, event: Callable[[Scene], None]) -> list[Tensor]:
    reset_python()
    torch.manual_seed(0)
    model = Net()
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=0.05), Loss()
    step = lockstep.TrainStep(model, optimizer, loss, mode=mode) if mode != "by hand" else None
    batches = torch.Generator().manual_seed(1)
    losses = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            scene = Scene(model=model, loss=loss, optimizer=optimizer, patch=patch)
            for index in range(8):
                if index == 4:
                    event(scene)
                x = torch.randn(8, 4, generator=batches)
                losses.append(by_hand(scene, x) if step is None else step(x))
    finally:
        reset_python()
    if mode == "graph":
        assert step is not None
        assert step.explain().num_program_calls >= 3  # it was a program before
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("mode", ["loop", "graph"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_change_between_steps_has_the_result_of_the_loop(
    event: Callable[[Scene], None], mode: str, uncompiled: None
) -> None:
    for found, right in zip(train(mode, event), train("by hand", event), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_world_that_stays_the_same_is_equal_to_itself() -> None:
    reset_python()
    world = World(Net(), Loss())
    before = world.values()
    assert world.values() == before
    assert world.changed(before) == ""


def test_an_attribute_with_the_name_of_a_global_is_no_global() -> None:
    global step
    reset_python()
    model, loss = Net(), Loss()
    world = World(model, loss)
    before = world.values()
    step = 2.0
    assert world.values() == before
    model.step = 2.0
    assert world.values() != before
    step = 1.0


def test_what_the_code_of_a_function_reads() -> None:
    def outer() -> Any:
        import json.decoder

        return json, [variable.get() for _ in range(2)], (lambda: tree.items())()

    reads = reads_of(outer.__code__)
    assert {"variable", "tree", "range"} <= set(reads.globals)
    assert not {"get", "items"} & set(reads.globals)
    assert {"get", "items"} <= set(reads.names)
    assert reads.imports == ("json.decoder",)
    assert {"json", "json.decoder"} <= {module.__name__ for module in modules_of(outer)}


@pytest.mark.parametrize("stays", [False, True])
def test_parameters_that_a_program_would_hold(stays: bool, uncompiled: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode="graph")
    for index in range(6):
        if index == 3:
            model.append(nn.Linear(4, 4)) if stays else model.__setitem__(1, nn.Linear(4, 4))
        step(torch.ones(2, 4))
    explained = step.explain()
    assert explained.num_program_calls == 2
    words = "2.weight came to the model after the step was made" if stays else "not, or no longer, the model's"
    assert words in " ".join(explained.reasons)


def test_all_modules_of_a_model_are_looked_at_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.program.world._MOST_LOOKS", 5)
    model = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(50)), Net())
    world = World(model, Loss())
    before = world.values()
    model[49][0].register_forward_hook(lambda *_: None)
    with_hook = world.values()
    assert with_hook != before
    model[50].step = 2.0
    assert world.values() != with_hook
    assert not world._waiting  # it would keep alive what it does not look at


class Bar:
    """As a progress bar is, which counts the steps."""

    def __init__(self) -> None:
        self.n, self.past = 0, {"seconds": [0.0]}


Bar.__module__ = "tqdm.std"


class Told(logging.LoggerAdapter):  # type: ignore[type-arg]
    scale = 1.0


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bar, self.told = nn.Linear(4, 1), Bar(), Told(logger, {})
        self.say = logger.isEnabledFor

    def forward(self, x: Tensor) -> Tensor:
        if self.say(logging.DEBUG):
            logger.debug("%d", self.bar.n)
        return self.linear(x) * self.told.scale  # type: ignore[no-any-return]


def loss_that_talks(model: nn.Module, x: Tensor) -> Tensor:
    logger.info("a step")
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_loggers_and_counters_are_not_looked_into(uncompiled: None) -> None:
    for index in range(300):
        logging.getLogger(f"lockstep.test_of_worlds.{index}")
    model = Talking()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_that_talks, mode="graph")
    for index in range(8):
        step(torch.ones(2, 4))
        model.bar.n += 1
        model.bar.past["seconds"].append(1.0)
        logging.getLogger(f"lockstep.test_of_worlds.{index}").isEnabledFor(11 + index)
        logger.isEnabledFor(11 + index)  # kept by the logger from now on
    explained = step.explain()
    assert explained.num_program_calls == 7, explained.reasons
    model.told.scale = 3.0  # of the program's own kind of one, what it has itself is seen
    step(torch.ones(2, 4))
    assert step.explain().num_program_calls == 7


def test_a_library_is_looked_into_less_deep_than_configurations() -> None:
    class Client:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    class ClientConfig(Client):
        pass

    def change_is_seen(kind: type) -> bool:
        deep = {"alpha": 1.0}
        held = SimpleNamespace(held=kind([[[deep]]]))
        world = World(nn.Identity(), lambda model, x: held)
        before = world.values()
        deep["alpha"] = 2.0
        return world.values() != before

    assert change_is_seen(Client)
    Client.__module__ = ClientConfig.__module__ = "numpy.of_a_test"
    assert not change_is_seen(Client)
    assert change_is_seen(ClientConfig)


@pytest.mark.parametrize("kind", [list, deque])
def test_a_long_history_is_data(kind: Any, uncompiled: None) -> None:
    model, history = nn.Linear(4, 1), kind([0.0] * 300)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (len(history) > 0)  # type: ignore[no-any-return]

    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, mode="graph")
    for _ in range(4):
        history.append(float(step(torch.ones(2, 4))))
    assert step.explain().num_program_calls == 3


def test_there_is_a_limit_to_all_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [dict.fromkeys(range(100), 1.0) for _ in range(10)]
    model = Net()

    def num_compared() -> int:
        values: Any = World(model, lambda model, x: tables).values()
        return sum(map(len, values))

    all_of_them = num_compared()
    monkeypatch.setattr("lockstep.program.world._MOST_COMPARED", 600)
    assert num_compared() < all_of_them - 500
    world = World(model, lambda model, x: tables)
    before = world.values()
    model.step = 2.0
    assert world.values() != before


def test_names_that_a_library_does_not_have_are_not_looked_up() -> None:
    world = World(Net(), Loss())
    reads: Any = [look.objects for look in world._looks if getattr(look.objects, "args", None)]
    named = [read.args for read in reads if isinstance(read.args[0], ModuleType)]
    names = {module.__name__: tuple(known) for module, known in named}
    assert "tanh" in names["torch"]
    assert "sqrt" in names["math"]
    assert "by_keyword" not in names["torch"]
    assert all(hasattr(math, name) for name in names["math"])


def test_a_hook_that_counts_is_for_the_loop(uncompiled: None) -> None:
    model, calls, sizes = Net(), [], {"sum": 0}

    def count(module: nn.Module, given: Any, output: Tensor) -> None:
        calls.append(len(output))

    def add(module: nn.Module, given: Any) -> None:
        sizes["sum"] += len(given[0])

    reset_python()
    model.first.register_forward_hook(count)
    model.last.register_forward_pre_hook(add)
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), Loss(), mode="graph")
    for _ in range(6):
        step(torch.ones(3, 4))
    assert (len(calls), sizes["sum"]) == (6, 18)
    assert "the step changes what Python holds" in " ".join(step.explain().reasons)
