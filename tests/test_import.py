"""``import lockstep`` costs little and changes nothing; what has to be changed waits for the first wrapper."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import LOCKSTEP, run_command

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "typer", "rich")

# Facts about a process that has imported torch; called before something is done, and after.
PROBE = """
import json, sys, torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch.nn.parallel import DistributedDataParallel as torch_class

def global_hooks():
    return {
        f"{m.__name__}.{name}": len(hooks)
        for m in (modules, optimizers)
        for name, hooks in vars(m).items()
        if name.startswith("_global") and isinstance(hooks, dict)
    }

def facts():
    return {
        "excepthook": sys.excepthook is sys.__excepthook__,
        "displayhook": sys.displayhook is sys.__displayhook__,
        "torch's class": torch.nn.parallel.DistributedDataParallel is torch_class,
        "its contents": sorted((name, id(value)) for name, value in vars(torch_class).items() if name[:4] != "_abc"),
        "its bases": [base.__name__ for base in torch_class.__mro__],
        "init_process_group": id(torch.distributed.init_process_group),
        "torch.compile": id(torch.compile),
        "module": sorted((name, id(value)) for name, value in vars(torch.nn.Module).items()),
        "optimizer": sorted((name, id(value)) for name, value in vars(torch.optim.Optimizer).items()),
        "global hooks": global_hooks(),
        "finders": len(sys.meta_path),
    }

def loaded(*names):
    return [name for name in names if name in sys.modules]

def answer(value):
    print("ANSWER", json.dumps(value))
"""

ONE_RANK = """
import tempfile, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
"""


def ask(script: str) -> Any:
    done = run_command([sys.executable, "-c", PROBE + script])
    assert done.exit_code == 0, done
    return json.loads(done.lines[-1].removeprefix("ANSWER "))


def test_import_loads_no_compiler_and_no_command_line() -> None:
    assert ask(f"import lockstep; answer(loaded(*{HEAVY}))") == []


def test_import_loads_no_torch() -> None:
    done = run_command([sys.executable, "-c", "import sys, lockstep; print('torch' in sys.modules)"])
    assert done.lines == ["False"]


def test_the_names_of_the_wrapper_load_no_compiler() -> None:
    heavy = [name for name in HEAVY if name != "sympy"]
    every = "[getattr(lockstep, name) for name in lockstep.__all__]"
    assert ask(f"import lockstep; {every}; answer(loaded(*{heavy}))") == []


def test_import_changes_nothing() -> None:
    before, after = ask("before = facts(); import lockstep; answer([before, facts()])")
    assert before == after
    assert before["excepthook"]
    assert not any(before["global hooks"].values())


def test_the_class_changes_nothing_before_a_model_is_wrapped() -> None:
    before, after = ask("before = facts(); import lockstep; lockstep.DDP; lockstep.hooks; answer([before, facts()])")
    assert before == after


def test_the_first_wrapper_watches_modules_and_optimizers_and_a_second_adds_nothing() -> None:
    first, second = ask(
        f"{ONE_RANK}\nimport lockstep\nmade, hooks = [], []\n"
        "for _ in range(2):\n"
        "    made.append(lockstep.DDP(torch.nn.Linear(2, 2)))\n"
        "    hooks.append({name: num for name, num in global_hooks().items() if num})\n"
        "answer(hooks)"
    )
    assert first == second
    assert first == {
        "torch.nn.modules.module._global_parameter_registration_hooks": 1,
        "torch.optim.optimizer._global_optimizer_pre_hooks": 1,
    }


def test_an_eager_step_loads_nothing_of_inductor() -> None:
    """Beyond what torch's optimizers load themselves, which is dynamo, and the settings of Inductor with it."""
    more = ask(
        f"{ONE_RANK}\nimport lockstep\n"
        "inductor = lambda: {name for name in sys.modules if name.startswith('torch._inductor')}\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "before = inductor()\n"
        "model = lockstep.DDP(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "answer(sorted(inductor() - before))"
    )
    assert more == []


def test_without_compiler_waits_for_the_compiler() -> None:
    script = """
from lockstep import torch_private

@torch_private.without_compiler
def look(x):
    return x, torch_private.compiler_is_watching()

early = look(1)[1], loaded("torch._dynamo")
compiled = torch.compile(lambda x: look(x), backend="eager")
answer([early, compiled(torch.ones(1))[1], bool(loaded("torch._dynamo"))])
"""
    assert ask(script) == [[False, []], False, True]


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param("", id="nothing imported"),
        pytest.param("import lockstep.graph.backend", id="imported before"),
        pytest.param("from lockstep.ddp.activate import activate; activate()", id="wrapped before"),
    ],
)
def test_the_backend_is_known_by_name(prepare: str) -> None:
    if not _is_installed():
        pytest.skip("lockstep is not installed, and the name comes with the installed package")
    script = f"""
{prepare}
compiled = torch.compile(lambda x: x + 1, backend="lockstep")
from lockstep.ddp.activate import activate
activate(); activate()
from torch._dynamo.backends.registry import lookup_backend
from lockstep.graph.backend import lockstep_backend
answer(lookup_backend("lockstep") is lockstep_backend)
"""
    assert ask(script)


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return "lockstep" in entry_points(group="torch_dynamo_backends").names


def test_install_finds_torchs_class_whatever_was_loaded() -> None:
    """dynamo may be loaded while Lockstep stands in torch's place; afterwards it must know torch's class again."""
    during, kept, after = ask(
        "own = (torch_class,)  # the name in this module is exchanged, too\n"
        "import lockstep; lockstep.install()\n"
        "import torch._dynamo.convert_frame as later\n"
        "during = later.DistributedDataParallel is lockstep.DDP\n"
        "from lockstep import torch_private\n"
        "kept = torch_private.TorchDDP is own[0]\n"
        "lockstep.uninstall()\n"
        "answer([during, kept, later.DistributedDataParallel is own[0]])"
    )
    assert (during, kept, after) == (True, True, True)


def test_install_is_the_function_however_it_was_imported() -> None:
    answers = ask(
        "import lockstep.install\nfrom lockstep.install import install\nfrom lockstep import install as same\n"
        "answer([callable(lockstep.install), lockstep.install is install is same])"
    )
    assert answers == [True, True]


def test_unknown_names_are_refused_by_name() -> None:
    import lockstep

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lockstep.no_such_name
    assert set(lockstep.__all__) <= set(dir(lockstep))


def test_the_version_is_printed_without_torch_and_without_a_command_line() -> None:
    done = run_command([sys.executable, "-X", "importtime", *LOCKSTEP[1:], "--version"])
    imported = {line.rpartition("|")[2].strip() for line in done.errors.splitlines()}
    assert "lockstep.cli.main" in imported
    assert not imported & {"torch", "typer", "rich"}


@pytest.mark.parametrize("words", [["--help"], ["env", "--help"]])
def test_help_is_printed_without_torch(words: list[str]) -> None:
    done = run_command([sys.executable, "-X", "importtime", *LOCKSTEP[1:], *words])
    imported = {line.rpartition("|")[2].strip() for line in done.errors.splitlines()}
    assert "typer" in imported
    assert "torch" not in imported


def test_the_lazy_names_are_those_that_type_checkers_see() -> None:
    import ast

    import lockstep

    tree = ast.parse(Path(lockstep.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep")
        for alias in node.names
    }
    assert imported == set(lockstep.__all__)
    assert set(lockstep._MODULE_OF) == imported - {"install", "uninstall", "__version__"}
