"""A warm process that forks ranks on request.

Importing torch costs about two seconds per process, so a test that started four fresh interpreters would
spend its time importing. This server imports once, computes nothing that starts a thread (no thread pool, no process
group, so forking it is safe), and forks every rank of every run from that clean state.

One run at a time. A request is one JSON line on stdin, a reply one JSON line on stdout. Everything larger
(arguments, return values, output) travels through files in the run's own directory:

    request.pkl                function name and arguments, written by the client
    store_port                 the port of this run's TCPStore, chosen by the kernel
    outcome_<rank>.pkl         what the rank returned or raised
    output_<rank>.txt          its stdout and stderr
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_S = 0.004
# A rank that lost a peer is told so by gloo at once; a rank still alive this long after another one failed
# is waiting for something that will never come.
GRACE_AFTER_FAILURE_S = 180.0
LEFTOVER_GRACE_S = 20.0
FOR_THE_FIRST_COMPILATION = [
    "lockstep.torch_private.autograd",
    "lockstep.torch_private.backends",
    "lockstep.torch_private.c10d",
    "lockstep.torch_private.fakes",
    "lockstep.torch_private.graphs",
    "lockstep.torch_private.inductor",
    "lockstep.torch_private.meetings",
    "lockstep.torch_private.profiler",
    "lockstep.torch_private.tensors",
    "sympy.physics.units",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.dce_extra_outputs",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.utils.cpp_extension",
]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def set_process_option(option: int, value: int) -> None:
    """prctl where there is one (Linux); elsewhere the clean-up is only as good as the process group."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@dataclass
class Run:
    directory: Path
    world: int
    limit_s: float
    group_id: int = 0
    store_pid: int = 0
    rank_of_pid: dict[int, int] = field(default_factory=dict)
    exit_status: dict[int, int] = field(default_factory=dict)
    timed_out: bool = False


# Inside a rank


def become_rank(run: Run, rank: int, request: dict[str, Any]) -> None:
    """Everything a forked rank does, from its first line to its last. Never returns."""
    join_process_group_of(run)
    output = os.open(run.directory / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
    faulthandler.enable(file=2)
    # The server sends this before it kills a run that ran out of time, so that the report shows where.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    try:
        outcome: dict[str, Any] = {"value": run_function(run, rank, connect_store(run), request)}
    except BaseException as error:
        outcome = describe_error(error)
    write_outcome(run.directory / f"outcome_{rank}.pkl", outcome)
    if "value" in outcome:  # peers of a rank that failed must see it go
        leave_together(run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_function(run: Run, rank: int, store: Any, request: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(run.world),
        LOCAL_WORLD_SIZE=str(run.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=(run.directory / "store_port").read_text(),
        OMP_NUM_THREADS="1",
        # Without this gloo binds to whatever the host name resolves to.
        GLOO_SOCKET_IFNAME="lo",
        **request["env"],
    )
    torch.set_num_threads(1)
    # Different on every rank: equal weights must come from the wrapper, not from equal seeds.
    torch.manual_seed(1000 + rank)
    with open(run.directory / "request.pkl", "rb") as file:
        args, kwargs = pickle.load(file)
    function: Any = importlib.import_module(request["module"])
    for part in request["qualname"].split("."):
        function = getattr(function, part)
    if request["init_process_group"]:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=run.world, timeout=timedelta(seconds=run.limit_s)
        )
        meet(store, run.world)
    return function(*args, **kwargs)


def meet(store: Any, world: int) -> None:
    """Waits until every rank has its connections: gloo fails on a late one whose peer has ended by then."""
    if store.add("harness/connected", 1) == world:
        store.set("harness/all_connected", "")
    store.wait(["harness/all_connected"])


def connect_store(run: Run) -> Any:
    import torch.distributed as dist

    port_file = run.directory / "store_port"
    deadline = time.monotonic() + run.limit_s
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the run's store did not start")
        time.sleep(POLL_S)
    port = int(port_file.read_text())
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=run.limit_s))


def leave_together(run: Run) -> None:
    """Keeps this rank's sockets open until every peer has its outcome or is dead.

    Not for ever: some tests are about a rank that is gone while others still wait for it.
    """
    deadline = time.monotonic() + 10
    waiting = set(range(run.world))
    while waiting and time.monotonic() < deadline:
        for ending in ("outcome_{}.pkl", "died_{}"):
            waiting = {r for r in waiting if not (run.directory / ending.format(r)).exists()}
        time.sleep(POLL_S)


