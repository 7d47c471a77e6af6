"""The autograd engine: its passes, accumulators and hooks, and who holds the memory of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has finished.

    The engine offers no public hook for the end of a pass; torch's own FSDP uses this one.
    """
    Variable._execution_engine.queue_callback(callback)


_hooks_before = attrgetter("_backward_hooks")

# The hooks that run after a parameter's gradient was accumulated, by id and in order; there is a public way to add one,
# and none to see the others.
hooks_after: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")


def only_hooks_are_ours(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but one hook after accumulation looks at these parameters' gradients on their way."""
    try:
        return not any(map(_hooks_before, parameters)) and set(map(len, map(hooks_after, parameters))) == {1}
    except TypeError:  # one of them has none at all
        return False


def has_hooks(parameter: torch.Tensor, num_ours: int) -> bool:
    """Whether anybody but us looks at this parameter's gradient on its way."""
    return bool(_hooks_before(parameter)) or len(hooks_after(parameter) or ()) > num_ours


def engine_will_run(node: Any) -> bool:
    """Whether the backward pass that is running now comes to ``node``.

    Asked for the node that accumulates into .grad, it tells a backward from torch.autograd.grad, for which the
    question is an error.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def inner_tensor(tensor: torch.Tensor) -> int:
    """The address of what is behind a Python tensor; ``torch.utils.swap_tensors`` gives it that of another."""
    return int(tensor._cdata)


def install_hooks_again(tensor: torch.Tensor) -> None:
    """Give the tensor behind ``tensor`` the post-accumulate hooks that its Python side has; the other was swapped."""
    hooks = tensor._post_accumulate_grad_hooks
    if hooks is not None:
        tensor._post_accumulate_grad_hooks = hooks


def memory_owners(tensor: torch.Tensor) -> int:
    """How many tensors, of whoever, live in this tensor's memory; torch counts, but has no public question."""
    count = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return count - 1  # without the storage object just made to ask


def in_nested_backward() -> bool:
    """In a callback at the end of a pass: whether that pass ran inside another one (a reentrant checkpoint).

    The thread then still has a node of the outer pass under evaluation; no public question gives that away.
    """
    return torch._C._current_autograd_node() is not None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass right now."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_accumulator(parameter: torch.Tensor) -> Any | None:
    """The graph node that adds into ``parameter.grad``; distributed autograd calls only hooks that sit on it.

    None where autograd is out of reach: inside an operator that a dispatch mode (a flop counter, say) has called.
    """
    with torch.enable_grad():
        viewed = parameter.view_as(parameter)
        if viewed.grad_fn is None and parameter.requires_grad:
            # Where an operator has turned autograd off for what it calls, as compiled graphs do in their first run.
            excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
            with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
                viewed = parameter.view_as(parameter)
    return None if viewed.grad_fn is None else viewed.grad_fn.next_functions[0][0]


# What the node that adds into a parameter's .grad was made for: while it is the same, so is a node that is held.
accumulator_kind = attrgetter("dtype", "device", "layout", "_cdata")


def preserve_version_counter(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Buffers are overwritten between forward and backward; autograd must not take that for a user's edit."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def current_dist_autograd_context() -> int | None:
    """Id of the distributed autograd context this thread is in, if any (torch offers no public question for it).

    Without an RPC agent there can be none, which is the cheap and usual answer.
    """
    if not (dist.is_available() and dist.rpc.is_available() and torch._C._distributed_rpc._is_current_rpc_agent_set()):
        return None
    from torch.distributed.autograd import _current_context  # type: ignore[attr-defined]

    try:
        return int(_current_context()._context_id())
    except RuntimeError:
        return None


def current_node() -> Any:
    """The autograd node that the engine evaluates on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def will_run_all(nodes: Iterable[Any]) -> bool:
    """Whether the backward that is running now comes to all of these nodes; see ``engine_will_run``."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def move_hook_to_end(parameter: torch.Tensor, hook_id: int) -> bool:
    """Let one hook after accumulation be the last to run; returns whether it was the last already."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if next(reversed(hooks)) == hook_id:
        return True
    hooks[hook_id] = hooks.pop(hook_id)  # not move_to_end: autograd walks the plain dict beneath the ordered one
    return False


def graph_task_id() -> int:
    """A number for the backward that is running on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def node_metadata(node: Any) -> dict[str, Any]:
    """What anyone may attach to a node of autograd's graph; it lives with the node. Public, but typed wrongly."""
    return node.metadata  # type: ignore[no-any-return]


def is_compiled_node(node: Any) -> bool:
    """Whether this node of autograd's graph is the backward of a compiled region; its class has no public name."""
    return bool(node.name() == "CompiledFunctionBackward")


def accumulation_positions(node: Any) -> dict[int, int]:
    """For each parameter that this node hands a gradient to, by ``id``: which of its results that is."""
    positions = {}
    for position, (following, _) in enumerate(node.next_functions):
        variable = getattr(following, "variable", None)
        if variable is not None:
            positions[id(variable)] = position
    return positions
