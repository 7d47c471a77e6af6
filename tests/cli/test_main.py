"""The ``lockstep`` command as a whole."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import lockstep
from launching import LOCKSTEP, run_command, write_script


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


def test_what_ranks_print_goes_nowhere_else_when_a_stream_is_closed(tmp_path: Path) -> None:
    """Not into a file or a socket that has got the number of the stream."""
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys
        with open(f"{sys.argv[1]}/streams-{os.environ['RANK']}", "w") as file:
            file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
        """,
    )
    words = [*LOCKSTEP, "run", "--no-install", "--nproc", "2", str(script), str(tmp_path)]
    done = subprocess.run(["sh", "-c", f"exec {shlex.join(words)} <&- >&- 2>&-"], timeout=200, check=False)
    assert done.returncode == 0
    for rank in (0, 1):
        assert (tmp_path / f"streams-{rank}").read_text() == "/dev/null /dev/null /dev/null"
