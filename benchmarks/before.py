"""This version against an earlier one of this same project, and both against torch, in the same rounds.

    python benchmarks/before.py --rev 0456c0d                # eager and compiled, loopback and behind 1 Gbit/s
    python benchmarks/before.py --rev 0456c0d --only eager   # one of them; may be repeated
    python benchmarks/before.py --rev 0456c0d --export DIR   # only write the package there, for a machine without git

The earlier version is taken out of git under another name (``lockstep_before``): its imports, its operators, its
compiler backend and the marks by which it knows its own patches of torch. So both can be imported side by side, and
torch's registries hold both. What is timed runs in ranks of its own per version all the same (see turns.py), as each
would otherwise pay for the other's hooks on optimizers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from link import LinkNotAllowed, link_between_two_hosts
from subjects import BEFORE_DEFAULT, BEFORE_FOLDER, LOCKSTEP_DEFAULT, ROOT, TORCH_DEFAULT
from tables import print_table
from timing import Spread, spread_of, summarise
from turns import Turns, run_in_turns

DEFAULT_REVISION = "0456c0d"
NEW_NAME = "lockstep_before"
SUBJECTS = [TORCH_DEFAULT.name, BEFORE_DEFAULT.name, LOCKSTEP_DEFAULT.name]


class NoSuchRevision(RuntimeError):
    """git is not here, or does not know the revision."""


# The earlier package under another name


def export(revision: str, folder: Path) -> Path:
    """Write the package of ``revision`` into ``folder`` as ``lockstep_before``; returns ``folder``."""
    command = ["git", "-C", str(ROOT), "archive", revision, "src/lockstep"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise NoSuchRevision("git is not installed here; export on another machine and give --before DIR") from None
    except subprocess.CalledProcessError as error:
        raise NoSuchRevision(error.stderr.decode(errors="replace").strip()) from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            if not member.isfile():
                continue
            content = tar.extractfile(member)
            assert content is not None
            path = folder / NEW_NAME / Path(member.name).relative_to("src/lockstep")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(content.read().decode()))
    (folder / NEW_NAME / "REVISION").write_text(revision + "\n")
    return folder


def renamed(source: str) -> str:
    """Everything that is called lockstep gets the new name; environment variables keep theirs, in capitals."""
    source = source.replace("lockstep", NEW_NAME)
    # Of two classes that stand in for dynamo's optimizer the later one is asked; it has to ask the one before it.
    return source.replace(
        "            return object.__new__(cls) if made is None else made\n",
        '            if made is None and "__new__" in vars(original):\n'
        "                return original.__new__(cls, *args, **kwargs)\n"
        "            return object.__new__(cls) if made is None else made\n",
    )


@contextmanager
def importable(revision: str) -> Iterator[str]:
    """While this lasts, processes started from here can import the package of ``revision``; gives its full name.

    An export that the environment names already (--before DIR) is used as it is.
    """
    if BEFORE_FOLDER in os.environ:
        yield (Path(os.environ[BEFORE_FOLDER]) / NEW_NAME / "REVISION").read_text().strip()
        return
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        os.environ[BEFORE_FOLDER] = str(export(revision, Path(folder)))
        try:
            yield revision
        finally:
            del os.environ[BEFORE_FOLDER]


# In each rank


def measure(
    workload: str, compiled: bool, num_rounds: int, steps_per_block: int, subject: str, turns: list[Any]
) -> dict[str, Any]:
    """Seconds per step of one subject in each of its turns: that of its slowest rank."""
    import torch
    import torch.distributed as dist

    from models import WORKLOADS
    from rank_timing import seconds_per_step, training
    from subjects import BY_NAME

    own = Turns(*turns)
    what = WORKLOADS[workload]
    cpu_seconds: list[float] = []

    def set_up() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = BY_NAME[subject].wrap(what.build())
        torch.manual_seed(100 + dist.get_rank())
        batches = [what.batch() for _ in range(4)]
        steps = training(torch.compile(model) if compiled else model, batches)
        steps(5)
        return model, seconds_per_step(steps, steps_per_block, cpu_seconds.append)

    model, one_block = own.take(set_up)
    times = [own.take(one_block) for _ in range(num_rounds)]
    plan = str(model.plan) if hasattr(model, "plan") else ""
    return {"times": times, "cpu_seconds": cpu_seconds, "plan": plan}


# In the parent

CASES = {  # name: (workloads, compiled, behind the link)
    "eager": (("gpt5m", "cnn_small"), False, False),
    "compiled": (("gpt5m",), True, False),
    "eager_link": (("gpt5m", "cnn_small"), False, True),
    "compiled_link": (("gpt5m_batch16",), True, True),
}


def compare(
    quick: bool, revision: str = DEFAULT_REVISION, only: list[str] | None = None, rate: str = "1gbit"
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    try:
        with importable(revision) as exact:
            results["revision"] = exact
            for name in only or CASES:
                workloads, compiled, behind_link = CASES[name]
                for workload in workloads:
                    results[f"{name}, {workload}"] = _one_case(
                        name, workload, compiled, behind_link, quick, exact, rate
                    )
    except NoSuchRevision as reason:
        print(f"before skipped: {reason}")
        return {"skipped": str(reason)}
    return results


def _one_case(
    name: str, workload: str, compiled: bool, behind_link: bool, quick: bool, revision: str, rate: str
) -> dict[str, Any]:
    options = {
        "workload": workload,
        "compiled": compiled,
        "num_rounds": 5 if quick else 25,
        "steps_per_block": 2,
    }
    job = "before:measure"
    if not behind_link:
        answers = run_in_turns(job, options, SUBJECTS, time_limit=1200)
    else:
        try:
            with link_between_two_hosts(rate) as link:
                answers = run_in_turns(job, options, SUBJECTS, time_limit=1200, **link.where)
        except LinkNotAllowed as reason:
            print(f"{name} skipped: {reason}")
            return {"skipped": str(reason)}
    times = {subject: answer["times"] for subject, answer in answers.items()}
    to_before, to_torch = summarise(times, BEFORE_DEFAULT.name), summarise(times, TORCH_DEFAULT.name)
    rows = [
        [
            subject + (f" ({revision[:10]})" if subject == BEFORE_DEFAULT.name else ""),
            Spread.of([1000 * t for t in times[subject]]).text(1),
            f"{1000 * Spread.of(answers[subject]['cpu_seconds']).median:.1f}",
            spread_of(to_before[subject]["ratio"]).text(),
            spread_of(to_torch[subject]["ratio"]).text(),
        ]
        for subject in SUBJECTS
    ]
    where = f"2 hosts behind {rate}" if behind_link else "2 ranks on this machine"
    print_table(
        f"before, {name}, {workload}, {where}",
        ["subject", "ms per step", "CPU ms", "ratio to before", "ratio to torch default"],
        rows,
        "median [quartiles] of the ratios within a round; below 1 is faster",
    )
    return {"to_before": to_before, "to_torch_default": to_torch, "answers": answers}


def before(quick: bool) -> dict[str, Any]:
    return compare(quick)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", default=DEFAULT_REVISION, help="the earlier version: anything git can name")
    parser.add_argument("--before", type=Path, help="a folder that --export has written; instead of --rev")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the package to DIR and stop")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for before.json")
    arguments = parser.parse_args()
    if arguments.export:
        print(f"written to {export(arguments.rev, arguments.export) / NEW_NAME}")
        return 0
    if arguments.before:
        os.environ[BEFORE_FOLDER] = str(arguments.before.resolve())
    from run import machine

    result = compare(arguments.quick, arguments.rev, arguments.only)
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"case": "before", "quick": arguments.quick, "machine": machine(), "result": result}
    (arguments.out / "before.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
