"""The one door to private torch API.

Every private name the project uses is imported in here, with the reason and what stands in its way.  torch moves these
every two months; ``tests/torch_private`` fails by the name that moved.

The names live in parts by topic, and a part is loaded when one of its names is first asked for: ``import lockstep``
must not wait for a compiler that a program may never use.  What a part defines without an underscore is in the table
below; a test compares them.
"""

# ruff: noqa: F403 - what the parts export is checked by the test of the table

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from lockstep.torch_private.around import *
    from lockstep.torch_private.artifacts import *
    from lockstep.torch_private.autograd import *
    from lockstep.torch_private.backends import *
    from lockstep.torch_private.c10d import *
    from lockstep.torch_private.ddp import *
    from lockstep.torch_private.dynamo import *
    from lockstep.torch_private.fakes import *
    from lockstep.torch_private.graphs import *
    from lockstep.torch_private.inductor import *
    from lockstep.torch_private.meetings import *
    from lockstep.torch_private.operators import *
    from lockstep.torch_private.profiler import *
    from lockstep.torch_private.programs import *
    from lockstep.torch_private.shards import *
    from lockstep.torch_private.tensors import *
    from lockstep.torch_private.tuning import *

_NAMES_BY_PART = {
    "around": (
        "global_hooks",
        "modes_around",
        "noting_seeds",
    ),
    "artifacts": (
        "compile_counts",
        "compiled_libraries",
        "compiler_settings",
        "is_library_name",
        "load_compiled",
        "pretended_group_options",
        "save_compiled",
        "why_nothing_is_kept",
    ),
    "autograd": (
        "accumulation_positions",
        "accumulator_kind",
        "current_dist_autograd_context",
        "current_node",
        "engine_will_run",
        "gradient_accumulator",
        "graph_task_id",
        "has_hooks",
        "hooks_after",
        "in_backward",
        "in_nested_backward",
        "inner_tensor",
        "install_hooks_again",
        "is_compiled_node",
        "memory_owners",
        "move_hook_to_end",
        "node_metadata",
        "only_hooks_are_ours",
        "preserve_version_counter",
        "queue_backward_callback",
        "will_run_all",
    ),
    "backends": (
        "aot_backend",
        "aot_backend_parts",
        "register_backend",
        "unwrap_backend",
    ),
    "c10d": (
        "all_reduce",
        "backend_name",
        "default_group",
        "default_store",
        "group_timeout",
        "has_host_groups",
        "host_all_gather",
        "host_group",
        "is_pretended",
        "living_groups",
        "new_group_of",
        "num_operations",
        "rank_not_in_group",
        "registered_groups",
        "watch_collectives",
    ),
    "ddp": (
        "BufferCommHookLocation",
        "BuiltinCommHookType",
        "GradBucket",
        "MixedPrecision",
        "TorchDDP",
        "WatchedJoin",
        "as_overlapped_optimizer",
        "cast_forward_inputs",
        "in_backward_optimizer_handles",
        "inputs_to_device",
    ),
    "dynamo": (
        "at_end_of_compiled_backward",
        "compiler_is_off",
        "compiler_is_watching",
        "frame_without_compiler",
        "guard_on_groups",
        "hands_over_graphs",
        "has_compiled_code",
        "in_compiled_backward",
        "is_compiled",
        "is_exporting",
        "leave_frame_to_python",
        "leave_to_python",
        "on_graph_so_far",
        "own_code",
        "recompile_reason",
        "split_reason",
        "stand_in_for_ddp_optimizer",
        "when_compiling_fails",
        "with_effects_in_trace",
        "without_compiler",
    ),
    "fakes": (
        "fake_copy",
        "fake_mode_for",
        "fake_tensor",
        "run_on_fakes",
        "saved_tensor_hooks_wait",
        "tracing_context_of_a_part",
    ),
    "graphs": (
        "copy_node_origin",
        "enters_autocast",
        "exit_autocast",
        "exits_autocast",
        "gradient_positions",
        "graph_input_name",
        "inputs_changed",
        "new_graph_input",
        "node_flops",
        "plain_inputs",
        "sets_grad_mode",
        "size_hint",
    ),
    "inductor": (
        "compile_with_inductor",
        "graph_pass",
        "inductor_backend",
        "inductor_cache_directory",
        "inductor_can_cache",
        "inductor_config_of",
        "inductor_input",
        "inductor_meets_ranks",
        "inductor_setting",
        "joint_graphs_are_made",
    ),
    "meetings": (
        "compiler_collectives_off",
        "guard_collectives_off",
        "stand_in_for_compiler_collectives",
        "stand_in_for_guard_collectives",
    ),
    "operators": ("call_directly",),
    "profiler": ("RecordFunction",),
    "programs": (
        "TraceError",
        "argument_of",
        "as_if_compiling",
        "compile_program",
        "kind_of_trace_error",
        "memory_of_trace",
        "optimizer_has_hooks",
        "scaler_tensors",
        "trace_program",
        "tracing_compiled_modules",
        "written_arguments",
    ),
    "shards": (
        "dtensor_around",
        "dtensor_handlers",
        "group_memory",
        "joined_mesh",
        "local_of",
        "mark_as_sharded",
        "set_local",
        "spec_of",
        "strided_shard",
        "torch_fully_shard",
    ),
    "tensors": (
        "alias",
        "chunk_cat",
        "dtensor_like",
        "flatten_dense",
        "foreach_add",
        "foreach_copy",
        "foreach_lerp",
        "foreach_mul",
        "foreach_zero",
        "shard_of",
        "storage_of",
        "unflatten_dense",
    ),
    "tuning": ("stand_in_for_timing",),
}
_PART_OF = {name: part for part, names in _NAMES_BY_PART.items() for name in names}

__all__ = sorted(_PART_OF)

# Out of sight of type checkers, for which a module with __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load the part that has ``name``, and keep the name here: only the first access comes this way."""
        if name not in _PART_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_PART_OF[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
