"""Run a function on several ranks and get back what each one returned or raised.

    values = run_ranks(3, train, num_steps)          # every rank must return; values[rank]
    errors = expect_errors(3, [0, 1, 2], wrap_bad)   # exactly these ranks must raise; errors[rank].text

Ranks are real processes with a real gloo group over loopback. The function must be one that can be imported
by name (defined at the top of a module), since ranks are forked from a warm server (see rank_server.py) and
not from the test's process. A run has a hard wall limit, after which every rank prints its stacks and the
whole process group is killed; a run that leaves a process behind fails.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Limits are against hangs: many times what a run takes, so that a busy machine does not reach them.
DEFAULT_LIMIT_S = 300.0
# What nearly every run needs, imported once in the server instead of once per rank: also what is only imported on first
# use, of torch (the compiler, for which its own wrapper and its optimizers ask too) and of Lockstep.
WARM_MODULES = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
]
MAX_OUTPUT_CHARS = 6000

SUBJECT = os.environ.get("LOCKSTEP_TEST_SUBJECT", "lockstep")
if SUBJECT == "lockstep":
    WARM_MODULES += ["lockstep", "lockstep.ddp.wrapper", "lockstep.graph.backend", "lockstep.shard.module"]


def subject_class() -> Any:
    """The wrapper under test: Lockstep's, or torch's own, which shows that a test is right about torch."""
    if SUBJECT == "torch":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel
    if SUBJECT == "lockstep":
        import lockstep

        return lockstep.DistributedDataParallel
    raise ValueError(f"LOCKSTEP_TEST_SUBJECT is {SUBJECT!r}; it must be 'lockstep' or 'torch'")


def torch_fails(reason: str) -> pytest.MarkDecorator:
    """Marks a test that torch's own class is known not to pass; strict, so that we learn when it does."""
    return pytest.mark.xfail(SUBJECT == "torch", reason=f"torch's DDP: {reason}", strict=True)


torch_only_semantics = pytest.mark.skipif(SUBJECT != "torch", reason="describes torch's class only")
lockstep_only = pytest.mark.skipif(SUBJECT == "torch", reason="torch's class does not offer this")


def inductor_cache() -> str:
    """The compiler cache of this run of the tests, empty when it began."""
    return os.environ["LOCKSTEP_TEST_INDUCTOR_CACHE"]


@dataclass(frozen=True)
class RankError:
    type_name: str
    base_names: tuple[str, ...]
    text: str
    traceback: str


@dataclass(frozen=True)
class RankOutcome:
    rank: int
    value: Any
    error: RankError | None
    exit_status: int | None
    output: str

    def report(self, same_error_as: RankOutcome | None = None) -> str:
        lines = [f"--- rank {self.rank}: {self._verdict()}"]
        if self.error is not None and same_error_as is not None:
            lines.append(f"with the text and the traceback of rank {same_error_as.rank}")
        elif self.error is not None:
            lines.append(self.error.traceback.rstrip())
        if self.output.strip():
            lines.append(f"... output of rank {self.rank}:")
            lines.append(self.output[-MAX_OUTPUT_CHARS:].rstrip())
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.error is not None:
            return f"raised {self.error.type_name}"
        if self.exit_status == 0:
            return "returned"
        return f"died with exit status {self.exit_status}"


