"""What a checkpoint holds, and that it goes back where it came from, whatever the model is wrapped in."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lockstep
from checkpoint.runs import Run
from lockstep.checkpoint import load, save, verify
from lockstep.errors import CheckpointFailed


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(5, 4)
        self.outer = nn.Linear(4, 5, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def test_a_resumed_run_is_bitwise_equal_at_every_step(tmp_path: Path) -> None:
    straight = Run()
    straight.train(12)
    for stop in range(1, 12):
        run = Run()
        run.train(stop)
        run.save(tmp_path / str(stop))
        resumed = Run(seed=77)
        loaded = resumed.load(tmp_path / str(stop))
        assert loaded.is_bitwise
        resumed.train(12 - stop)
        assert resumed.bits() == straight.bits()
        assert run.losses + resumed.losses == straight.losses


def test_random_numbers(tmp_path: Path) -> None:
    model, generator = nn.Linear(1, 1), torch.Generator().manual_seed(3)
    numpy.random.standard_normal()  # leaves half of a pair behind
    save(tmp_path, model, step=0, per_rank={"data": generator}).wait()

    def draw() -> list[Any]:
        return [
            random.random(),
            numpy.random.standard_normal(),
            torch.rand(1).item(),
            torch.rand(1, generator=generator).item(),
        ]

    first = draw()
    assert draw() != first
    load(tmp_path, model, per_rank={"data": generator})
    assert draw() == first


def test_scheduler_scaler_and_extra(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    average = torch.optim.swa_utils.AveragedModel(model)
    extra = {"best": 0.5, "average": average, "path": ("a", None)}
    save(tmp_path, model, optimizer, step=3, scheduler=scheduler, scaler=scaler, extra=extra).wait()
    saved = [scheduler.state_dict(), scaler.state_dict(), average.module.weight.clone()]
    scheduler.step(0.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    with torch.no_grad():
        average.module.weight.zero_()
    loaded = load(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler, extra={"average": average})
    assert loaded is not None
    assert [scheduler.state_dict(), scaler.state_dict()] == saved[:2]
    assert torch.equal(average.module.weight, saved[2])
    assert (loaded.step, loaded.extra["best"], loaded.extra["path"]) == (3, 0.5, ("a", None))


def test_tied_parameters_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, Tied(), step=0).wait()
    manifest = lockstep.checkpoint.reading.Reader(tmp_path / "step-00000000").manifest
    assert [name for name in manifest.tensors if name.startswith("model/")] == ["model/inner.weight"]
    other = Tied()
    load(tmp_path, other)
    assert other.inner.weight is other.outer.weight


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("saved_as", ["plain", "ddp", "compiled", "ddp(compiled)", "compiled(ddp)"])
@pytest.mark.parametrize("loaded_as", ["plain", "ddp", "compiled", "ddp(compiled)", "compiled(ddp)"])
def test_names_are_those_of_the_plain_model(tmp_path: Path, saved_as: str, loaded_as: str) -> None:
    def wrap(how: str, model: nn.Module) -> nn.Module:
        for word in reversed(how.rstrip(")").split("(")):
            if word == "ddp":
                model = lockstep.DDP(model)
            elif word == "compiled":
                model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        return model

    def build(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrap(how, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(saved_as)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save(tmp_path, model, optimizer, step=1).wait()
    names = lockstep.checkpoint.reading.Reader(tmp_path / "step-00000001").shared()["model"]
    assert set(names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    other, other_optimizer = build(loaded_as)
    load(tmp_path, other, other_optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], other_optimizer.state[theirs]["exp_avg"])


def test_a_submodule_that_is_compiled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    save(tmp_path, model, step=0).wait()
    plain = nn.Sequential(nn.Linear(2, 2))
    load(tmp_path, plain)
    assert torch.equal(plain[0].weight, model[0].weight)


def test_optimizer_state_goes_by_name(tmp_path: Path) -> None:
    """Another order of parameters, and another grouping order inside a group, change nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path, model, optimizer, step=1).wait()
    backwards = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)
    load(tmp_path, model, backwards)
    for parameter in model.parameters():
        assert torch.equal(backwards.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), step=0).wait()
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1), nn.Linear(1, 1)).double()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit; nothing was changed") as caught:
        load(tmp_path, other, torch.optim.SGD([other[0].weight], lr=0.1), scheduler=nn.Module(), extra={"x": 1})
    for words in (
        "the model has 2.weight",
        "1.weight has the shape [1, 3] there, and [1, 4] in the model",
        "0.bias is float32 there, and torch.float64",
        "group 0 of the optimizer differs in 0.bias",
        "saved without scheduler=",
        "saved without extra['x']",
    ):
        assert words in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_an_optimizer_of_another_kind(tmp_path: Path) -> None:
    """Its settings would take the place of this one's, which then has none of its own."""
    model = nn.Linear(2, 3)
    save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step=0).wait()
    with pytest.raises(ValueError, match=r"group 0 was saved by an optimizer of another kind: it has momentum.*betas"):
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.CyclicLR(scheduled, 0.1, 0.2, cycle_momentum=False)
    load(tmp_path, model, scheduled)
    assert scheduled.param_groups[0]["momentum"] == 0.9


