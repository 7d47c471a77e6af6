"""Artifacts: the file, what is compared before it is used, and what is refused with what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import torch_private
from lockstep.program import artifact as files
from lockstep.program.artifact import Artifact, Refused

LIBRARY = "c" + "a" * 51 + ".main.so"
MADE = Artifact({"torch": "2.0", "number of ranks": "4"}, "", ("abc",), b"graphs", {LIBRARY: b"\x7fELF code"})


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    digest = MADE.write(tmp_path / "new folder" / "step.lockstep")
    found = files.read(tmp_path / "new folder" / "step.lockstep", expected=f"sha256:{digest.upper()}")
    assert found == Artifact(MADE.facts, "", ("abc",), b"graphs", MADE.libraries, digest)
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["step.lockstep"]


def test_every_flipped_byte_and_every_cut_is_refused(tmp_path: Path) -> None:
    content, _ = MADE.to_bytes()
    path = tmp_path / "step.lockstep"
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(Refused):
            files.read(path)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(Refused):
            files.read(path)
    path.write_bytes(content + b"x")
    with pytest.raises(Refused, match="changed or cut"):
        files.read(path)


def test_another_file_than_the_one_that_was_asked_for(tmp_path: Path) -> None:
    digest = MADE.write(tmp_path / "step.lockstep")
    with pytest.raises(Refused, match=f"has the digest {digest}, and {'0' * 64} was asked for"):
        files.read(tmp_path / "step.lockstep", expected="0" * 64)
    with pytest.raises(Refused, match=r"none.lockstep cannot be read: No such file"):
        files.read(tmp_path / "none.lockstep")


def test_a_library_cannot_be_written_elsewhere(tmp_path: Path) -> None:
    Artifact({}, "", (), b"", {"../../" + LIBRARY: b"x"}).write(tmp_path / "step.lockstep")
    with pytest.raises(Refused, match="a library is called"):
        files.read(tmp_path / "step.lockstep")


# ---------------------------------------------------------------- what is compared


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def squared(model: Any, batch: Any) -> Any:
    return model(batch).pow(2).mean()


def absolute(model: Any, batch: Any) -> Any:
    return model(batch).abs().mean()


def made(load: Path | None = None, width: int = 4, loss: Any = squared, change: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Small(width)
    kind, settings = options.pop("optimizer", (torch.optim.AdamW, {"lr": 0.1}))
    optimizer = kind(model.parameters(), **settings)
    if change is not None:
        change(model)
    options = {"mode": "loop", **options}
    if load is None:
        return lockstep.TrainStep(model, optimizer, loss, **options)
    return lockstep.load_step(load, model, optimizer, loss, **options)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was loaded; the compiler has nothing to do with these tests."""
    found: list[bytes] = []

    def load(graphs: bytes, libraries: dict[str, bytes]) -> int:
        found.append(graphs)
        return 1

    for name, stand_in in {
        "save_compiled": lambda: (b"graphs", 1),
        "compiled_libraries": dict,
        "load_compiled": load,
    }.items():
        monkeypatch.setattr(torch_private, name, stand_in, raising=False)
    return found


def start(step: Any) -> str:
    step(torch.ones(2, 3))
    return str(step.explain())


