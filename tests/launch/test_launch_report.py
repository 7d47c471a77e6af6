"""The report: readable without Lockstep, complete, and harmless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.jobs import RUN, report
from launching import run_command, write_script
from lockstep.launch.attempt import Ended, Outcome
from lockstep.launch.cause import Cause, blame
from lockstep.launch.facts import Ending, RankFacts
from lockstep.launch.page import Place
from lockstep.launch.report import Report, as_page, write_reports
from lockstep.launch.summary import ranks_table
from lockstep.launch.words import words_of


def failed_rank(rank: int, text: str) -> RankFacts:
    place = Place(1, rank, 2, 0.0, 7, 3, 1_700_000_000.25, "collect", "layers.0.weight ... layers.0.bias")
    facts = RankFacts(rank, 4000 + rank, "node7", Ending.FAILED, 1, 1_700_000_000.5, place)
    facts.words = [words_of(ValueError(text))]
    facts.stack = 'File "train.py", line 3 in main'
    return facts


def example(text: str = "bad") -> Report:
    rank = failed_rank(1, text)
    attempts = [
        Ended(0, Outcome.FAILED, blame(rank), 12.5, [failed_rank(0, "other"), rank]),
        Ended(1, Outcome.DONE, Cause(None, "all ranks ended well", exit_code=0), 3.0),
    ]
    return Report("train.py", ("lockstep", "run", "--nproc", "2", "train.py", "a b"), "/work dir", attempts)


def test_everything_is_in_both_files(tmp_path: Path) -> None:
    page = write_reports(tmp_path, example())
    data = json.loads(page.with_suffix(".json").read_text())
    (rank,) = [rank for rank in data["attempts"][0]["ranks"] if rank["rank"] == 1]
    assert rank["last_seen"]["step"] == 7
    assert rank["last_seen"]["bucket"] == 3
    assert rank["last_seen"]["moment"] == "collect"
    assert rank["errors"][0]["type"] == "ValueError"
    assert data["repeat"] == "cd '/work dir' && lockstep run --nproc 2 train.py 'a b'"
    assert [attempt["outcome"] for attempt in data["attempts"]] == ["failed", "done"]
    text = page.read_text()
    for word in ("layers.0.weight", "bucket 3", "step 7", "line 3 in main", "ValueError: bad", "node7", "12.5"):
        assert word in text
    assert "cd &#x27;/work dir&#x27; &amp;&amp; lockstep run" in text
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".json"]


def test_the_page_stands_alone_and_runs_nothing_that_a_rank_said() -> None:
    text = as_page(example("<script>alert(1)</script><img src=x onerror=alert(1)>"))
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search(r"(src|href)=|@import|url\(", text.replace("img src=x", ""))


def test_what_no_page_can_hold_is_shown_by_its_code(tmp_path: Path) -> None:
    report = example("\x00 \x1b[31m \udce9 \u202e")
    report = replace(report, command=(*report.command, "\udce9"))
    text = write_reports(tmp_path, report).read_text(encoding="utf-8")
    assert not re.search("[\x00\x1b\u202e]", text)
    assert r"\x00 \x1b[31m \udce9 \u202e" in text
    assert r"\x1b[31m" in ranks_table(report.attempts[0].ranks)


@pytest.mark.multirank
def test_the_command_in_a_report_repeats_the_run(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train script.py", "import sys\nprint(sys.argv[1:], flush=True)\nsys.exit(6)\n")
    folder = tmp_path / "reports"
    done = run_command([*RUN, "--report-dir", folder, script, "two words", "--flag"], cwd=tmp_path)
    assert done.exit_code == 6
    data = report(tmp_path)
    command = data["repeat"].replace("lockstep run", f"{sys.executable} -m lockstep.cli run", 1)
    again = run_command(["sh", "-c", command])
    assert (again.exit_code, again.output) == (done.exit_code, done.output)
    assert done.lines == ["['two words', '--flag']"]


def test_a_folder_that_cannot_be_written_to_does_not_hide_the_cause(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "raise ValueError('the cause')\n")
    done = run_command([*RUN, "--report-dir", "/proc/nowhere", script])
    assert done.exit_code == 1
    assert "ValueError: the cause" in done.errors
    assert "no report could be written to /proc/nowhere" in done.errors


def test_a_run_that_ends_well_leaves_no_report(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('fine')\n")
    done = run_command([*RUN, "--report-dir", tmp_path / "reports", script])
    assert (done.exit_code, done.errors) == (0, "")
    assert not (tmp_path / "reports").exists()


def test_log_files_and_prefixes_are_torchruns(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('out', flush=True)\n")
    done = run_command([*RUN, "--nproc", "2", "--log-dir", tmp_path / "logs", "--tee", "3", script])
    assert done.exit_code == 0, done
    assert sorted(done.lines) == ["[default0]:out", "[default1]:out"]
    assert len([path for path in (tmp_path / "logs").rglob("stdout.log") if path.read_text() == "out\n"]) == 2
    done = run_command([*RUN, "--nproc", "2", "--redirects", "3", "--log-dir", tmp_path / "more", script])
    assert (done.exit_code, done.output) == (0, "")
    assert (
        subprocess.run(["grep", "-rl", "out", tmp_path / "more"], capture_output=True).stdout.count(b"stdout.log") == 2
    )
