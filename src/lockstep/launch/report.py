"""The report of a run that did not end as planned: one JSON file, and one page that stands alone."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launch.facts import RankFacts
from lockstep.launch.visible import visible
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.launch.attempt import Ended

_STYLE = """
:root { --page:#f7f7f5; --card:#fff; --ink:#1d2430; --soft:#5d6675; --line:#dfe2e8; --bad:#c0332b; }
@media (prefers-color-scheme: dark) { :root { --page:#14171c; --card:#1c2128; --ink:#e6e9ef; --soft:#9aa4b2;
  --line:#323945; --bad:#f0635a; } }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.45 system-ui,sans-serif; }
main { max-width:1160px; margin:0 auto; padding:28px 20px 48px; }
h1 { font-size:24px; } h2 { font-size:17px; } .bad { color:var(--bad); font-weight:600; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 20px;
  margin-top:16px; }
table { border-collapse:collapse; width:100%; } td,th { text-align:left; padding:4px 12px 4px 0; vertical-align:top;
  border-top:1px solid var(--line); } th { color:var(--soft); font-weight:500; border:0; }
pre { overflow:auto; max-height:28em; background:var(--page); padding:10px; border-radius:6px; font-size:13px; }
"""


@dataclass(frozen=True)
class Report:
    """A run: what was typed, where, and every attempt."""

    name: str
    command: tuple[str, ...]
    folder: str
    attempts: Sequence[Ended]

    @property
    def repeat(self) -> str:
        """A line for a shell that does the same again."""
        return f"cd {shlex.quote(self.folder)} && {shlex.join(self.command)}"


def write_reports(directory: Path, report: Report) -> Path:
    """Write ``lockstep-<time>-<pid>.json`` and ``.html``; the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"lockstep-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    data = as_json(report)
    _write(directory / f"{stem}.json", json.dumps(data, indent=1))
    page = directory / f"{stem}.html"
    _write(page, visible(as_page(report)))
    return page


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def as_json(report: Report) -> dict[str, object]:
    """All of it, as plain data."""
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "written": time.time(),
        "program": report.name,
        "command": list(report.command),
        "folder": report.folder,
        "repeat": report.repeat,
        "attempts": [
            {
                "number": attempt.number,
                "outcome": attempt.outcome.value,
                "cause": attempt.cause.text,
                "rank": attempt.cause.rank,
                "step_reached": attempt.step,
                "seconds": round(attempt.seconds, 3),
                "errors_in_order": [
                    {"rank": rank, "time": when, "error": text} for when, rank, text in errors_in_order(attempt.ranks)
                ],
                "ranks": [facts.as_json() for facts in attempt.ranks],
            }
            for attempt in report.attempts
        ],
    }


def errors_in_order(ranks: Sequence[RankFacts]) -> list[tuple[float, int, str]]:
    """What went wrong, first things first: (time, rank, text)."""
    found = [(words.time, facts.rank, words.first_line) for facts in ranks for words in facts.words]
    found += [(facts.ended_at, facts.rank, facts.how()) for facts in ranks if not facts.words and facts.exit_code]
    return sorted(found)


def as_page(report: Report) -> str:
    """The page; nothing is fetched and no script runs."""
    last = report.attempts[-1]
    parts = [
        f"<h1>{escape(report.name)}: {escape(last.outcome.value)}</h1>",
        f'<p class="bad">{escape(last.cause.text)}</p>',
        f"<p>To repeat it:</p><pre>{escape(report.repeat)}</pre>",
    ]
    if len(report.attempts) > 1:
        rows = [("attempt", "outcome", "rank", "step reached", "seconds", "cause")]
        rows += [
            (
                str(attempt.number),
                attempt.outcome.value,
                "-" if attempt.cause.rank is None else str(attempt.cause.rank),
                str(attempt.step) if attempt.step >= 0 else "-",
                f"{attempt.seconds:.1f}",
                attempt.cause.text,
            )
            for attempt in report.attempts
        ]
        parts.append(f"<section><h2>Attempts</h2>{_table(rows)}</section>")
    parts += [_attempt(attempt) for attempt in reversed(report.attempts) if attempt.ranks]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.name)}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}"
        f"<p>Written by lockstep {escape(__version__)} on {escape(socket.gethostname())}.</p></main></body></html>\n"
    )


def _attempt(attempt: Ended) -> str:
    rows = [("rank", "pid", "host", "how it ended", "status", "step", "doing", "last heard of")]
    for facts in attempt.ranks:
        rows.append(
            (
                str(facts.rank),
                str(facts.pid),
                facts.host,
                facts.how(),
                "" if facts.exit_code is None else str(facts.exit_code),
                facts.place.shown_step,
                str(facts.place),
                _clock(facts.place.time),
            )
        )
    events = [("time", "rank", "what")]
    events += [(_clock(when), str(rank), text) for when, rank, text in errors_in_order(attempt.ranks)]
    details = "".join(_details(facts) for facts in attempt.ranks)
    return (
        f"<section><h2>Attempt {attempt.number}: {escape(attempt.cause.text)}</h2>{_table(rows)}"
        f"<h2>In the order of time</h2>{_table(events)}{details}</section>"
    )


def _details(facts: RankFacts) -> str:
    blocks = [f"<pre>{escape(words.traceback)}</pre>" for words in facts.words]
    if facts.stack:
        blocks.append(f"<p>Its Python stack:</p><pre>{escape(facts.stack)}</pre>")
    if not blocks:
        return ""
    return f"<details open><summary>rank {facts.rank}</summary>{''.join(blocks)}</details>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _clock(when: float) -> str:
    if not when:
        return ""
    return f"{time.strftime('%H:%M:%S', time.localtime(when))}.{int(1000 * (when % 1)):03d}"
