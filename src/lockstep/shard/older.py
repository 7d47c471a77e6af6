"""``lockstep.FullyShardedDataParallel``: the older class by its own names, as a thin layer on ``fully_shard``.

Units are made in place: what ``auto_wrap_policy`` chooses becomes a sharded module, and no wrapper stands around it.
So names of parameters are the plain model's everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from lockstep.shard import older_optim, older_state
from lockstep.shard.added import Added
from lockstep.shard.api import shard_modules
from lockstep.shard.clip import clip_together
from lockstep.shard.mesh import ShardMesh, take_mesh
from lockstep.shard.module import ShardedModule
from lockstep.shard.root import root_of, units_in
from lockstep.shard.unit import Unit

_INNER = "_fsdp_wrapped_module"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_OPTIONS_OF_ONE = {"sharding_strategy", "mixed_precision", "cpu_offload"}
_WITHOUT_MEANING = {
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "device_id",
}
_KEEPS_WHOLE = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters are sharded; the arguments are those of torch's older class.

    What has no meaning here is accepted where it cannot change a result: ``backward_prefetch``, ``forward_prefetch``
    and ``limit_all_gathers`` (the next unit is always gathered ahead, and never more), ``use_orig_params`` (always
    so).
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.sharding_strategy = strategy
        ignored = _ignored(ignored_modules, ignored_states)
        _initialize(module, param_init_fn, device_id)
        mesh = _mesh_for(strategy, process_group, device_mesh, module)
        if sync_module_states:
            _synchronize(module, ignored, mesh)
        self.mixed_precision = mixed_precision
        if mixed_precision is not None and mixed_precision.buffer_dtype is not None:
            for buffer in module.buffers():
                buffer.data = buffer.to(mixed_precision.buffer_dtype) if buffer.is_floating_point() else buffer
        chosen: dict[str, Any] = {
            "sharding_strategy": strategy,
            "mixed_precision": mixed_precision,
            "cpu_offload": cpu_offload,
        }
        for inner, own in _chosen(module, auto_wrap_policy, ignored):
            options = _options(**{**chosen, **own})
            shard_modules([inner], mesh, ignored=ignored, **options)
        options = _options(**chosen)
        options["frees"] = None if options["frees"] else False
        shard_modules([module], mesh, ignored=ignored, **options)
        self._fsdp_wrapped_module = module
        self.register_load_state_dict_pre_hook(_take_plain_names)

    # ---------------------------------------------------------------- as a module

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """What the module has, this one has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(_INNER), name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Under the plain model's names, and so are parameters and buffers; also from a module around this one."""
        memo = set() if memo is None else memo
        if self in memo and remove_duplicate:
            return
        memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    # ---------------------------------------------------------------- training

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, gradients add up locally; the first backward outside reduces all of them."""
        return Added.no_sync(self._inner)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients together; the norm is the whole model's, on every rank."""
        return clip_together(self.parameters(), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that wait for a reduction."""
        self._inner.zero_grad(set_to_none)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        Added.register_comm_hook(self._inner, state, hook)

    @property
    def _inner(self) -> ShardedModule:
        inner = self._fsdp_wrapped_module
        assert isinstance(inner, ShardedModule)
        return inner

    def check_is_root(self) -> bool:
        """Whether no other sharded module is around this one."""
        return self._inner._lockstep_unit.parent is None

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to all modules while their parameters are whole, and write back what it did."""
        with self.summon_full_params(self, writeback=True):
            super().apply(fn)
        return self

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The sharded modules inside."""
        found: list[Any] = [m for m in module.modules() if isinstance(m, ShardedModule)]
        return [m for m in found if m._lockstep_unit.parent is None] if root_only else found

    # ---------------------------------------------------------------- state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``state_dict_type`` says; whole tensors unless told otherwise."""
        destination = args[0] if args else kwargs.get("destination")
        before = set(destination or ())
        state = self._fsdp_wrapped_module.state_dict(*args, **kwargs)
        mine = {name: value for name, value in state.items() if name not in before}
        made = older_state.as_chosen(self, mine)
        if destination is None:
            return made
        for name in mine:  # of a module around this one, which goes on with the dict that it has given
            del state[name]
        state.update(made)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Whole tensors or DTensors, under the plain model's names."""
        plain = {name.replace(f"{_INNER}.", ""): value for name, value in state_dict.items()}
        cut = older_state.cut_to_shards(self._fsdp_wrapped_module, plain)
        return self._fsdp_wrapped_module.load_state_dict(cut, strict=strict, assign=assign)

    set_state_dict_type = staticmethod(older_state.set_state_dict_type)
    get_state_dict_type = staticmethod(older_state.get_state_dict_type)
    state_dict_type = staticmethod(older_state.state_dict_type)

    @staticmethod
    def giving_shards(module: nn.Module) -> AbstractContextManager[None]:
        """Within this context ``state_dict()`` holds the shards themselves, whatever was chosen."""
        return older_state.state_dict_type(module, StateDictType.SHARDED_STATE_DICT)

    optim_state_dict = staticmethod(older_optim.optim_state_dict)
    optim_state_dict_to_load = staticmethod(older_optim.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(older_optim.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(older_optim.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(older_optim.shard_full_optim_state_dict)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Have whole parameters within this context; ``writeback`` keeps what is done to them."""
        if with_grads or offload_to_cpu:
            raise NotImplementedError("summon_full_params with gradients, or on the host: use full_tensor() on each.")
        if rank0_only and writeback:
            raise NotImplementedError("summon_full_params(rank0_only=True) cannot write back; set writeback=False.")
        units = [unit for _, unit in units_in(module)]
        for unit in units if recurse else units[:1]:
            root_of(unit)
            unit.refresh()
            unit.wait()
        try:
            yield
            if writeback:
                for unit in units:
                    _write_back(unit)
        finally:
            for unit in units:
                unit.reshard()


def _write_back(unit: Unit) -> None:
    if not unit.is_full:
        return
    with torch.no_grad():
        for store in unit.stores:
            for parameter, cut in zip(store.parameters, store.layout.cuts, strict=True):
                assert parameter.full is not None
                size = parameter.local.shape[cut.spec.dim]
                start = store.rank * cut.chunk if size else 0
                parameter.local.copy_(parameter.full.detach().narrow(cut.spec.dim, start, size))


def _take_plain_names(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module around this one loads: its keys are the plain model's, and its tensors may be whole."""
    inner, own = f"{prefix}{_INNER}.", {}
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        own[key.removeprefix(prefix)] = state.pop(key)
    for key, value in older_state.cut_to_shards(module._fsdp_wrapped_module, own).items():
        state[inner + key] = value


# ---------------------------------------------------------------- what the arguments mean


def _options(
    sharding_strategy: ShardingStrategy, mixed_precision: MixedPrecision | None, cpu_offload: CPUOffload | None
) -> dict[str, Any]:
    """What one unit is made with."""
    offloads = cpu_offload is not None and cpu_offload.offload_params
    return {
        "policy": _policy(mixed_precision),
        "offload": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        "placement": None,
        "num_keepers": 0,
        "frees": sharding_strategy not in (*_KEEPS_WHOLE, ShardingStrategy.NO_SHARD),
    }


def _own_options(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """What a ``CustomPolicy`` says for one module, without what has no meaning for it."""
    refused = sorted(set(given) - _OPTIONS_OF_ONE - _WITHOUT_MEANING)
    strategy = given.get("sharding_strategy")
    if strategy not in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        refused.append(f"sharding_strategy={strategy}")
    if refused:
        raise NotImplementedError(
            f"A CustomPolicy gives {', '.join(refused)} for {type(module).__name__}; one module can have its own "
            "mixed_precision, cpu_offload, and FULL_SHARD or SHARD_GRAD_OP, on the mesh of all."
        )
    return {name: value for name, value in given.items() if name in _OPTIONS_OF_ONE}


def _policy(mixed: MixedPrecision | None) -> MixedPrecisionPolicy:
    if mixed is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=mixed.param_dtype,
        reduce_dtype=mixed.reduce_dtype or mixed.param_dtype,
        cast_forward_inputs=mixed.cast_forward_inputs or mixed.cast_root_forward_inputs,
    )


def _mesh_for(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None, module: nn.Module) -> ShardMesh:
    if mesh is not None and group is not None:
        raise ValueError("Cannot pass both process_group and device_mesh at the same time. Please just pass only one.")
    if mesh is None and group is not None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator.type
        names = ("replicate", "shard")
        if isinstance(group, (tuple, list)):
            shard, replicate = group
            mesh = DeviceMesh.from_group([replicate, shard], device, mesh=_grid(shard, replicate), mesh_dim_names=names)
        else:
            mesh = DeviceMesh.from_group(group, device)
    found = take_mesh(mesh)
    if strategy in _HYBRID and found.replicate_axis is None:
        raise ValueError(
            f"{strategy} needs a 2D device_mesh (replicate x shard), or process_group=(shard group, replicate group)."
        )
    if strategy is ShardingStrategy.NO_SHARD:
        if found.replicate_axis is not None:
            raise ValueError("NO_SHARD takes a 1D mesh, or a process group.")
        return ShardMesh(found.mesh, None, 0)
    return found


def _grid(shard: Any, replicate: Any) -> Tensor:
    """All ranks by replica and shard, told by each."""
    mine = torch.tensor([dist.get_process_group_ranks(shard)])
    rows = [torch.empty_like(mine) for _ in range(replicate.size())]
    dist.all_gather(rows, mine, group=replicate)
    return torch.cat(rows)


def _ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> set[nn.Parameter]:
    ignored: set[nn.Parameter] = set()
    for state in (*(modules or ()), *(states or ())):
        ignored |= set(state.parameters()) if isinstance(state, nn.Module) else {state}
    return ignored


def _initialize(module: nn.Module, init: Callable[[nn.Module], None] | None, device: int | torch.device | None) -> None:
    """Give a module on the meta device its values, and move it."""
    if any(p.is_meta for p in module.parameters()):
        if init is None:
            raise ValueError("The module has parameters on the meta device: give a param_init_fn that makes them.")
        for inner in module.modules():
            if any(p.is_meta for p in inner.parameters(recurse=False)):
                init(inner)
    if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
        module.to(device)


def _synchronize(module: nn.Module, ignored: set[nn.Parameter], mesh: ShardMesh) -> None:
    """Take rank 0's values."""
    first = mesh.ranks[0]
    groups = [g for g in (mesh.shard_group, mesh.replicate_group) if g is not None]
    with torch.no_grad():
        for tensor in (*(p for p in module.parameters() if p not in ignored), *module.buffers()):
            for group in dict.fromkeys(reversed(groups)):
                ranks = dist.get_process_group_ranks(group)
                dist.broadcast(tensor, first if first in ranks else ranks[0], group=group)


Chosen = list[tuple[nn.Module, dict[str, Any]]]


def _chosen(module: nn.Module, policy: Any, ignored: set[nn.Parameter]) -> Chosen:
    """The modules inside that the policy makes units of, inner ones first, each with options of its own."""
    if policy is None:
        return []
    choose = getattr(policy, "_lambda_fn", None)
    chosen: Chosen = []
    seen: set[nn.Module] = set()

    def size(inner: nn.Module) -> int:
        return sum(p.numel() for p in inner.parameters() if p not in ignored)

    def walk(inner: nn.Module) -> int:
        """Returns how many elements inside have a unit."""
        if inner in seen:
            return size(inner)
        seen.add(inner)
        total, wrapped = size(inner), 0
        if choose is None and not policy(module=inner, recurse=True, nonwrapped_numel=total):
            return 0
        wrapped = sum(walk(child) for child in inner.children())
        if inner is module:
            return wrapped
        takes = (
            choose(inner)
            if choose is not None
            else policy(module=inner, recurse=False, nonwrapped_numel=total - wrapped)
        )
        if (takes or isinstance(takes, dict)) and total > wrapped:
            chosen.append((inner, _own_options(inner, takes) if isinstance(takes, dict) else {}))
            return total
        return wrapped

    walk(module)
    return chosen


__all__ = ["FullyShardedDataParallel", "StateDictType"]
