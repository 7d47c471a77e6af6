"""The HTML report: well formed, self-contained, and with the right numbers in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.observe.report import gathers_under_way, lay_in_rows, round_ticks, typical_step, write_report
from lockstep.observe.timeline import Interval, Timeline

MS = 1_000_000
SVG_LEFT, SVG_RIGHT = 86, 1064  # where time zero and the last moment are drawn


def make_timeline(rank: int, waits_ms: list[float]) -> Timeline:
    """Steps of 10 ms forward and 20 ms backward, two buckets, and the given waits for the second."""
    timeline = Timeline(rank)
    for number, wait in enumerate(waits_ms):
        start = 1_000_000 * MS + number * 1000 * MS
        timeline.record("forward", start, start + 10 * MS)
        timeline.record("backward", start + 10 * MS, start + 30 * MS)
        timeline.record("launch", start + 19 * MS, start + 20 * MS, 0)
        timeline.record("travel", start + 20 * MS, start + 26 * MS, 0)
        timeline.record("travel", start + 24 * MS, start + int((30 + wait) * MS), 1)
        timeline.record("collect", start + 30 * MS, start + int((30 + wait) * MS), 1)
        timeline.end_step()
    return timeline


class Page(HTMLParser):
    """Which tags there are, which stand open, what is written in the table and in <pre>."""

    VOID = {"meta"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.pre = ""
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        if self.open and self.open[-1] == "pre":
            self.pre += data


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = write_report(
        tmp_path / "new" / "report.html",
        losses=[4.0, 3.0, 2.0, 1.0],
        timelines=[make_timeline(1, [3, 5, 9]), make_timeline(0, [2, 4, 6])],
        plan_text="bucket <0>: a & b",
        title="run <1>",
    )
    assert path == tmp_path / "new" / "report.html"
    return path.read_text()


def drawings(report: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", report, re.S)]


def test_page_is_well_formed_and_fetches_nothing(report: str) -> None:
    page = Page(report)
    assert page.open == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not [a for a in page.attributes if a[0] in ("src", "href")]
    assert "url(" not in report
    assert "http" not in report
    assert "prefers-color-scheme: dark" in report


def test_text_from_outside_is_escaped(report: str) -> None:
    assert "<title>run &lt;1&gt;</title>" in report
    assert Page(report).pre == "bucket <0>: a & b"


def test_table_holds_the_medians_per_rank(report: str) -> None:
    head, *rows = Page(report).rows
    assert head == [
        "rank",
        "step",
        "forward",
        "backward",
        "travel, summed",
        "exposed",
        "exposed share of the step",
    ]
    assert rows == [
        ["0", "34.00 ms", "10.00 ms", "20.00 ms", "16.00 ms", "4.00 ms", "11.8 %"],
        ["1", "35.00 ms", "10.00 ms", "20.00 ms", "17.00 ms", "5.00 ms", "14.3 %"],
    ]


def test_loss_curve_goes_through_the_losses(report: str) -> None:
    curve = drawings(report)[0]
    (line,) = curve.findall("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert [x for x, _ in points] == pytest.approx([SVG_LEFT, 412.0, 738.0, SVG_RIGHT], abs=0.1)
    # Equal steps of the loss are equal steps down the page: y grows downwards.
    heights = [y for _, y in points]
    assert heights == sorted(heights)
    assert {round(b - a, 1) for a, b in pairwise(heights)} == {80.0}
    labels = [text.text for text in curve.iter("text")]
    assert "loss" in labels
    assert "step" in labels
    assert {"1", "2", "3", "4"} <= set(labels)


def test_timeline_draws_each_interval_where_it_happened(report: str) -> None:
    drawing = drawings(report)[1]
    bars = {}
    for group in drawing.findall("g"):
        title, rect = group.find("title"), group.find("rect")
        assert title is not None
        assert rect is not None
        bars[title.text] = (rect.attrib["class"], float(rect.attrib["x"]), float(rect.attrib["width"]))
    # The step of median length is the second: 34 ms on rank 0, 35 ms on rank 1, from a common start.
    per_ms = (SVG_RIGHT - SVG_LEFT) / 35
    assert bars["rank 0: forward, 10.000 ms"] == ("forward", SVG_LEFT, pytest.approx(10 * per_ms, abs=0.02))
    kind, x, width = bars["rank 1: collect of bucket 1, 5.000 ms"]
    assert kind == "collect"
    assert (x, width) == pytest.approx((SVG_LEFT + 30 * per_ms, 5 * per_ms), abs=0.02)
    kind, x, width = bars["rank 0: travel of bucket 1, 10.000 ms"]
    assert (x, width) == pytest.approx((SVG_LEFT + 24 * per_ms, 10 * per_ms), abs=0.02)
    assert len(bars) == 12
    words = [text.text for text in drawing.iter("text")]
    for word in ("rank 0", "rank 1", "compute", "link", "ms"):
        assert word in words
    assert all(name in report for name in ("var(--collect)", "var(--travel)", "exposed communication"))


def test_overlapping_travels_do_not_cover_each_other(report: str) -> None:
    rows = lay_in_rows([Interval("travel", 0, 0, 10), Interval("travel", 1, 5, 12), Interval("travel", 2, 10, 20)])
    assert [(row, interval.bucket) for row, interval in rows] == [(0, 0), (1, 1), (0, 2)]


def test_gathers_are_drawn_and_count_as_exposed(tmp_path: Path) -> None:
    timeline, start = Timeline(0), 1_000_000 * MS
    timeline.record("gather", start, start + 1 * MS, 7)
    timeline.record("gathered", start + 4 * MS, start + 6 * MS, 7)
    timeline.record("forward", start, start + 10 * MS)
    timeline.record("collect", start + 10 * MS, start + 11 * MS, 0)
    timeline.end_step()
    assert gathers_under_way(timeline.steps[0].intervals) == [Interval("gather", 7, start, start + 6 * MS)]
    text = write_report(tmp_path / "r.html", losses=[1.0], timelines=[timeline], plan_text="", title="t").read_text()
    assert "rank 0: gather of unit 7, 6.000 ms" in text
    assert "rank 0: gathered of unit 7, 2.000 ms" in text
    assert Page(text).rows[1][5:] == ["3.00 ms", "27.3 %"]


def test_typical_step_is_one_that_every_rank_holds() -> None:
    short, long = make_timeline(0, [1, 2, 3]), make_timeline(1, [5, 6, 7, 8])
    assert [step.step for step in typical_step([short, long])] == [1, 1]
    assert typical_step([short, Timeline(1)]) == []
    assert typical_step([]) == []


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1, 4, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]), (3, 3, [3]), (0, 0.01, None)],
)
def test_ticks_are_round_and_inside(low: float, high: float, ticks: list[float] | None) -> None:
    found = round_ticks(low, high)
    assert ticks is None or found == pytest.approx(ticks)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert 1 <= len(found) <= 12


@pytest.mark.parametrize(
    ("losses", "timelines"),
    [
        ([], []),
        ([1.0], [Timeline(0)]),
        ([float("nan"), float("inf")], []),
        ([2.0, 2.0, 2.0], [make_timeline(0, [0])]),
        ([3.0 - i / 100 for i in range(100)] + [float("nan")], [make_timeline(r, [1]) for r in range(9)]),
    ],
    ids=["nothing", "one step, none recorded", "no finite loss", "flat loss", "smoothed, many ranks"],
)
def test_odd_input_still_gives_a_page(tmp_path: Path, losses: list[float], timelines: list[Timeline]) -> None:
    path = write_report(tmp_path / "r.html", losses=losses, timelines=timelines, plan_text="", title="odd")
    text = path.read_text()
    assert Page(text).open == []
    for drawing in drawings(text):
        assert not re.search(r"nan|inf", ElementTree.tostring(drawing, encoding="unicode"))


def test_who_others_waited_for_is_in_the_report(tmp_path: Path) -> None:
    timelines = [make_timeline(rank, [1.0, 2.0]) for rank in range(2)]
    for timeline in timelines:
        for _ in range(10):
            timeline.stragglers.note({0: 500_000, 1: 1_000}, timeline.rank)
    path = tmp_path / "report.html"
    write_report(path, losses=[1.0, 0.5], timelines=timelines, plan_text="the plan", title="two ranks")
    text = path.read_text()
    assert "Who others waited for" in text
    assert "<td>1</td><td>4.99 s</td>" in text
