"""The ``lockstep`` command as a whole."""

from __future__ import annotations

import lockstep
from launching import LOCKSTEP, run_command


def test_version() -> None:
    done = run_command([*LOCKSTEP, "--version"])
    assert (done.exit_code, done.output) == (0, f"lockstep {lockstep.__version__}\n")


def test_unknown_command_is_refused() -> None:
    done = run_command([*LOCKSTEP, "fly"])
    assert done.exit_code == 2
    assert "fly" in done.errors


def test_help_of_run_names_our_options_and_torchruns() -> None:
    done = run_command([*LOCKSTEP, "run", "--help"])
    assert done.exit_code == 0
    for option in ("--nproc", "--no-install", "--max-restarts", "--rdzv-backend"):
        assert option in done.output
