"""Tables of the launcher's summary, as plain text: they end up in log files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.launch.facts import RankFacts
from lockstep.launch.visible import visible

if TYPE_CHECKING:
    from lockstep.launch.attempt import Ended

_MAX_CELL = 110


def ranks_table(ranks: Sequence[RankFacts]) -> str:
    """Every rank of an attempt, the first that began to end first."""
    ordered = sorted(ranks, key=lambda facts: facts.began_to_end or float("inf"))
    first = next((facts.began_to_end for facts in ordered if facts.began_to_end), 0.0)
    rows = [("rank", "pid", "after", "how it ended", "last seen")]
    for facts in ordered:
        after = f"{facts.began_to_end - first:+.3f} s" if facts.began_to_end else ""
        place = str(facts.place) if facts.place.time else "never heard of"
        rows.append((str(facts.rank), str(facts.pid), after, facts.how(), place))
    return table(rows)


def attempts_table(attempts: Sequence[Ended]) -> str:
    """Every attempt: why it ended, whose fault it was, how far it came and how long it took."""
    rows = [("attempt", "rank", "step reached", "seconds", "cause")]
    for attempt in attempts:
        rank = "-" if attempt.cause.rank is None else str(attempt.cause.rank)
        step = str(attempt.step) if attempt.step >= 0 else "-"
        rows.append((str(attempt.number), rank, step, f"{attempt.seconds:.1f}", attempt.cause.text))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[_cell(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(f"  {line}" for line in lines)


def _cell(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _MAX_CELL else f"{line[: _MAX_CELL - 3]}..."
