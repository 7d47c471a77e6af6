"""The shape of the code: who may know whom, where private torch lives, how long a file may be."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from torch import nn

import lockstep

SOURCE = Path(lockstep.__file__).parent

# Each room and the rooms it may import; everything may import errors, settings, torch_private, version.
ALLOWED = {
    "plan": set(),
    "observe": set(),
    "agree": set(),
    "hooks": set(),
    "engine": {"plan", "agree", "observe"},
    "graph": {"engine", "plan", "agree", "observe"},
    "cli": {"observe", "plan", "install", "ddp", "launch", "program", "testing"},
    "launch": {"observe", "agree"},
    "compiling": {"ddp", "graph", "shard"},
    "install": {"ddp", "observe", "shard"},
    "state_dict": set(),
    "checkpoint": {"plan", "agree", "state_dict", "observe"},
    "data": set(),
    "testing": {"checkpoint", "observe"},
    "errors": set(),
    "settings": set(),
    "torch_private": set(),
    "version": set(),
    "shard": {"plan", "engine", "agree", "observe"},
    "program": {"ddp", "shard", "graph", "plan", "engine", "agree", "observe", "state_dict"},
    "ddp": {"graph", "plan", "engine", "agree", "observe", "state_dict"},
}
COMMON = {"errors", "settings", "torch_private", "version"}
HARD_CAP = 600


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def lockstep_imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "lockstep" else [f"lockstep.{a.name}" for a in node.names]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("lockstep.")}
    return found


def test_arrows_point_one_way() -> None:
    wrong = []
    for path in sources():
        here = room(path)
        if here == "__init__":
            continue
        for there in lockstep_imports(ast.parse(path.read_text())) - {here} - COMMON:
            if there not in ALLOWED[here]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {there}")
    assert not wrong, wrong


PRIVATE = re.compile(r"(from|import) torch\.?[\w.]*\._|from torch[\w.]* import .*\b_\w+|torch\._[a-zA-Z]")


def test_private_torch_is_imported_through_one_door() -> None:
    wrong = []
    for path in sources():
        if room(path) == "torch_private":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if PRIVATE.search(line):
                wrong.append(f"{path.relative_to(SOURCE)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_readable() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in sources()}
    long = {name: num for name, num in lengths.items() if num > HARD_CAP}
    assert not long, long


def test_the_public_names_are_frozen() -> None:
    assert set(lockstep.__all__) == {
        "DDP",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "Plan",
        "Timeline",
        "TrainStep",
        "__version__",
        "checkpoint",
        "compile",
        "data",
        "errors",
        "explain",
        "fully_shard",
        "hooks",
        "install",
        "load_step",
        "stopping",
        "uninstall",
        "unwrap",
        "write_report",
    }
    for name in lockstep.__all__:
        assert hasattr(lockstep, name)


def test_the_constructor_is_frozen() -> None:
    """Torch's arguments in torch's order, then ours by keyword."""
    shown = [
        f"{'*' if p.kind is p.KEYWORD_ONLY else ''}{p.name}" + ("" if p.default is p.empty else f"={p.default!r}")
        for p in inspect.signature(lockstep.DistributedDataParallel).parameters.values()
    ]
    assert shown == [
        "module",
        "device_ids=None",
        "output_device=None",
        "dim=0",
        "broadcast_buffers=None",
        "init_sync=True",
        "process_group=None",
        "bucket_cap_mb=None",
        "find_unused_parameters=False",
        "check_reduction=False",
        "gradient_as_bucket_view=None",
        "static_graph=False",
        "delay_all_reduce_named_params=None",
        "param_to_hook_all_reduce=None",
        "mixed_precision=None",
        "device_mesh=None",
        "skip_all_reduce_unused_params=False",
        "bucket_cap_mb_list=None",
        "batched_grad_copy=False",
        "forward_sync_buffers=None",
        "lazy_bucket_allocation=False",
        "*plan=None",
        "*bucket_order='declared'",
        "*overlap=None",
        "*check='step'",
        "*late_timeout=None",
        "*nonfinite='warn'",
    ]


# What torch's class has too, and what only this one has.
TORCHS = """
batched_grad_copy broadcast_bucket_size broadcast_buffers bucket_bytes_cap bucket_bytes_cap_default
bucket_bytes_cap_list buffer_hook device device_ids device_type dim finalize_backward find_unused_parameters
forward_sync_buffers gather gradient_as_bucket_view is_multi_device_module join join_device join_hook
join_process_group lazy_bucket_allocation logger mixed_precision module modules_buffers named_module_buffers no_sync
output_device parameters_to_ignore process_group reducer register_comm_hook require_backward_grad_sync
require_forward_param_sync require_manual_backward_finalization scatter should_finalize_after_backward
skip_all_reduce_unused_params static_graph to_kwargs use_side_stream_for_tensor_copies will_sync_module_buffers
"""
OURS = "bucket_order check explain_compilation metrics overlap plan reset_sync_window step timeline"


def test_the_public_class_is_frozen(world_of_one: None) -> None:
    ddp = lockstep.DDP(nn.Linear(2, 2))
    public = {name for name in dir(ddp) if not name.startswith("_") and not hasattr(nn.Module(), name)}
    assert public == {*TORCHS.split(), *OURS.split()}


def test_grad_is_written_by_the_owners_of_its_memory_only() -> None:
    """Engine and wrapper; a whole program (program/) keeps gradients of its own."""
    allowed = {"engine/grad_memory.py", "engine/grad_results.py", "engine/grads.py", "shard/memory.py"}
    writers = set()
    for room in ("agree", "ddp", "engine", "graph", "hooks", "observe"):
        for path in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
                    writers.add(str(path.relative_to(SOURCE)))
    assert writers <= allowed
