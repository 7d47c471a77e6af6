"""The shape of the code: who may know whom, where private torch lives, how long a file may be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent

# Each room and the rooms it may import; everything may import errors, settings, torch_private, version.
ALLOWED = {
    "plan": set(),
    "observe": set(),
    "agree": set(),
    "hooks": set(),
    "engine": {"plan", "agree", "observe"},
    "graph": {"engine", "plan", "agree", "observe"},
    "cli": {"observe", "plan", "install", "ddp"},
    "compiling": {"ddp", "graph"},
    "install": {"ddp"},
    "state_dict": set(),
    "errors": set(),
    "settings": set(),
    "torch_private": set(),
    "version": set(),
    "ddp": {"graph", "plan", "engine", "agree", "observe", "state_dict"},
}
COMMON = {"errors", "settings", "torch_private", "version"}
HARD_CAP = 600


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def lockstep_imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "lockstep" else [f"lockstep.{a.name}" for a in node.names]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("lockstep.")}
    return found


def test_arrows_point_one_way() -> None:
    wrong = []
    for path in sources():
        here = room(path)
        if here == "__init__":
            continue
        for there in lockstep_imports(ast.parse(path.read_text())) - {here} - COMMON:
            if there not in ALLOWED[here]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {there}")
    assert not wrong, wrong


PRIVATE = re.compile(r"(from|import) torch\.?[\w.]*\._|from torch[\w.]* import .*\b_\w+|torch\._[a-zA-Z]")


def test_private_torch_is_imported_through_one_door() -> None:
    wrong = []
    for path in sources():
        if room(path) == "torch_private":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if PRIVATE.search(line):
                wrong.append(f"{path.relative_to(SOURCE)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in sources() if (n := len(p.read_text().splitlines())) > HARD_CAP}
    assert not long, long


def test_the_public_names_are_frozen() -> None:
    assert set(lockstep.__all__) == {
        "DDP",
        "DistributedDataParallel",
        "Plan",
        "Timeline",
        "__version__",
        "compile",
        "errors",
        "explain",
        "hooks",
        "install",
        "uninstall",
        "unwrap",
        "write_report",
    }
    for name in lockstep.__all__:
        assert hasattr(lockstep, name)
