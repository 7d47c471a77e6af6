"""Put Lockstep in the place of torch's DistributedDataParallel, fully_shard and FullyShardedDataParallel, for programs
that stay unchanged.

Modules that already took the class with ``from torch.nn.parallel import DistributedDataParallel`` hold a
reference of their own, so replacing torch's attribute is not enough: every loaded module is looked through.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

from lockstep import settings
from lockstep.observe.moments import StepMoment, reached

__all__ = ["install", "uninstall"]


class _Replaced(NamedTuple):
    """One attribute of one module that holds ``new`` where it held ``old``."""

    module: ModuleType
    attribute: str
    old: Any
    new: Any


# While installed: torch's object and what stands in its place, and every reference that was exchanged.
_stand_ins: list[tuple[Any, Any]] = []
# The part of torch in which programs look for what shards models; the rest of torch means its own class: to its
# checkpoints, a model that is sharded here is one with DTensors.
_SHARDING = ("torch.distributed.fsdp", "torch.distributed._composable")
_replaced: list[_Replaced] = []


def install() -> None:
    """Make ``torch.nn.parallel.DistributedDataParallel`` be Lockstep's, everywhere in this process; and what
    ``torch.distributed.fsdp`` shards models with.

    Modules loaded later get it from torch's own modules; modules loaded before have their reference
    exchanged. Called again, it also reaches modules that took the reference in between.  A bare
    ``torch.distributed.init_process_group()`` takes the backend that ``lockstep run`` chose
    (LOCKSTEP_BACKEND); a backend that the program names itself is never changed.
    """
    # Imported here: `import lockstep` has this module, and must stay light.
    import torch.distributed as dist

    from lockstep import torch_private
    from lockstep.ddp import DistributedDataParallel

    if not _stand_ins:
        _stand_ins.append((torch_private.TorchDDP, DistributedDataParallel))
        _stand_ins.extend(_for_sharding())
        _stand_ins.append((dist.init_process_group, _with_default_backend(dist.init_process_group)))
    for name, module in list(sys.modules.items()):
        # Some libraries put objects that are no modules there; Lockstep itself must keep sight of torch's
        # class.
        if isinstance(module, ModuleType) and name.partition(".")[0] != "lockstep":
            _replace_in(module)


def _for_sharding() -> list[tuple[Any, Any]]:
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - takes torch's own class while that is there
    from torch.distributed import fsdp

    from lockstep import shard

    pairs = {
        "fully_shard": shard.fully_shard,
        "FullyShardedDataParallel": shard.FullyShardedDataParallel,
        "register_fsdp_forward_method": shard.register_forward_method,
        "share_comm_ctx": shard.share_comm_ctx,
    }
    return [(theirs, ours) for name, ours in pairs.items() if (theirs := getattr(fsdp, name, None)) is not None]


def uninstall() -> None:
    """Put back every reference that ``install()`` exchanged; nothing happens where it was not called.

    A reference that someone else changed since then is left alone, and so is one that a module took while
    Lockstep was installed: it cannot be told from an import of Lockstep's own class.  Only torch itself cannot have
    meant Lockstep, so its modules that were loaded meanwhile get their own back.
    """
    for module, attribute, old, new in reversed(_replaced):
        if vars(module).get(attribute) is new:
            vars(module)[attribute] = old
    for name, module in list(sys.modules.items()):
        if _stand_ins and isinstance(module, ModuleType) and name.partition(".")[0] == "torch":
            _put_back_in(module)
    _replaced.clear()
    _stand_ins.clear()


def _replace_in(module: ModuleType) -> None:
    # The namespace is read and written directly: lazy modules import half a library on getattr.
    namespace = vars(module)
    name = str(namespace.get("__name__", ""))
    means_its_own = name.partition(".")[0] == "torch" and not name.startswith(_SHARDING)
    for attribute, value in list(namespace.items()):
        for old, new in _stand_ins:
            if value is old and not (means_its_own and new.__module__.startswith("lockstep.shard")):
                namespace[attribute] = new
                _replaced.append(_Replaced(module, attribute, old, new))


def _put_back_in(module: ModuleType) -> None:
    namespace = vars(module)
    for attribute, value in list(namespace.items()):
        for old, new in _stand_ins:
            if value is new:
                namespace[attribute] = old


def _with_default_backend(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """``init_process_group`` that asks LOCKSTEP_BACKEND where the program leaves the choice open."""
    signature = inspect.signature(init_process_group)

    @functools.wraps(init_process_group)
    def init_with_default_backend(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        chosen = settings.backend()
        if backend is None and kwargs.get("device_id") is None and chosen:
            # Left to itself, torch gives a machine with GPUs no backend for tensors on the CPU.
            backend = "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen
        try:
            given = signature.bind(backend, *args, **kwargs).arguments
        except TypeError:
            init_process_group(backend, *args, **kwargs)  # torch's own complaint
            return
        rank, world = _claimed(given)
        timeout = given.get("timeout")
        patience = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        reached(StepMoment.JOINING, subject=(rank, world, patience))
        if _num_joined and _launcher_has_the_store() and _is_left_to_the_environment(given):
            given.pop("init_method", None)
            given.update(store=_fresh_store(world, given.get("timeout")), rank=rank, world_size=world)
        init_process_group(**given)
        _count_joined()
        reached(StepMoment.JOINED)

    return init_with_default_backend


_num_joined = 0


def _count_joined() -> None:
    global _num_joined
    _num_joined += 1


def _claimed(given: Mapping[str, Any]) -> tuple[int, int]:
    """Which rank of how many this process says it is; -1 where it does not say."""
    found = []
    for argument, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        value = given.get(argument, -1)
        if value == -1:
            value = os.environ.get(variable, -1)
        try:
            found.append(int(value))
        except ValueError:  # torch's to complain of
            found.append(-1)
    return found[0], found[1]


def _launcher_has_the_store() -> bool:
    return settings.run_folder() is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_left_to_the_environment(given: Mapping[str, Any]) -> bool:
    return given.get("store") is None and given.get("init_method") in (None, "env://")


def _fresh_store(world: int, timeout: timedelta | None) -> Any:
    """Keys of its own for a group that is made after another one: the launcher's store keeps those of the first."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world, False, timeout or timedelta(minutes=30))
    return PrefixStore(f"again/{_num_joined}", store)
