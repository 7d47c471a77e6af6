"""``lockstep run``: real launches of real ranks, and the reading of its command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from launching import EXAMPLES, LOCKSTEP, TORCHRUN, Finished, run_command, write_script
from lockstep.cli import bootstrap
from lockstep.cli.run import BadUse, launch, pick_backend, prepare, rank_environment

RUN = [*LOCKSTEP, "run"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path / "train.py", "print('hello')\n")


# What the ranks see

REPORT_SELF = """
    import gc, json, os, sys
    import torch

    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    prefixes = ("LOCAL_", "MASTER_", "TORCH", "LOCKSTEP_")
    facts = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(prefixes)}
    facts["argv"] = sys.argv
    facts["collects"] = gc.isenabled()
    facts["keeps"] = gc.get_freeze_count() > 0
    facts["ddp"] = torch.nn.parallel.DistributedDataParallel.__module__
    sys.stdout.write(json.dumps(facts) + "\\n")
"""


def facts_by_rank(done: Finished) -> dict[str, dict]:
    assert done.exit_code == 0, done
    facts = [json.loads(line) for line in done.lines]
    return {fact["RANK"]: fact for fact in facts}


@pytest.mark.multirank
def test_ranks_get_torchruns_environment_and_lockstep_installed(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", REPORT_SELF)
    done = run_command([*RUN, "--nproc", "2", script, "--nproc", "9", "--", "a b", "--help"])
    facts = facts_by_rank(done)
    assert sorted(facts) == ["0", "1"]
    for rank, fact in facts.items():
        assert fact["LOCAL_RANK"] == rank
        assert fact["WORLD_SIZE"] == fact["LOCAL_WORLD_SIZE"] == "2"
        assert fact["GROUP_RANK"] == fact["TORCHELASTIC_RESTART_COUNT"] == fact["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert fact["MASTER_ADDR"] == "127.0.0.1"
        assert fact["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert int(fact["MASTER_PORT"]) > 0
        assert fact["TORCHELASTIC_RUN_ID"] != "none"  # --standalone gives each run an id of its own
        assert fact["OMP_NUM_THREADS"] == "1"
        assert fact["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert fact["LOCKSTEP_BACKEND"] == pick_backend(2)
        assert fact["ddp"] == "lockstep.ddp"
        assert (fact["collects"], fact["keeps"]) == (True, True)  # no collection looks through what was loaded for it
        # Words after the script are the script's, also those that look like our own.
        assert fact["argv"] == [str(script), "--nproc", "9", "--", "a b", "--help"]


def test_no_install_launches_the_plain_script(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", REPORT_SELF)
    facts = facts_by_rank(run_command([*RUN, "--no-install", "--nproc-per-node=1", script, "x"]))
    assert facts["0"]["ddp"] == "torch.nn.parallel.distributed"
    assert (facts["0"]["collects"], facts["0"]["keeps"]) == (True, False)
    assert facts["0"]["argv"] == [str(script), "x"]


# The program must not notice that it was started by us

DESCRIBE_MAIN = """
    import json, sys

    def describe(value):
        return repr(value) if isinstance(value, (str, dict, type(None))) else type(value).__name__

    facts = {name: describe(value) for name, value in list(globals().items())}
    facts.update(argv=sys.argv, path=sys.path, main_is_this=sys.modules["__main__"].facts is facts,
                 name_in_spec=getattr(__spec__, "name", None))
    print(json.dumps(facts, sort_keys=True))
"""


@pytest.mark.parametrize(
    "words", [pytest.param(["tool.py"], marks=pytest.mark.soak), ["sub/tool.py"], ["-m", "sub.tool"], ["-m", "sub"]]
)
def test_program_sees_what_python_itself_would_give(tmp_path: Path, words: list[str]) -> None:
    write_script(tmp_path / "tool.py", DESCRIBE_MAIN)
    write_script(tmp_path / "sub" / "tool.py", DESCRIBE_MAIN)
    write_script(tmp_path / "sub" / "__main__.py", DESCRIBE_MAIN)
    plain = run_command([sys.executable, *words, "one", "-x"], cwd=tmp_path)
    ours = run_command([sys.executable, bootstrap.__file__, *words, "one", "-x"], cwd=tmp_path)
    assert plain.exit_code == 0, plain
    assert ours.exit_code == 0, ours
    assert json.loads(ours.output) == json.loads(plain.output)


# The program imports lockstep and so torch's compiler, which in some versions has a say in how python exits.
FAIL = """
    import sys
    import lockstep

    def fail(error):
        raise error

    {}
