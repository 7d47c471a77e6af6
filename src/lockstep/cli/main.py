"""Entry point of the ``lockstep`` console script."""

from __future__ import annotations

import os
import sys

from lockstep.version import __version__


def main() -> None:
    """Run the command; the version is printed before anything that takes time to import."""
    _open_closed_streams()
    if sys.argv[1:] == ["--version"]:
        print(f"lockstep {__version__}")
        return
    from lockstep.cli.commands import app

    app()


def _open_closed_streams() -> None:
    """Put nothing in the place of a standard stream that is closed: else the next file that is opened, or a socket,
    takes its number, and what ranks print would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
    # Python has none where it found the number closed.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    main()
