"""The compiler of a run of the tests: it makes the same once, and all else is the compiler's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler_cache import __file__ as SCRIPT

# Notes each call, fails where it is told to, and otherwise writes all its words into its output.
COMPILER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$*" in *-fail*) echo broken >&2; exit 3;; esac
out=""
for word in "$@"; do [ "$last" = -o ] && out="$word"; last="$word"; done
[ -z "$out" ] || echo "made $$" > "$out"
"""


class Compiler:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "g++"
        self.path.write_text(COMPILER)
        self.path.chmod(0o755)
        (folder / "kept").mkdir()

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", SCRIPT, self.path, self.folder / "kept", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    @property
    def num_calls(self) -> int:
        return len((self.folder / "calls").read_text().splitlines())

    def source(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_the_same_source_is_compiled_once_wherever_it_is(compiler: Compiler) -> None:
    outputs = []
    for name in ("a", "b"):
        source, output = compiler.source(f"{name}/kernel.cpp", "same"), compiler.folder / name / "kernel.so"
        assert compiler("-O3", source, "-o", output).returncode == 0
        outputs.append(output.read_text())
    assert compiler.num_calls == 1
    assert outputs[0] == outputs[1]
    assert sorted(os.listdir(compiler.folder / "b")) == ["kernel.cpp", "kernel.so"]


@pytest.mark.parametrize("other", ["source", "flag", "header"])
def test_what_differs_is_compiled_again(compiler: Compiler, other: str) -> None:
    for name in ("a", "b"):
        is_other = name == "b"
        source = compiler.source(f"{name}/kernel.cpp", "other" if is_other and other == "source" else "same")
        header = compiler.source(f"{name}/prefix.h", "other" if is_other and other == "header" else "same")
        flag = "-O1" if is_other and other == "flag" else "-O3"
        assert compiler(flag, "-include", header, source, "-o", compiler.folder / name / "out").returncode == 0
    assert compiler.num_calls == 2


def test_a_failure_is_told_and_not_kept(compiler: Compiler) -> None:
    source = compiler.source("kernel.cpp", "text")
    for number in (1, 2):
        done = compiler("-fail", source, "-o", compiler.folder / "out")
        assert (done.returncode, done.stderr) == (3, "broken\n")
        assert compiler.num_calls == number
    assert not list((compiler.folder / "kept").iterdir())


@pytest.mark.parametrize("words", [["--version"], ["-v"], ["missing.cpp", "-o", "out"], ["a.o", "b.o", "-o", "out"]])
def test_other_commands_are_passed_on(compiler: Compiler, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(compiler.folder)
    for number in (1, 2):
        assert compiler(*words).returncode == 0
        assert compiler.num_calls == number