def test_a_scheduler_of_another_kind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, model, step=0, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3)).wait()
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    before = other.state_dict()
    with pytest.raises(ValueError, match="it has gamma, step_size, and this one, a CosineAnnealingLR, has T_max, eta"):
        load(tmp_path, model, scheduler=other)
    assert other.state_dict() == before


class WithState(nn.Linear):
    """A module with a state beside its tensors, which it may refuse."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = [1]

    def get_extra_state(self) -> list[int]:
        return self.count

    def set_extra_state(self, state: list[int]) -> None:
        self.count = state
        if state == [2]:
            raise RuntimeError("not two")


def test_a_load_that_is_refused_on_the_way_changes_nothing(tmp_path: Path) -> None:
    """By torch's own loading, by a module, by a user's object."""
    model = WithState()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    generator = torch.Generator()
    save(tmp_path / "good", model, optimizer, step=0, per_rank={"data": generator}).wait()
    model.count = [2]
    save(tmp_path / "bad", model, optimizer, step=0).wait()
    model.count = [1]
    optimizer.step()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    groups, state, momentum = optimizer.param_groups, optimizer.state, optimizer.state[model.weight]["momentum_buffer"]

    def check(words: str, path: Path, **others: Any) -> None:
        numbers = torch.get_rng_state(), random.getstate()
        with pytest.raises(RuntimeError, match=words) as caught:
            load(path, model, optimizer, **others)
        assert not hasattr(caught.value, "__notes__")
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in kept.items())
        assert model.count == [1]
        assert (optimizer.param_groups, optimizer.state) == (groups, state)
        assert optimizer.state[model.weight]["momentum_buffer"] is momentum
        assert torch.equal(torch.get_rng_state(), numbers[0])
        assert random.getstate() == numbers[1]

    check("not two", tmp_path / "bad")

    def refuse(*_: Any) -> None:
        raise RuntimeError("not by a hook")

    with optimizer.register_load_state_dict_post_hook(refuse) as _:
        check("not by a hook", tmp_path / "good")

    class Refusing:
        def load_state_dict(self, state: Any) -> None:
            self.half = state
            raise RuntimeError("not by an object")

    refusing = Refusing()
    check("not by an object", tmp_path / "good", per_rank={"data": refusing})
    assert not vars(refusing)


def test_not_strict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    save(tmp_path, model, step=0).wait()
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    load(tmp_path, other, strict=False)
    assert torch.equal(other[0].weight, model[0].weight.double())


def two_in_one() -> torch.Tensor:
    """A tensor that has no memory of its own, as quantised weights of libraries have not."""
    return TwoTensor(torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda run: run.model.register_buffer("b", torch.eye(2).to_sparse()), "model/b is a tensor of layout"),
        (lambda run: run.model.register_buffer("b", torch.empty(2, device="meta")), "model/b is on the meta device"),
        (lambda run: run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), "does not have"),
        (lambda run: setattr(run.scheduler, "hook", print), "scheduler/hook is a builtins"),
        (lambda run: run.model.append(nn.LazyLinear(2)), "is not initialised yet"),
        (lambda run: run.model.register_buffer("$", torch.ones(1)), r"whole name is '\$', which cannot be stored"),
        (lambda run: run.model.register_buffer("b", two_in_one()), "model/b is a torch.* a kind of tensor that cannot"),
        (
            lambda run: run.model.register_buffer("b", torch.zeros(2).to(torch.float8_e8m0fnu)),
            "model/b: a tensor of dtype",
        ),
        (lambda run: run.model.register_buffer("b", torch.nested.nested_tensor([torch.ones(1)])), "model/b .* nested"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, break_it: Any, words: str) -> None:
    run = Run()
    break_it(run)
    with pytest.raises((TypeError, ValueError), match=words):
        run.save(tmp_path, asynchronous=True)
    lockstep.checkpoint.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_a_conjugate_is_not_taken_for_what_it_is_a_view_of(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    values = {"z": z, "conjugate": z.conj(), "negative": z.conj().imag, "part": z.imag}
    save(tmp_path, nn.Linear(1, 1), step=0, extra=values, asynchronous=False)
    loaded = load(tmp_path, nn.Linear(1, 1))
    assert loaded is not None
    assert {name: value.tolist() for name, value in loaded.extra.items()} == {n: v.tolist() for n, v in values.items()}


@pytest.mark.parametrize("step", [-1, 2.5, math.nan, "3", None, 10**20])
def test_steps_that_are_none(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match=r"step is .* whole number"):
        save(tmp_path, nn.Linear(1, 1), step=step)


@pytest.mark.parametrize("keep", [0, 2.5, "3"])
def test_numbers_to_keep_that_are_none(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match=r"keep is .* at least 1"):
        save(tmp_path, nn.Linear(1, 1), step=1, keep=keep)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(2, device="meta"), "b is on the meta device"),
        (two_in_one, "a kind of tensor that cannot be stored"),
        (lambda: torch.zeros(1).expand(2), "b is expanded in the model"),
    ],
)
def test_what_cannot_be_written_into_is_named_and_nothing_is_changed(tmp_path: Path, make: Any, words: str) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("b", torch.ones(2))
    save(tmp_path, model, step=0, asynchronous=False)
    other = nn.Linear(1, 1)
    other.register_buffer("b", make())
    before = other.weight.item()
    with pytest.raises(ValueError, match=words):
        load(tmp_path, other)
    assert other.weight.item() == before


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(1, 1), step=1, asynchronous=False)
    with pytest.raises(CheckpointFailed, match="this is a checkpoint; give the folder it is in"):
        save(tmp_path / "step-00000001", nn.Linear(1, 1), step=2, asynchronous=False)
    verify(tmp_path)


def two_optimizers(first: nn.Module, second: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)]


def test_several_optimizers(tmp_path: Path) -> None:
    model, other, alone = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(3, 1), nn.Linear(2, 1)
    one, two = two_optimizers(model[0], model[1])
    stranger = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)  # of another model: by positions
    for _ in range(2):
        (model(torch.ones(1, 2)) + alone(torch.ones(1, 2))).sum().backward()
        for optimizer in (one, two, stranger):
            optimizer.step()
    save(tmp_path, model, one, step=2, extra={"two": two, "stranger": stranger}, asynchronous=False)
    again = nn.Sequential(nn.Linear(2, 3), other)
    new_one, new_two = two_optimizers(again[0], again[1])
    new_stranger = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    load(tmp_path, again, new_one, extra={"two": new_two, "stranger": new_stranger})
    for before, after in ((one, new_one), (two, new_two), (stranger, new_stranger)):
        saved, loaded = before.state_dict(), after.state_dict()
        assert saved["param_groups"] == loaded["param_groups"]
        assert str(saved["state"]) == str(loaded["state"])
    loaded_alone = load(tmp_path, again)
    assert loaded_alone is not None
    assert list(loaded_alone.extra["two"]["state"]) == ["1.weight", "1.bias"]  # without the optimizer: its values
    with pytest.raises(ValueError, match=r"extra\['two'\] goes by the names .* this optimizer has others"):
        load(tmp_path, again, extra={"two": stranger})
    with pytest.raises(ValueError, match=r"group 0 of extra\['two'\] differs in"):
        load(tmp_path, again, extra={"two": new_one})


class Lookahead(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    slow = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = state_dict["slow"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "slow"})


def test_an_optimizer_that_keeps_more_than_the_state_of_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.slow = 7
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path, model, step=torch.tensor(3), extra={"it": optimizer}, asynchronous=False)
    again = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
    load(tmp_path, model, extra={"it": again})
    assert again.slow == 7
    assert str(again.state_dict()) == str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"belongs to no parameter \(slow\); give it as extra="):
        save(tmp_path, model, optimizer, step=4, asynchronous=False)


def test_several_optimizers_are_told_how(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="optimizer is a list; give one optimizer, and others by name"):
        save(tmp_path, nn.Linear(1, 1), [], step=1)  # type: ignore[arg-type]


def test_objects_without_a_state_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"scheduler is a dict, which has no state_dict\(\)"):
        save(tmp_path, nn.Linear(2, 2), step=0, scheduler={})
    with pytest.raises(TypeError, match="model is a NoneType"):
        save(tmp_path, None, step=0)  # type: ignore[arg-type]
    for name, words in (("model", "model is a list"), ("optimizer", "optimizer is a list"), ("data", "data is a list")):
        with pytest.raises(TypeError, match=words):
            load(tmp_path, **{"model": nn.Linear(2, 2), name: []})  # type: ignore[arg-type]


def test_a_path_that_is_empty_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (partial(save, model=nn.Linear(2, 2), step=0), load, verify, lockstep.checkpoint.plan_of):
        with pytest.raises(ValueError, match="path is empty"):
            call("")
    assert not list(tmp_path.iterdir())


def test_nothing_is_unpickled() -> None:
    """Neither by us nor by torch for us; the door to DCP reads a pickle of known classes only."""
    source = Path(lockstep.checkpoint.__file__).parent
    for path in source.glob("*.py"):
        text = path.read_text()
        assert "weights_only=False" not in text
        assert "pickle.load" not in text
        assert ("import pickle" in text, "torch.load(" in text) == ((path.name == "dcp.py",) * 2)


@pytest.mark.usefixtures("world_of_one")
def test_a_window_that_is_open_is_refused(tmp_path: Path) -> None:
    model = lockstep.DDP(nn.Linear(2, 2))
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="gradients of no_sync"):
        save(tmp_path, model, step=0)


@pytest.mark.usefixtures("world_of_one")
def test_the_plan(tmp_path: Path) -> None:
    model = lockstep.DDP(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)), bucket_cap_mb=0.001)
    save(tmp_path, model, step=0).wait()
    assert lockstep.checkpoint.plan_of(tmp_path) == model.plan
    assert lockstep.checkpoint.plan_of(tmp_path / "nothing") is None
    other = lockstep.DDP(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)))
    loaded = load(tmp_path, other)
    assert loaded is not None
    assert not loaded.is_bitwise
    assert "plan_of" in loaded.notes[0]
    same = lockstep.DDP(other.module, plan=lockstep.checkpoint.plan_of(tmp_path))
    assert load(tmp_path, same).is_bitwise  # type: ignore[union-attr]


WRONG_MAPPINGS = [
    (lambda rank: rank, "of type function"),
    ([1], "of type list"),
    ({3: 1}, "has the key 3, of type int"),
]


@pytest.mark.parametrize(("given", "words"), WRONG_MAPPINGS)
@pytest.mark.parametrize("name", ["extra", "per_rank"])
def test_what_is_no_dict_of_names_is_refused_in_words(tmp_path: Path, name: str, given: Any, words: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=f"{name} .*{words}.*give a dict of names"):
        save(tmp_path, model, step=1, **{name: given})
    save(tmp_path, model, step=1).wait()
    with pytest.raises(TypeError, match=f"{name} .*{words}.*give a dict of names"):
        load(tmp_path, model, **{name: given})
    with pytest.raises(ValueError, match=f"{name} has the key .*which cannot be stored"):
        save(tmp_path, model, step=2, **{name: {"$": 1}})


def test_a_position_in_the_data_is_put_back_as_it_was(tmp_path: Path) -> None:
    """Also what its state does not say: that the epoch is over."""
    sampler = lockstep.data.ResumableSampler(range(4), seed=0, rank=0, world=1)
    loader = torch.utils.data.DataLoader(range(4), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    model = nn.Linear(1, 1)

    class Refusing:
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("not today")

    save(tmp_path, model, step=0, data=sampler, extra={"x": 1}).wait()
    list(sampler.batches(loader))
    before = dict(vars(sampler))
    with pytest.raises(RuntimeError, match="not today"):
        load(tmp_path, model, data=sampler, extra={"x": Refusing()})
    assert vars(sampler) == before
