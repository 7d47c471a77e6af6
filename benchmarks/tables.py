"""Prints tables: with rich where it is installed, as aligned columns where it is not."""

from __future__ import annotations

import sys


def print_table(title: str, columns: list[str], rows: list[list[str]], note: str = "") -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        _print_plain(title, columns, rows, note)
        return
    table = Table(title=Text(title), title_justify="left", caption=Text(note) if note else None, caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A log file has no width of its own; a cut column would be a lost number.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)


def _print_plain(title: str, columns: list[str], rows: list[list[str]], note: str) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    if note:
        print(note)
