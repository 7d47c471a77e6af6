"""Entry point of the ``lockstep`` console script."""

from __future__ import annotations

import sys

from lockstep.version import __version__


def main() -> None:
    """Run the command; the version is printed before anything that takes time to import."""
    if sys.argv[1:] == ["--version"]:
        print(f"lockstep {__version__}")
        return
    from lockstep.cli.commands import app

    app()


if __name__ == "__main__":
    main()
