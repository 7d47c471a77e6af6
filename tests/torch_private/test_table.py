"""The door as a whole: the table of names is complete, and every name has a reason and a test."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from lockstep import torch_private as private

PARTS = private._NAMES_BY_PART
SOURCE = Path(private.__file__).parent
TESTS = Path(__file__).parent


def test_the_parts_are_the_files() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", *PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_exports_what_the_table_says(part: str) -> None:
    defined: set[str] = set()
    for node in ast.parse((SOURCE / f"{part}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert sorted(name for name in defined if not name.startswith("_")) == list(PARTS[part])
    assert all(hasattr(import_module(f"lockstep.torch_private.{part}"), name) for name in PARTS[part])
    assert f"from lockstep.torch_private.{part} import *" in (SOURCE / "__init__.py").read_text()  # for type checkers


@pytest.mark.parametrize("part", PARTS)
def test_no_part_loads_a_compiler(part: str) -> None:
    loaded = []
    for node in ast.parse((SOURCE / f"{part}.py").read_text()).body:
        if isinstance(node, ast.Import):
            loaded += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            loaded.append(node.module)
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))]


@pytest.mark.parametrize("part", PARTS)
def test_every_name_has_a_test(part: str) -> None:
    """By its name, so that it is the name that fails when torch moves what is behind it."""
    tests = {
        target.id if isinstance(node, ast.Assign) else node.name
        for node in ast.parse((TESTS / f"test_{part}.py").read_text()).body
        if isinstance(node, ast.FunctionDef | ast.Assign)
        for target in getattr(node, "targets", [None])
    }
    assert {f"test_{name}" for name in PARTS[part]} <= tests


@pytest.mark.parametrize("part", PARTS)
def test_every_name_has_a_reason(part: str) -> None:
    """Functions carry a docstring; constants a comment above them, or above the first of several."""
    text = (SOURCE / f"{part}.py").read_text()
    lines = text.splitlines()
    without = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            if not ast.get_docstring(node):
                without.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            first = node.lineno - 1
            while lines[first - 1] and not lines[first - 1].startswith("#"):
                first -= 1
            if target.id in PARTS[part] and not lines[first - 1].startswith("#"):
                without.append(target.id)
    assert not without


def test_a_name_is_kept_after_its_first_use() -> None:
    assert private.foreach_mul is vars(private)["foreach_mul"]
    assert {"foreach_mul", "without_compiler"} <= set(dir(private))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = private.no_such_name
