"""The folder of a launcher, and those that dead launchers left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch.jobs import RUN, summary
from launching import Launch, write_script
from lockstep.agree.alive import card
from lockstep.launch.run_folder import make_run_folder

MAKE = "from lockstep.launch.run_folder import make_run_folder; print(make_run_folder())"


def test_what_a_dead_launcher_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, check=True, timeout=200)
    dead = Path(done.stdout.strip())
    (dead / "attempt-0").mkdir()
    assert dead.parent == tmp_path
    living = tmp_path / "lockstep-run-living"
    elsewhere = tmp_path / "lockstep-run-elsewhere"  # of another container, of whose processes nothing is known
    unknown = tmp_path / "lockstep-run-unknown"
    for folder in (living, elsewhere, unknown):
        folder.mkdir()
    (living / "owner").write_text(card())
    told = json.loads((dead / "owner").read_text())
    (elsewhere / "owner").write_text(json.dumps({**told, "namespace": "another"}))
    (tmp_path / "lockstep-run-link").symlink_to(dead)
    made = make_run_folder()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {made.name, living.name, elsewhere.name, unknown.name, "lockstep-run-link"}


def test_nothing_is_left_in_a_temporary_folder_whatever_bytes_its_name_has(tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    place.mkdir()
    script = write_script(tmp_path / "train.py", "import os, sys\nsys.exit(int(os.environ['RANK']))\n")
    words = [*RUN, "--no-install", "--nproc", "2", "--report-dir", tmp_path / "reports", script]
    done = Launch(words, env={"TMPDIR": str(place)}).finish()
    assert done.exit_code == 1, done
    assert "sys.exit(1)" in summary(done)
    assert list(place.iterdir()) == []