def test_the_same_step_loads_it(loaded: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "step.lockstep"
    step = made()
    start(step)
    digest = step.save(path)
    text = start(made(path, digest=digest))
    assert loaded == [b"graphs"]
    assert f"artifact {path} (sha256 {digest[:16]}..., 1 graphs) was loaded" in text
    # Another learning rate is an input of the program.
    start(made(path, optimizer=(torch.optim.AdamW, {"lr": 0.7})))
    assert len(loaded) == 2


def frozen(model: Any) -> None:
    model.inner.weight.requires_grad_(False)


def evaluating(model: Any) -> None:
    model.norm.eval()


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 5}, r"parameter inner\.weight: made for \[4, 3\] .*, here \[5, 3\]"),
    "weight decay": ({"optimizer": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5})}, "weight_decay"),
    "optimizer": ({"optimizer": (torch.optim.SGD, {"lr": 0.1})}, "optimizers: made for AdamW, here SGD"),
    "clipping": ({"clip_norm": 1.0}, r"clip_norm: made for None, here 1\.0"),
    "accumulation": ({"accumulate": 2}, "accumulate: made for 1, here 2"),
    "average": ({"average": 0.5}, r"average: made for False, here 0\.5|average: made for None"),
    "mode": ({"mode": "auto"}, "mode: made for loop, here auto"),
    "loss": ({"loss": absolute}, r"loss function: made for squared \(\w+\), here absolute"),
    "frozen": ({"change": frozen}, r"inner\.weight: .*here .*, frozen"),
    "eval": ({"change": evaluating}, r"evaluation mode: made for none, here norm \(1\)"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_step_refuses_it_with_what_differs(name: str, loaded: list[bytes], tmp_path: Path) -> None:
    import re

    step = made()
    start(step)
    step.save(tmp_path / "step.lockstep")
    options, pattern = DIFFERENT[name]
    text = start(made(tmp_path / "step.lockstep", **options))
    assert "is not used: it was made for something else; " in text
    assert re.search(pattern, text), text
    assert not loaded


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        ("torch.__version__", "9.9.9", "torch: made for 9.9.9 ("),
        ("lockstep.program.facts.__version__", "0.0.1", "Lockstep: made for 0.0.1, here"),
        ("lockstep.program.facts._processor", lambda: "riscv", "processor: made for riscv, here"),
        ("lockstep.program.facts._device", lambda device: "H200", "device: made for H200, here cpu"),
        ("torch.get_num_threads", lambda: 64, "threads of a rank (OMP_NUM_THREADS): made for 64, here"),
    ],
)
def test_another_machine_refuses_it(
    place: str, value: Any, shown: str, loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = made()
    start(step)
    with monkeypatch.context() as there:
        there.setattr(place, value)
        step.save(tmp_path / "step.lockstep")
    assert shown in start(made(tmp_path / "step.lockstep"))
    assert not loaded


def test_another_option_of_the_compiler_refuses_it(loaded: list[bytes], tmp_path: Path) -> None:
    from torch._inductor import config

    step = made()
    start(step)
    with config.patch(max_autotune=not config.max_autotune):
        step.save(tmp_path / "step.lockstep")
    assert "Inductor's max_autotune: made for True, here False" in start(made(tmp_path / "step.lockstep"))
    with config.patch(fx_graph_cache=False):
        step.save(tmp_path / "step.lockstep")
        assert "fx_graph_cache" in start(made(tmp_path / "step.lockstep"))
    assert not loaded


def test_a_file_that_was_changed_is_never_given_to_torch(loaded: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "step.lockstep"
    step = made()
    start(step)
    step.save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "was changed or cut after it was written" in start(made(path))
    assert not loaded


def test_it_is_loaded_only_where_the_user_says_so(
    loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.program import loading

    step = made()
    start(step)
    step.save(tmp_path / "step-0.lockstep")
    monkeypatch.chdir(tmp_path)
    assert "artifact" not in start(made())
    assert not loaded
    monkeypatch.setattr(loading, "_num_steps", 0)
    monkeypatch.setenv("LOCKSTEP_ARTIFACTS", str(tmp_path))
    assert "was loaded" in start(made())
    assert "step-1.lockstep cannot be read" in start(made())  # the second step of the program
    assert len(loaded) == 1


def test_what_cannot_be_saved_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_private, "save_compiled", lambda: (b"", 0), raising=False)
    with pytest.raises(RuntimeError, match="Nothing was compiled that could be saved"):
        made().save(tmp_path / "step.lockstep")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("digest", ["", "abc", 5, "g" * 64])
def test_a_digest_that_is_none(digest: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        made(tmp_path / "step.lockstep", digest=digest)


def test_a_cache_that_cannot_be_written_is_no_error(
    loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError("no space left on device")

    step = made()
    start(step)
    step.save(tmp_path / "step.lockstep")
    monkeypatch.setattr(torch_private, "load_compiled", fail, raising=False)
    assert "no space left on device" in start(made(tmp_path / "step.lockstep"))


def test_a_plan_that_cannot_be_read_is_no_error(loaded: list[bytes], tmp_path: Path, world_of_one: None) -> None:
    import dataclasses

    torch.manual_seed(0)

    def make(path: Path | None = None) -> Any:
        model = lockstep.DDP(Small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if path is None:
            return lockstep.TrainStep(model, optimizer, squared, mode="loop")
        return lockstep.load_step(path, model, optimizer, squared, mode="loop")

    step = make()
    start(step)
    step.save(tmp_path / "step.lockstep")
    assert "was loaded" in start(make(tmp_path / "step.lockstep"))
    found = files.read(tmp_path / "step.lockstep")
    for plan in ("", "{}", "no JSON", found.plan.replace("0", "1")):
        dataclasses.replace(found, plan=plan).write(tmp_path / "step.lockstep")
        assert "is not used" in start(make(tmp_path / "step.lockstep"))
    assert len(loaded) == 1


def test_a_schedule_that_moves_settings_makes_no_artifact_foreign() -> None:
    """An artifact is saved after some updates, and loaded before the first."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).mean(), mode="loop", scheduler=schedule)
    before = step._artifact_facts()
    for _ in range(3):
        step(torch.ones(2, 3))
    assert optimizer.param_groups[0]["betas"][0] != 0.95
    assert step._artifact_facts() == before
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert step._artifact_facts()
