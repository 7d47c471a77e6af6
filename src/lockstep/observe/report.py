"""One HTML file that shows a run: loss curve, one step's timeline per rank, exposed communication, plan.

The file stands alone: the drawings are inline SVG written here, there is no script and nothing is fetched,
so it can be mailed, archived, or opened on a host without a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from lockstep.observe.timeline import Interval, StepRecord, Timeline

__all__ = ["gathers_under_way", "lay_in_rows", "round_ticks", "typical_step", "write_report"]

WIDTH = 1080
LEFT, RIGHT = 86, 16  # room for axis labels, in SVG units
NUM_SMOOTHED = 21  # steps averaged into a point of the smooth loss line

# Interval names in the order of the legend, with what they mean to a reader of the report.
MEANING = {
    "forward": "forward",
    "backward": "backward",
    "launch": "launch: pack a bucket and start its reduction",
    "travel": "travel: a bucket's reduction is under way",
    "collect": "collect: wait for a bucket (exposed communication)",
    "compare": "compare: the exchange that ends the step, and the wait for the last rank (exposed communication)",
    "gather": "gather: a sharded unit is on its way (until it is there and in place)",
    "gathered": "gathered: wait for a unit (exposed communication)",
}

STYLE = """
:root { --page:#f7f7f5; --card:#fff; --ink:#1d2430; --soft:#5d6675; --line:#dfe2e8; --forward:#5b8def;
  --backward:#2a9d8f; --launch:#8a6fc1; --travel:#e0a526; --collect:#d8433b; --compare:#c77d4f;
  --gather:#7a8b99; --gathered:#b5475e; --loss:#3566c8; --faint:#b9c8ea; }
@media (prefers-color-scheme: dark) { :root { --page:#14171c; --card:#1c2128; --ink:#e6e9ef; --soft:#9aa4b2;
  --line:#323945; --forward:#5f92f5; --backward:#35b3a3; --launch:#a68ce0; --travel:#d9a73a; --collect:#f0635a;
  --gather:#8c9dab; --gathered:#d26a80; --compare:#d9915f;
  --loss:#7fa7ff; --faint:#3c4d73; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink); line-height:1.45;
  font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; }
main { max-width:1160px; margin:0 auto; padding:28px 20px 48px; }
h1 { font-size:26px; margin:0 0 16px; } h2 { font-size:17px; margin:0 0 4px; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:18px 20px;
  margin-top:16px; }
p { margin:0 0 10px; color:var(--soft); max-width:80ch; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(170px,1fr)); gap:12px; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 16px; }
.tile b { display:block; font-size:22px; font-weight:600; } .tile span { color:var(--soft); font-size:13px; }
svg { width:100%; height:auto; display:block; } svg text { fill:var(--soft); font-size:12px; }
svg text.rank { fill:var(--ink); font-weight:600; font-size:13px; } svg text.in { fill:#fff; font-size:11px; }
svg .travel + text.in { fill:#2b2107; font-weight:600; }
.grid { stroke:var(--line); stroke-width:1; } .axis { stroke:var(--soft); stroke-width:1; }
.raw { fill:none; stroke:var(--faint); stroke-width:1.2; }
.smooth { fill:none; stroke:var(--loss); stroke-width:2; stroke-linejoin:round; }
.forward { fill:var(--forward); } .backward { fill:var(--backward); } .launch { fill:var(--launch); }
.travel { fill:var(--travel); } .collect { fill:var(--collect); } .compare { fill:var(--compare); }
.gather { fill:var(--gather); } .gathered { fill:var(--gathered); }
.lane { fill:var(--line); opacity:.35; }
.legend { display:flex; flex-wrap:wrap; gap:6px 18px; margin:0 0 8px; color:var(--soft); font-size:13px; }
.legend i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px;
  vertical-align:-1px; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th, td { text-align:right; padding:6px 10px; border-bottom:1px solid var(--line); white-space:nowrap; }
th { color:var(--soft); font-weight:500; font-size:13px; } th:first-child, td:first-child { text-align:left; }
pre { margin:6px 0 0; overflow-x:auto; font:12.5px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
"""


def write_report(
    path: str | Path,
    *,
    losses: Sequence[float],
    timelines: Sequence[Timeline],
    plan_text: str,
    title: str,
) -> Path:
    """Write the report to ``path`` and return it.

    ``losses`` is the loss of each step; ``timelines`` holds one timeline per rank, gathered by the caller;
    ``plan_text`` is the plan as it prints.
    """
    timelines = sorted(timelines, key=lambda timeline: timeline.rank)
    body = [
        f"<h1>{escape(title)}</h1>",
        _tiles(losses, timelines),
        _section("Loss", "Loss of each step.", _loss_drawing(losses)),
        _timeline_section(timelines),
        _section(
            "Exposed communication",
            "Medians over the recorded steps. Exposed is the time a rank stood still for a bucket, a sharded unit or"
            " the end of the step, be it for the link or for a slower rank. Travel lasts from a bucket's launch until"
            " its collective ended (until it was collected, where the end is not known); what of it is not exposed ran"
            " beside the backward pass.",
            _exposed_table(timelines),
        ),
        *_straggler_section(timelines),
        _section("Plan", "Which parameters travel together, and in which order.", f"<pre>{escape(plan_text)}</pre>"),
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def _section(heading: str, text: str, content: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n<p>{escape(text)}</p>\n{content}\n</section>"


# Numbers


def _length(step: StepRecord) -> float:
    """Seconds from the first interval's start to the last one's end."""
    if not step.intervals:
        return 0.0
    first = min(interval.start_ns for interval in step.intervals)
    return (max(interval.end_ns for interval in step.intervals) - first) / 1e9


def typical_step(timelines: Sequence[Timeline]) -> list[StepRecord]:
    """The records, one per rank, of the step of median length among those that every rank still holds."""
    by_rank = [{step.step: step for step in timeline.steps if step.intervals} for timeline in timelines]
    common = set.intersection(*(set(steps) for steps in by_rank)) if by_rank else set()
    if not common:
        return []
    ordered = sorted(common, key=lambda number: (max(_length(steps[number]) for steps in by_rank), number))
    chosen = ordered[(len(ordered) - 1) // 2]
    return [steps[chosen] for steps in by_rank]


def _median_ms(timeline: Timeline, name: str) -> float:
    return median([step.seconds(name) for step in timeline.steps] or [0.0]) * 1e3


def _median_exposed_ms(timeline: Timeline) -> float:
    return median([step.exposed_seconds for step in timeline.steps] or [0.0]) * 1e3


def gathers_under_way(intervals: Sequence[Interval]) -> list[Interval]:
    """Each gather of a unit from its start until the unit was there."""
    found: list[Interval] = []
    started: dict[int, int] = {}
    for interval in sorted(intervals, key=lambda i: i.start_ns):
        if interval.name == "gather":
            started.setdefault(interval.bucket, interval.start_ns)
        elif interval.name == "gathered":
            begun = started.pop(interval.bucket, interval.start_ns)
            found.append(Interval("gather", interval.bucket, begun, interval.end_ns))
    return found


def _median_length_ms(timeline: Timeline) -> float:
    return median([_length(step) for step in timeline.steps] or [0.0]) * 1e3


def round_ticks(low: float, high: float, num_wanted: int = 6) -> list[float]:
    """Round numbers that divide ``low`` to ``high`` into about ``num_wanted`` parts."""
    if not high > low:
        return [low]
    rough = (high - low) / num_wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def lay_in_rows(intervals: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Give each interval the first row in which it overlaps no earlier one."""
    row_ends: list[int] = []
    placed = []
    for interval in sorted(intervals, key=lambda i: (i.start_ns, i.bucket)):
        row = next((r for r, end in enumerate(row_ends) if end <= interval.start_ns), len(row_ends))
        row_ends[row : row + 1] = [interval.end_ns]
        placed.append((row, interval))
    return placed


# Drawings


def _x(fraction: float) -> float:
    return LEFT + fraction * (WIDTH - LEFT - RIGHT)


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _lane(y: float, height: float) -> str:
    return f'<rect class="lane" x="{LEFT}" y="{y:.1f}" width="{_x(1) - LEFT:g}" height="{height:.1f}"/>'


def _loss_drawing(losses: Sequence[float]) -> str:
    points = [(step, loss) for step, loss in enumerate(losses, start=1) if math.isfinite(loss)]
    if not points:
        return "<p>No loss was recorded.</p>"
    top, bottom, height = 12.0, 252.0, 300
    ticks = round_ticks(min(loss for _, loss in points), max(loss for _, loss in points), 5)
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    low = math.floor(min(loss for _, loss in points) / spacing) * spacing
    high = math.ceil(max(loss for _, loss in points) / spacing) * spacing
    if high == low:
        low, high = low - spacing / 2, high + spacing / 2
    last = max(2, len(losses))

    def place(step: float, loss: float) -> tuple[float, float]:
        return _x((step - 1) / (last - 1)), bottom - (loss - low) / (high - low) * (bottom - top)

    def polyline(kind: str, values: Sequence[tuple[int, float]]) -> str:
        coordinates = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in values)
        return f'<polyline class="{kind}" points="{coordinates}"/>'

    parts = []
    for tick in round_ticks(low, high, 5):
        y = place(1, tick)[1]
        parts += [_line("grid", LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 8, y + 4, f"{tick:g}", "end")]
    for tick in round_ticks(1, last, 8):
        if tick == int(tick):
            x = place(tick, low)[0]
            parts += [_line("axis", x, bottom, x, bottom + 4), _text(x, bottom + 19, f"{tick:g}")]
    parts += [
        _line("axis", LEFT, bottom, WIDTH - RIGHT, bottom),
        _line("axis", LEFT, top, LEFT, bottom),
        _text(_x(0.5), bottom + 40, "step"),
        f'<g transform="translate(20 {(top + bottom) / 2:.1f}) rotate(-90)">{_text(0, 0, "loss")}</g>',
    ]
    if len(points) > 2 * NUM_SMOOTHED:
        values = [loss for _, loss in points]
        # Near the ends the window shrinks on both sides, so that the line does not lag behind the steps.
        reaches = [min(i, len(values) - 1 - i, NUM_SMOOTHED // 2) for i in range(len(values))]
        windows = [values[i - reach : i + reach + 1] for i, reach in enumerate(reaches)]
        smooth = [(step, sum(w) / len(w)) for (step, _), w in zip(points, windows, strict=True)]
        parts += [polyline("raw", points), polyline("smooth", smooth)]
        legend = f"pale: each step; strong: mean of the {NUM_SMOOTHED} steps around it"
        parts.append(_text(WIDTH - RIGHT - 6, top + 12, legend, "end"))
    else:
        parts.append(polyline("smooth", points))
    return _svg(height, "Loss curve", parts)


def _timeline_section(timelines: Sequence[Timeline]) -> str:
    steps = typical_step(timelines)
    if not steps:
        return _section("Timeline", "No step was recorded on every rank.", "")
    start = min(interval.start_ns for step in steps for interval in step.intervals)
    end = max(interval.end_ns for step in steps for interval in step.intervals)
    present = {interval.name for step in steps for interval in step.intervals}
    legend = "".join(
        f'<span><i style="background:var(--{name})"></i>{escape(meaning)}</span>'
        for name, meaning in MEANING.items()
        if name in present
    )
    parts: list[str] = []
    y = 26.0
    for timeline, step in zip(timelines, steps, strict=True):
        lanes, y = _rank_lanes(timeline.rank, step, start, end, y)
        parts += lanes
    grid = []
    for tick in round_ticks(0, (end - start) / 1e6, 10):
        x = _x(tick * 1e6 / (end - start))
        grid += [_line("grid", x, 20, x, y), _text(x, 14, f"{tick:g}")]
    grid.append(_text(LEFT - 12, 14, "ms", "end"))
    text = (
        f"Step {steps[0].step}, the one of median length among those recorded. Times are on each host's "
        "clock. Numbers are buckets, or sharded units where they are gathered; hold the pointer over a bar for its "
        "length."
    )
    drawing = _svg(y + 6, "Timeline of one step, one pair of lanes per rank", [*grid, *parts])
    return _section("One step on every rank", text, f'<div class="legend">{legend}</div>\n{drawing}')


def _rank_lanes(rank: int, step: StepRecord, start: int, end: int, y: float) -> tuple[list[str], float]:
    """The compute lane and the communication lane of one rank, and where the next rank begins."""
    compute_height, row_height, gap = 30.0, 16.0, 4.0
    travels = lay_in_rows([*(i for i in step.intervals if i.name == "travel"), *gathers_under_way(step.intervals)])
    num_rows = max((row for row, _ in travels), default=0) + 1
    # Many buckets in flight at once would make the drawing endless: their rows get thinner instead.
    row_height = row_height if num_rows <= 8 else max(3.0, 8 * row_height / num_rows)
    link_y = y + compute_height + gap
    link_height = num_rows * row_height

    def bar(interval: Interval, bar_y: float, height: float, label: str) -> str:
        x = _x((interval.start_ns - start) / (end - start))
        width = max(0.8, _x((interval.end_ns - start) / (end - start)) - x)
        kind = "unit" if interval.name in ("gather", "gathered") else "bucket"
        bucket = f" of {kind} {interval.bucket}" if interval.bucket >= 0 else ""
        length = f"{(interval.end_ns - interval.start_ns) / 1e6:.3f} ms"
        inside = ""
        if label and width > 7 * len(label) + 6 and height >= 12:
            inside = _text(x + width / 2, bar_y + height / 2 + 4, label, kind="in")
        return (
            f'<g><title>rank {rank}: {interval.name}{bucket}, {length}</title><rect class="{interval.name}"'
            f' x="{x:.2f}" y="{bar_y:.1f}" width="{width:.2f}" height="{height:.1f}" rx="2"/>{inside}</g>'
        )

    parts = [
        _text(0, y + compute_height / 2 - 2, f"rank {rank}", "start", "rank"),
        _text(0, y + compute_height / 2 + 13, "compute", "start"),
        _text(0, link_y + min(link_height / 2 + 4, 16), "link", "start"),
        _lane(y, compute_height),
        _lane(link_y, link_height),
    ]
    # Launching and collecting happen inside the backward pass, so they are drawn over it.
    for name in ("forward", "backward"):
        parts += [bar(i, y, compute_height, name) for i in step.intervals if i.name == name]
    parts += [bar(i, y + compute_height - 10, 10, "") for i in step.intervals if i.name == "launch"]
    covering = ("compare", "collect", "gathered")
    parts += [bar(i, y, compute_height, i.name) for name in covering for i in step.intervals if i.name == name]
    parts += [bar(i, link_y + row * row_height + 1, row_height - 2, str(i.bucket)) for row, i in travels]
    return parts, link_y + link_height + 18


# Tables


def _tiles(losses: Sequence[float], timelines: Sequence[Timeline]) -> str:
    tiles = [("ranks", f"{len(timelines)}"), ("steps", f"{len(losses)}")]
    if losses:
        tiles.append(("last loss", f"{losses[-1]:.3f}"))
    if any(timeline.steps for timeline in timelines):
        slowest = max(_median_length_ms(timeline) for timeline in timelines)
        exposed = max(_median_exposed_ms(timeline) for timeline in timelines)
        tiles.append(("forward and backward, median of the slowest rank", f"{slowest:.1f} ms"))
        tiles.append(("exposed communication, worst rank", f"{exposed:.2f} ms"))
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{escape(name)}</span></div>' for name, value in tiles)
    return f'<div class="tiles">{cells}</div>'


def _exposed_table(timelines: Sequence[Timeline]) -> str:
    heads = ("rank", "step", "forward", "backward", "travel, summed", "exposed", "exposed share of the step")
    rows = []
    for timeline in timelines:
        step_ms, exposed_ms = _median_length_ms(timeline), _median_exposed_ms(timeline)
        cells = [f"{timeline.rank}", f"{step_ms:.2f} ms"]
        cells += [f"{_median_ms(timeline, name):.2f} ms" for name in ("forward", "backward", "travel")]
        cells += [f"{exposed_ms:.2f} ms", f"{100 * exposed_ms / step_ms if step_ms else 0:.1f} %"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _straggler_section(timelines: Sequence[Timeline]) -> list[str]:
    """Which rank made the others wait, and how much; nothing where none did."""
    seconds = next((t.stragglers.seconds for t in timelines if t.stragglers.seconds), {})
    if not seconds:
        return []
    rows = "".join(
        f"<tr><td>{rank}</td><td>{waited:.2f} s</td></tr>"
        for rank, waited in sorted(seconds.items(), key=lambda item: -item[1])
    )
    table = f"<table><thead><tr><th>rank</th><th>made the others wait</th></tr></thead><tbody>{rows}</tbody></table>"
    text = "Ranks that came last to the end of a step, and what the others waited longer than they did, added up."
    return [_section("Who others waited for", text, f'<div class="scroll">{table}</div>')]
