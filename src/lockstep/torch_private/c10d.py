"""Process groups, their stores, and collectives without the checks of the public functions."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    _get_default_group,
    _get_default_store,
    _rank_not_in_group,
    _world,
)

# The default group and its store: torch has no public way to ask for either.
default_group: Callable[[], Any] = _get_default_group
default_store: Callable[[], Any] = _get_default_store
# Whether this process is outside of a group: what stands for the group then has no method to ask.
rank_not_in_group: Callable[[Any], bool] = _rank_not_in_group

_options: dict[Any, Any] = {}
_num_made: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()


def all_reduce(process_group: Any, tensor: torch.Tensor, op: Any) -> Any:
    """Start an all-reduce in place; returns its work.

    The public function checks and logs in Python before each call, which a bucket in the backward would pay for.
    """
    options = _options.get(op)
    if options is None:
        options = AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        _options[op] = options
    return process_group.allreduce([tensor], options)


def new_group_of(ranks: list[int], name: str, **options: Any) -> Any:
    """A group that only its members make, under a name that they have in common.

    torch names such a group by how many groups this process is in.  Ranks that are in more groups than others then wait
    for each other under different names, for ever.
    """
    made = _num_made.setdefault(default_group(), Counter())  # of this world: another one begins anew
    made[name, *ranks] += 1
    times = made[name, *ranks]
    digest = hashlib.sha1(f"{name}/{ranks}/{times}".encode(), usedforsecurity=False).hexdigest()
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: digest
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        distributed_c10d._hash_ranks_to_str = original


def backend_name(process_group: Any, device: torch.device) -> str:
    """Which backend serves ``device`` in this group; the public question answers for the group as a whole."""
    try:
        return str(process_group._get_backend(device).name()).lower()
    except (RuntimeError, AttributeError):
        return str(process_group.name()).lower()


def is_pretended(process_group: Any) -> bool:
    """Whether a group only pretends to have other ranks: torch's "fake" backend, which has other names."""
    if process_group.name() == "fake":
        return True
    try:
        return str(dist.get_backend(process_group)) == "fake"
    except (RuntimeError, ValueError, KeyError):
        return False  # a group that was not made by init_process_group


def has_host_groups() -> bool:
    """Whether this torch was built with gloo, which carries what ranks compare."""
    return bool(dist.is_available() and dist.is_gloo_available())


def group_timeout(process_group: Any) -> Any:
    """How long a collective of this group may take; torch has a setter for it, but no question."""
    from datetime import timedelta

    for device in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)


def num_operations(process_group: Any) -> int | None:
    """How many operations this rank has started on a group; torch counts them for its messages, not in each backend."""
    try:
        return int(process_group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def host_group(store: Any, prefix: str, rank: int, world: int, timeout: Any) -> Any:
    """A gloo group that is known to nobody else; ``new_group`` would register it, and needs all ranks of the world."""
    group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, world, timeout)  # type: ignore[attr-defined]
    _host_groups.add(group)
    return group


_host_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def registered_groups() -> Container[Any]:
    """The groups that torch knows, as a view that changes with them: a group that was destroyed is not in it any more.

    torch has no question whether a group was destroyed.
    """
    groups: Container[Any] = _world.pg_map
    return groups


def living_groups() -> list[Any]:
    """All groups of this process: those that torch knows, and those of ``host_group``."""
    return [*_world.pg_map, *_host_groups]


def host_all_gather(group: Any, numbers: torch.Tensor, everyones: torch.Tensor) -> Any:
    """Start gathering numbers of all ranks, one after the other, in ``everyones``; returns the work."""
    options = _options.get("gather")
    if options is None:
        options = _options["gather"] = AllgatherOptions()
        options.asyncOp = True
    return group._allgather_base(everyones, numbers, options)


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "barrier"),
)
_watched: dict[int, tuple[Any, Callable[[str], None]]] = {}


def watch_collectives(process_group: Any, note: Callable[[str], None]) -> None:
    """Call ``note(operation)`` whenever anyone starts a collective on this group; torch has no hook for it."""
    _watched[id(process_group)] = (process_group, note)
    if getattr(dist.ProcessGroup.allreduce, "tells_lockstep", False):
        return
    for name in _COLLECTIVES:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _telling(name, original))


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that tells who watches its group before it starts."""

    def started(group: Any, *args: Any, **kwargs: Any) -> Any:
        entry = _watched.get(id(group))
        if entry is not None:
            entry[1](name)
        return original(group, *args, **kwargs)

    started.tells_lockstep = True  # type: ignore[attr-defined]
    return started
