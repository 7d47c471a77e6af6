"""The subcommands of ``lockstep``.  Each one's work is in a file of its own, imported when it is called for."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from lockstep.version import __version__

app = typer.Typer(
    name="lockstep",
    help="Data-parallel training for PyTorch in which every rank stays in step.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Verbatim(TyperCommand):
    """A command that gets its words untouched: torchrun's own parser reads them, not this one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Data-parallel training for PyTorch in which every rank stays in step."""


@app.command("run", cls=Verbatim, add_help_option=False)
def run_command(ctx: typer.Context) -> None:
    """Launch SCRIPT on N ranks: lockstep run --nproc N SCRIPT ARGS...  Takes every torchrun option."""
    # Until the launcher listens to it itself: nothing is running yet, so Ctrl-C ends this process, in silence.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported here: the launcher pulls in torch, which `lockstep --help` does not need.
    from lockstep.cli.run import launch

    sys.exit(launch(ctx.args))


@app.command("precompile", cls=Verbatim, add_help_option=False)
def precompile_command(ctx: typer.Context) -> None:
    """Compile the steps of SCRIPT for N ranks, in one process: lockstep precompile SCRIPT --world N --out DIR."""
    from lockstep.cli.precompile import precompile

    sys.exit(precompile(ctx.args))


@app.command("env")
def env_command(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables.")) -> None:
    """Print versions and what is usable on this machine."""
    from lockstep.cli.env import collect, print_json, print_tables

    facts = collect()
    if as_json:
        print_json(facts)
    else:
        print_tables(facts)