"""


@pytest.mark.parametrize(
    "last_line",
    [
        "fail(ValueError('wrong'))",
        "fail(KeyboardInterrupt())",
        "sys.exit(7)",
        "sys.exit('stop')",
        "pass",
        "a b",
    ],
)
def test_program_ends_as_under_python(tmp_path: Path, last_line: str) -> None:
    script = write_script(tmp_path / "tool.py", FAIL.replace("{}", last_line))
    plain = run_command([sys.executable, script])
    ours = run_command([sys.executable, bootstrap.__file__, script])
    assert (ours.exit_code, ours.errors) == (plain.exit_code, plain.errors)


def test_traceback_of_a_rank_shows_the_users_file_only(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", FAIL.replace("{}", "fail(ValueError('wrong'))"))
    done = run_command([*RUN, "--nproc", "1", script])
    assert done.exit_code == 1
    assert f'File "{script}", line 7, in <module>' in done.errors
    assert "ValueError: wrong" in done.errors
    assert "bootstrap" not in done.errors
    assert f"{script} FAILED" in done.errors


# Exit codes and restarts


@pytest.mark.multirank
@pytest.mark.soak
def test_exit_code_is_the_one_of_the_rank_that_failed(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(60)
        """,
    )
    assert run_command([*RUN, "--nproc", "2", script]).exit_code == 7