def describe_error(error: BaseException) -> dict[str, Any]:
    return {
        "error_type": type(error).__name__,
        "error_bases": [base.__name__ for base in type(error).__mro__],
        "error_text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def write_outcome(path: Path, outcome: dict[str, Any]) -> None:
    try:
        data = pickle.dumps(outcome)
    except Exception as error:  # a value that cannot travel is the test's mistake; say which
        data = pickle.dumps(describe_error(TypeError(f"the rank's return value cannot be pickled: {error}")))
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


# In the server


def fork(child_main: Any, *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
            child_main(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    return pid


def join_process_group_of(run: Run) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(0, run.group_id)


def host_store(run: Run) -> None:
    """The store lives outside the ranks, as it does under torchrun, so that it outlives a failing rank 0."""
    join_process_group_of(run)
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    temporary = run.directory / "store_port.tmp"
    temporary.write_text(str(store.port))
    temporary.rename(run.directory / "store_port")
    while True:
        signal.pause()


def execute(run: Run, request: dict[str, Any]) -> dict[str, Any]:
    run.store_pid = fork(host_store, run)
    run.group_id = run.store_pid
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(run.store_pid, run.store_pid)
    for rank in range(run.world):
        run.rank_of_pid[fork(become_rank, run, rank, request)] = rank
    wait_for_ranks(run)
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.store_pid, signal.SIGKILL)
    leftovers = wait_for_leftovers(run)
    kill_everything(run, leftovers)
    return {
        "exit_status": {str(rank): status for rank, status in run.exit_status.items()},
        "timed_out": run.timed_out,
        "leftovers": [] if run.timed_out else [f"pid {pid}: {command}" for pid, command in leftovers],
    }


def wait_for_ranks(run: Run) -> None:
    deadline = time.monotonic() + run.limit_s
    while len(run.exit_status) < run.world:
        reap(run)
        if any(failed(run, rank) for rank in run.exit_status):
            deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        if time.monotonic() > deadline:
            run.timed_out = True
            stop_ranks(run)
            return
        time.sleep(POLL_S)


def failed(run: Run, rank: int) -> bool:
    path = run.directory / f"outcome_{rank}.pkl"
    return run.exit_status[rank] != 0 or b"error_text" in path.read_bytes()[:400]


def stop_ranks(run: Run) -> None:
    """Each rank prints its stacks, then the whole process group is killed."""
    for pid, rank in run.rank_of_pid.items():
        if rank not in run.exit_status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(run.group_id, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while len(run.exit_status) < run.world and time.monotonic() < deadline:
        reap(run)
        time.sleep(POLL_S)


def reap(run: Run) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in run.rank_of_pid:
            rank = run.rank_of_pid[pid]
            run.exit_status[rank] = os.waitstatus_to_exitcode(status)
            if run.exit_status[rank] != 0:
                (run.directory / f"died_{rank}").touch()


def wait_for_leftovers(run: Run) -> list[tuple[int, str]]:
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while True:
        reap(run)
        leftovers = processes_of(run)
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        time.sleep(POLL_S)


def processes_of(run: Run) -> list[tuple[int, str]]:
    """Live processes of the run's group, and orphans the kernel has handed to this server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            state, parent, group = fields[0], int(fields[1]), int(fields[2])
            ours = group == run.group_id or parent == os.getpid()
            if ours and state != "Z" and int(entry.name) != os.getpid():
                found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ").strip()))
        except (OSError, ValueError, IndexError):
            continue
    return found


def kill_everything(run: Run, leftovers: list[tuple[int, str]]) -> None:
    for pid, _ in leftovers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes_of(run) and time.monotonic() < deadline:
        reap(run)
        time.sleep(POLL_S)
    reap(run)


def preload(modules: list[str], sys_path: list[str]) -> list[ModuleType]:
    for path in sys_path:
        if path not in sys.path:
            sys.path.append(path)
    found = []
    for name in modules:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError:
            if not name.startswith("torch."):  # else a part that this version of torch does not have
                raise
    return found


@functools.cache
def warm_compiler() -> None:
    """Do once what torch leaves to the first compilation of each process; of use only, so what is missing is left."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    import torch

    for name in FOR_THE_FIRST_COMPILATION:
        with contextlib.suppress(ImportError):
            if name.partition(".")[0] in sys.modules:  # not Lockstep, where torch's own class is the subject
                importlib.import_module(name)
    with contextlib.suppress(Exception):
        from torch._inductor.codecache import torch_key
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        torch_key()  # reads all of torch's files
        pick_vec_isa()  # asks the compiler
    with contextlib.suppress(Exception):
        from torch._inductor.codegen.common import init_backend_registration
        from torch._inductor.fx_passes import joint_graph
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread for progress bars: this process forks
        init_backend_registration()
        joint_graph.lazy_init(torch.device("cpu"))
    with contextlib.suppress(AttributeError):
        # Times the guards of each graph for a line in a log, after it has swept the caches with 32 MB.
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if not torch.backends.cuda.is_built():  # there autograd would start a thread for each GPU
        compile_once()


def compile_once() -> None:
    """Compile something small, without Inductor and its threads: a rank's own first graph then costs a third less."""
    import torch

    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):  # a test will say what is wrong
        model = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager")
        model(torch.ones(2, 3)).sum().backward()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    threads = list(Path("/proc/self/task").glob("*"))
    assert len(threads) <= 1, "a process with threads cannot be forked safely"


def main() -> None:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    # Ctrl-C at the terminal is the client's business; it closes the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            preload(request["preload"], request["sys_path"])
            warm_compiler()
            gc.freeze()  # a collection in a rank would touch, and so copy, every page of this process
            run = Run(Path(request["directory"]), request["world"], request["limit_s"])
            reply = execute(run, request)
        except BaseException:
            reply = {"server_error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