def report_all(outcomes: Sequence[RankOutcome]) -> str:
    """Every rank's report, an error that several ranks share only once in full."""
    reports = []
    first_with: dict[RankError, RankOutcome] = {}
    for outcome in outcomes:
        first = first_with.setdefault(outcome.error, outcome) if outcome.error is not None else outcome
        reports.append(outcome.report(None if first is outcome else first))
    return "\n".join(reports)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = DEFAULT_LIMIT_S,
    preload: Sequence[str] = (),
    env: dict[str, str] | None = None,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Calls function(*args, **kwargs) on every rank; returns the values by rank or fails with all reports."""
    outcomes = run_outcomes(
        world,
        function,
        *args,
        limit_s=limit_s,
        preload=preload,
        env=env,
        init_process_group=init_process_group,
        **kwargs,
    )
    failing = [outcome for outcome in outcomes if outcome.error is not None or outcome.exit_status != 0]
    assert not failing, f"{len(failing)} of {world} ranks failed\n" + report_all(failing)
    return [outcome.value for outcome in outcomes]


def expect_errors(
    world: int, ranks: Collection[int], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> dict[int, RankError]:
    """Asserts that exactly these ranks raise and all others return; gives each one's exception by rank."""
    outcomes = run_outcomes(world, function, *args, **kwargs)
    raising = {outcome.rank for outcome in outcomes if outcome.error is not None}
    died = [outcome.rank for outcome in outcomes if outcome.error is None and outcome.exit_status != 0]
    assert (raising, died) == (set(ranks), []), (
        f"expected an error on ranks {sorted(ranks)}, but {sorted(raising)} raised and {died} died\n"
        + report_all(outcomes)
    )
    return {outcome.rank: outcome.error for outcome in outcomes if outcome.error is not None}


def run_outcomes(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = DEFAULT_LIMIT_S,
    preload: Sequence[str] = (),
    env: dict[str, str] | None = None,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Runs the function and reports every rank without judging; a timeout or a leftover still fails."""
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot be imported by name: define it at the top of a module")
    with tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as name:
        directory = Path(name)
        (directory / "request.pkl").write_bytes(pickle.dumps((args, kwargs)))
        reply = RankServer.get().execute(
            {
                "directory": name,
                "world": world,
                "limit_s": limit_s,
                "module": function.__module__,
                "qualname": function.__qualname__,
                "preload": [*WARM_MODULES, *preload, function.__module__],
                "sys_path": sys.path,
                "env": env or {},
                "init_process_group": init_process_group,
            }
        )
        assert "server_error" not in reply, f"the rank server failed:\n{reply['server_error']}"
        outcomes = [read_outcome(directory, rank, reply["exit_status"]) for rank in range(world)]
    reports = report_all(outcomes)
    assert not reply["timed_out"], f"the run did not end within {limit_s:.0f} s and was killed\n{reports}"
    assert not reply["leftovers"], f"the run left processes behind: {reply['leftovers']}\n{reports}"
    return outcomes


def read_outcome(directory: Path, rank: int, exit_status: dict[str, int]) -> RankOutcome:
    value, error = None, None
    path = directory / f"outcome_{rank}.pkl"
    if path.exists():
        stored = pickle.loads(path.read_bytes())
        value = stored.get("value")
        if "error_text" in stored:
            error = RankError(
                stored["error_type"],
                tuple(stored["error_bases"]),
                stored["error_text"],
                stored["traceback"],
            )
    output_path = directory / f"output_{rank}.txt"
    output = output_path.read_text(errors="replace") if output_path.exists() else ""
    return RankOutcome(rank, value, error, exit_status.get(str(rank)), output)


class RankServer:
    """The client's end of the one server of this test process; started on first use, stopped at exit."""

    _instance: RankServer | None = None

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile(prefix="lockstep-rank-server-")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        atexit.register(self.close)

    @classmethod
    def get(cls) -> RankServer:
        if cls._instance is None or cls._instance._process.poll() is not None:
            cls._instance = cls()
        return cls._instance

    def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        # The server holds the run to its limit; this second limit is for a server that is itself stuck.
        ready, _, _ = select.select([stdout], [], [], request["limit_s"] + 60)
        line = stdout.readline() if ready else b""
        if not line:
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            self.close()
            raise AssertionError(f"the rank server did not answer; its output:\n{log[-MAX_OUTPUT_CHARS:]}")
        return json.loads(line)

    def close(self) -> None:
        """Killing the server kills its ranks too: each of them asked the kernel to die with its parent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
