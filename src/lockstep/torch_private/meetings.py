"""Where dynamo lets ranks meet while it compiles, or before it runs what it compiled: its two kinds of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# What a rank tells of the inputs of a frame: numbers, sizes, strides; each plain, or a word such as "dynamic".
_State = dict[str, dict[str, Any]]


def stand_in_for_compiler_collectives(gather: Callable[[str, _State], list[_State]]) -> None:
    """Let ``gather(frame, mine)`` bring what all ranks know of a frame's inputs, where dynamo gathers it.

    Its own way (``enable_compiler_collectives``) makes a process group in the first compilation, asks for groups with
    one kind of device, and divides by the number of accelerators; so it fails on a CPU, and a rank that does not
    compile leaves the others waiting.  There is no hook for another way.
    """
    from torch._dynamo import config, convert_frame
    from torch._dynamo.output_graph import OutputGraph

    if getattr(OutputGraph.run_compiler_collective, "_asks_lockstep", False):
        return

    def get_compile_pg() -> Any:
        wanted = config.enable_compiler_collectives and dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if wanted else None

    def run_compiler_collective(self: Any, *args: Any) -> None:
        tx = args[0] if args else self.root_tx  # older versions are given it
        state = None if tx is None else tx.distributed_state
        if state is None or state.all_states is not None:
            return
        code = tx.f_code
        frame = f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
        everyones = gather(frame, _told(state.local_state))
        state.all_states = [_heard(theirs) for theirs in everyones]
        tx.speculation_log.clear()  # what is traced may be another thing now
        raise torch._dynamo.exc.CompileCollectiveRestartAnalysis

    run_compiler_collective._asks_lockstep = True  # type: ignore[attr-defined]
    convert_frame.get_compile_pg = get_compile_pg  # type: ignore[attr-defined]
    OutputGraph.run_compiler_collective = run_compiler_collective  # type: ignore[method-assign]


def compiler_collectives_off() -> None:
    """Let this process compile without asking the others from now on."""
    from torch._dynamo import config

    config.enable_compiler_collectives = False


def stand_in_for_guard_collectives(agree: Callable[[bool], bool]) -> None:
    """Let ``agree(mine)`` say whether compiled code is used, where dynamo asks all ranks, or is asking already."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo import eval_frame

    if getattr(eval_frame.guard_collectives_hook, "_asks_lockstep", False):
        return
    from lockstep.torch_private.dynamo import leave_to_python

    @leave_to_python
    def guard_collectives_hook(guard_eval_result: bool) -> bool:
        return agree(guard_eval_result)

    guard_collectives_hook._asks_lockstep = True  # type: ignore[attr-defined]
    eval_frame.guard_collectives_hook = guard_collectives_hook
    if set_guard_complete_hook(None) is not None:
        set_guard_complete_hook(guard_collectives_hook)  # type: ignore[arg-type]


def guard_collectives_off() -> None:
    """Let this process use its compiled code without asking the others from now on."""
    torch.compiler.set_enable_guard_collectives(False)


def _told(local: Any) -> _State:
    """What a rank knows, without objects of dynamo's: as text it can be read by anyone, and run by nobody."""
    return {
        name: {part: _plain(getattr(entry, part)) for part in ("scalar", "size", "stride")}
        for name, entry in local.automatic_dynamic.items()
    }


def _heard(told: _State) -> Any:
    """What another rank told, as dynamo's objects."""
    from torch._dynamo.pgo import FrameStateSizeEntry
    from torch._dynamo.symbolic_convert import LocalState

    return LocalState(
        {
            str(name): FrameStateSizeEntry(**{part: _object(entry[part]) for part in ("scalar", "size", "stride")})
            for name, entry in told.items()
        }
    )


def _plain(value: Any) -> Any:
    """A size or stride as plain data."""
    from torch._dynamo.pgo import InferStride, auto_dynamic, auto_unset

    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if value is auto_dynamic:
        return "dynamic"
    if value is auto_unset:
        return "unknown"
    return {"after": value.dim} if isinstance(value, InferStride) else int(value)


def _object(value: Any) -> Any:
    """The size or stride behind plain data."""
    from torch._dynamo.pgo import InferStride, auto_dynamic, auto_unset

    if isinstance(value, list):
        return tuple(_object(part) for part in value)
    if isinstance(value, str):
        return {"dynamic": auto_dynamic, "unknown": auto_unset}[value]
    return InferStride(int(value["after"])) if isinstance(value, dict) else int(value)