@pytest.mark.soak
def test_exit_code_of_a_rank_killed_by_a_signal(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "import os\nos.kill(os.getpid(), 9)\n")
    assert run_command([*RUN, script]).exit_code == 128 + 9


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.soak
def test_restart_after_a_failed_attempt_trains_to_the_end(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group()
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
        model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        model(torch.full((1, 3), float(rank + 1))).sum().backward()
        if attempt == "0" and rank == 1:
            sys.exit(3)
        dist.barrier()
        sys.stdout.write(f"attempt {attempt} rank {rank} gradient {model.module.weight.grad.tolist()}\\n")
        dist.destroy_process_group()
        """,
    )
    done = run_command([*RUN, "--max-restarts", "1", "--nproc", "2", script])
    assert done.exit_code == 0, done
    assert sorted(done.lines) == [f"attempt 1 rank {rank} gradient [[1.5, 1.5, 1.5]]" for rank in (0, 1)]


# The same script three ways


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "world", "wrapped_by"),
    [
        ([*RUN, "--nproc", "2"], 2, "lockstep.ddp"),
        ([*RUN], 1, "lockstep.ddp"),
        ([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], 2, "torch.nn.parallel.distributed"),
        ([sys.executable], 1, "torch.nn.parallel.distributed"),
    ],
    ids=["lockstep run", "lockstep run, one rank", "torchrun", "single process"],
)
def test_plain_script_learns_the_same_however_it_is_started(
    command: list[str], world: int, wrapped_by: str, loss_without_ddp: float
) -> None:
    done = run_command([*command, EXAMPLES / "plain_ddp.py"])
    assert done.exit_code == 0, done
    (line,) = done.lines
    found = re.fullmatch(r"world (\d+), loss (\S+) after 20 steps, wrapped by (\S+)", line)
    assert found, line
    assert (int(found[1]), found[3]) == (world, wrapped_by)
    assert float(found[2]) == pytest.approx(loss_without_ddp, abs=2e-6)


@pytest.fixture(scope="module")
def loss_without_ddp() -> float:
    """What examples/plain_ddp.py learns, computed without any wrapper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(24, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()


# Reading the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given"),
        (["nowhere.py"], "no such script: 'nowhere.py'"),
        (["-m", "no_such_module_at_all"], "no module named 'no_such_module_at_all'"),
        (["--nproc", "0", "{script}"], "--nproc is '0'"),
        (["--nproc", "-2", "{script}"], "--nproc is '-2'"),
        (["--nproc", "many", "{script}"], "--nproc is 'many'"),
        (["--nnodes", "0", "{script}"], "--nnodes is '0'"),
        (["--nnodes", "3:2", "{script}"], "--nnodes is '3:2'"),
        (["--max-restarts", "some", "{script}"], "--max-restarts"),
        (["--max-restarts", "-1", "{script}"], "--max-restarts is -1"),
        (["--monitor-interval", "0", "{script}"], "--monitor-interval is 0"),
        (["--node-rank", "-1", "{script}"], "--node-rank is -1"),
        (["--master-port", "70000", "{script}"], "--master-port is 70000"),
        (["--rdzv-conf", "timeout", "{script}"], "--rdzv-conf is 'timeout'"),
        (["--tee", "9", "{script}"], "--tee is '9'"),
        (["--redirects", "0:9", "{script}"], "--redirects is '0:9'"),
        (["--local-ranks-filter", "first", "{script}"], "--local-ranks-filter is 'first'"),
        (["{folder}"], "is a folder without a __main__.py"),
        # Two mistakes: the one that stands first on the line is the one that is named.
        (["--nproc", "x", "nowhere.py"], "--nproc is 'x'"),
        (["--nproc", "x", "-m", "no_such_module_at_all"], "--nproc is 'x'"),
        (["--nnodes", "x", "nowhere.py"], "--nnodes is 'x'"),
        (["--tee", "9", "nowhere.py"], "--tee is '9'"),
        (["--run-path", "nowhere.py"], "add --no-install"),
        (["--no-python", "{script}"], "add --no-install"),
        (["--run-path", "{script}"], "add --no-install"),
        (["--no-install", "--no-python", "no-such-program-at-all"], "no such program: 'no-such-program-at-all'"),
        (["--stop-grace", "-1", "{script}"], "--stop-grace is -1"),
        (["--stop-grace", "soon", "{script}"], "--stop-grace"),
        (["--start-timeout", "nan", "{script}"], "--start-timeout is nan"),
        (["--report-dir", "{script}", "{script}"], "which is not a folder"),
        (["--signals-to-handle", "SIGNOTHING", "{script}"], "--signals-to-handle is 'SIGNOTHING'"),
        (["--signals-to-handle", "SIGKILL", "{script}"], "--signals-to-handle is 'SIGKILL'"),
        (["--rdzv-endpoint", "localhost:99999", "{script}"], "--rdzv-endpoint is 'localhost:99999'"),
        (["--rdzv-endpoint", "localhost:²", "{script}"], "--rdzv-endpoint is 'localhost:²'"),
        (["--inject", "explode", "{script}"], "there is no fault 'explode'"),
        (["--inject", "kill:rank=1,when=5", "{script}"], "'when=5' is not one of"),
        (["--inject", "kill:rank=-1", "{script}"], "rank is '-1'"),
        (["--nproc", "2", "--inject", "kill:rank=2", "{script}"], "rank is 2, and there are 2 ranks, 0 to 1"),
        (["--inject", "kill:moment=lunch", "{script}"], "there is no moment 'lunch'"),
        (["--inject", "sleep:rank=1", "{script}"], "sleep needs seconds"),
        (["--inject", "nan:moment=forward", "{script}"], "nan happens to a bucket"),
        (["--inject", "kill:step=1,moment=started", "{script}"], "there is no step yet"),
        (["--inject", "kill", "--no-install", "--no-python", "true"], "--inject works in Python programs only"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([word.format(script=script, folder=script.parent) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_a_bad_variable_is_named_before_any_rank_starts(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_STALL_SECONDS", "soon")
    assert launch([str(script)]) == 2
    assert "LOCKSTEP_STALL_SECONDS is 'soon'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nproc_gpu_without_a_gpu_says_so(script: Path) -> None:
    with pytest.raises(BadUse, match=r"--nproc is 'gpu' .*not available"):
        prepare(["--nproc", "gpu", str(script)])


@pytest.mark.parametrize("nproc", ["cpu", "auto"])
def test_nproc_by_name_counts_the_machine(nproc: str, script: Path) -> None:
    assert int(prepare(["--nproc", nproc, str(script)]).nproc_per_node) >= 1


@pytest.mark.parametrize(
    ("words", "is_supervised"),
    [
        ([], True),
        (["--standalone"], True),
        (["--master-port", "29511"], True),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "7"], True),
        (["--rdzv-endpoint", "127.0.0.1:29511"], True),
        (["--nnodes", "1:1"], True),
        (["--nnodes", "2"], False),
        (["--nnodes", "1:4"], False),
        (["--master-addr", "10.0.0.7"], False),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29400"], False),
        (["--rdzv-conf", "timeout=9"], False),
        (["--event-log-handler", "console"], False),
    ],
)
def test_one_host_is_ours_unless_another_rendezvous_is_named(
    words: list[str], is_supervised: bool, script: Path
) -> None:
    assert prepare([*words, str(script)]).is_supervised is is_supervised


def test_torchs_agent_on_one_host_is_standalone_unless_a_rendezvous_is_named(script: Path) -> None:
    assert prepare(["--event-log-handler", "console", str(script)]).standalone
    assert not prepare(["--rdzv-conf", "timeout=9", str(script)]).standalone
    assert not prepare(["--nnodes", "2", str(script)]).standalone


def test_torchrun_options_pass_through(script: Path) -> None:
    args = prepare(["--max_restarts=3", "--tee", "3", "--rdzv-conf", "timeout=9", "--nproc", "2", str(script), "-r"])
    assert (args.max_restarts, args.tee, args.rdzv_conf, args.nproc_per_node) == (3, "3", "timeout=9", "2")
    assert args.training_script_args == [str(script), "-r"]


def test_what_the_user_has_set_is_left_alone() -> None:
    current = {"OMP_NUM_THREADS": "4", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "LOCKSTEP_BACKEND": "gloo"}
    assert rank_environment(current, 2) == {}
    assert "OMP_NUM_THREADS" not in rank_environment({}, 1)


@pytest.mark.parametrize(("num_gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl"), (8, "nccl")])
def test_nccl_only_with_a_gpu_for_each_rank(num_gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The one place where the machine is pretended: hosts with eight GPUs are rare.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert pick_backend(2) == backend
