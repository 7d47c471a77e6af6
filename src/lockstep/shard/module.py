"""The face of a sharded module: torch's ``FSDPModule``, by the same names.

``fully_shard`` gives a module a class of its own that is both this one and the module's.  Calling it gathers, runs
and frees; where a compiler traces the call, the same is put into its graph (``traced.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from lockstep import torch_private
from lockstep.agree.last_words import notice
from lockstep.shard.added import Added, names_for
from lockstep.shard.graph_ops import make_known
from lockstep.shard.loading import follow, take_part_in_loading
from lockstep.shard.moments import after_forward, before_forward
from lockstep.shard.reads import note_read
from lockstep.shard.root import Root, root_of, units_in
from lockstep.shard.torch_names import State
from lockstep.shard.traced import Paths, traced_call
from lockstep.shard.unit import Unit

torch_private.torch_fully_shard()  # which install() is about to replace


class ShardedModule(FSDPModule):
    """What every module that was given to ``fully_shard`` is."""

    # torch finds the module's own class by its place; there is one class more here.
    _orig_cls_mro_index = 3
    _lockstep_unit: Unit
    _lockstep_paths: Paths

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the module's own class: slicing a sharded ``Sequential`` gives a plain one."""
        own: Any = cls.__mro__[cls._orig_cls_mro_index]
        made = own.__new__(own)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._lockstep_unit
        call = self._lockstep_own_call
        if torch.compiler.is_compiling() and not unit.has_own_gathers:
            return traced_call(self, call, args, kwargs)
        if unit.traced_by is not None:
            return unit.traced_by(unit, call, args, kwargs)
        with _failure_noted(unit):
            args, kwargs = before_forward(unit, self, args, kwargs)  # type: ignore[arg-type]
            output = call(*args, **kwargs)
            return after_forward(unit, self, output)  # type: ignore[arg-type]

    def _lockstep_own_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as its own class does."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What ``.to()``, ``.to_empty()`` and the like come down to: it acts on the shards."""
        units = [unit for _, unit in units_in(self)]  # type: ignore[arg-type]
        for unit in units:
            unit.reshard()
        result = super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        follow(units)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The shards, as DTensors, under the plain model's names."""
        for _, unit in units_in(self):  # type: ignore[arg-type]
            unit.reshard()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: of the shards, whatever is gathered now, and those that wait for a reduction."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        units = [unit for _, unit in units_in(self)]  # type: ignore[arg-type]
        for unit in units:
            for parameter in unit.parameters:
                gradient = parameter.sharded.grad
                if gradient is not None and set_to_none:
                    parameter.sharded.grad = None
                elif gradient is not None:
                    gradient.detach_().zero_()
        if units and units[0].root is not None:
            units[0].root.drop_local_gradients(units)

    # ---------------------------------------------------------------- what it is

    @property
    def _lockstep_root(self) -> Root:
        return root_of(self._lockstep_unit)

    def _get_fsdp_state(self) -> State:  # type: ignore[override]
        """What torch's own code and libraries ask a sharded module for."""
        return State(self._lockstep_unit)

    def _lockstep_units(self, recurse: bool = True) -> list[Unit]:
        return [unit for _, unit in units_in(self)] if recurse else [self._lockstep_unit]  # type: ignore[arg-type]

    # ---------------------------------------------------------------- gather and free

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units inside)."""
        unit = self._lockstep_unit
        unit.refresh()
        unit.start_gather()
        handle = _Handle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own whole parameters (not those of units inside)."""
        self._lockstep_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._lockstep_units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for unit in self._lockstep_units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of whole parameters while they are sharded, so that their addresses do not change."""
        for unit in self._lockstep_units(recurse):
            unit.keeps_storage = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        self._lockstep_unit.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        self._lockstep_unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        self._lockstep_unit.backward_prefetch = _units_of(modules)

    # ---------------------------------------------------------------- when gradients are synchronised

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for unit in self._lockstep_units(recurse):
            unit.syncs = unit.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        for unit in self._lockstep_units(recurse):
            unit.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted; every backward that synchronises ends with its gradients reduced: nothing is left to wait for."""

    def set_manual_backward_finalization(self, enable: bool) -> None:
        """Let a backward that synchronises end with a call of :meth:`finalize_backward`, instead of by itself."""
        for step in self._lockstep_root.steps:
            step.ends_by_hand = enable

    def finalize_backward(self, async_op: bool = False) -> UnshardHandle | None:
        """Wait for the reductions under way and write the gradients of the shards."""
        handle = _Finalization(self._lockstep_root)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget a step that raised, on all ranks; its gradients are lost."""
        Added.reset_sync_window(self)

    # ---------------------------------------------------------------- how gradients travel

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        unit = self._lockstep_unit
        if stream is not None:
            raise NotImplementedError("set_all_reduce_hook(stream=...): the hook runs on the current stream here.")
        unit.all_reduce_hook = hook

    def set_custom_all_gather(self, comm: Any) -> None:
        self._lockstep_unit.gather_comm = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        self._lockstep_unit.scatter_comm = comm

    def set_gradient_divide_factor(self, factor: float) -> None:
        self._lockstep_unit.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        self._lockstep_unit.only_sums = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted; parameters that some ranks use and others do not are always reduced, and those of nobody never."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for unit in self._lockstep_units(recurse):
            unit.max_scatter_inputs = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Scatter on a group of its own, which is the default here, or on the one that gathers."""
        for unit in self._lockstep_units(recurse):
            root_of(unit)
            unit.links.use_own_scatter_group(enable)

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted; gathers are queued behind the current stream, which the optimizer runs on."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        unit = self._lockstep_unit
        for what, comm in (("all gather", unit.gather_comm), ("reduce scatter", unit.scatter_comm)):
            if comm is not None:
                raise AssertionError(
                    f"cannot call set_allocate_memory_from_process_group() when {what} comm is custom: "
                    f"{type(comm).__name__}"
                )
        unit.uses_group_memory = enable

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        raise NotImplementedError("Symmetric memory for gathers is not there yet; leave this call out.")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted; gathers are always asynchronous here."""


@contextmanager
def _failure_noted(unit: Unit) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if unit.parent is None:
            note_read(error, [] if unit.root is None else unit.root.units)
            notice(error)
        if unit.root is not None and unit.root.running is not None and not torch_private.in_backward():
            if unit is unit.root.running:
                unit.root.fail_forward()
            else:
                unit.fail_forward()  # the module around it may go on without it
        raise


class _Handle(UnshardHandle):
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        if self._unit is not None:
            self._unit.wait()
            self._unit = None


class _Finalization(UnshardHandle):
    """What ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root

    def wait(self) -> None:
        if self._root is not None:
            for team in self._root.teams:
                team.finalize()
            self._root = None


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """See ``torch.distributed.fsdp.share_comm_ctx``; sharded models have no streams of their own to share here."""
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


def _units_of(modules: Sequence[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._lockstep_unit for module in modules]


class _CalledAsAnyModule(ShardedModule):
    """One whose own class is called as any module is.

    Whoever has kept that call from before it was sharded (``torch.compile(module)`` does) comes to ``_call_impl``.
    """

    _orig_cls_mro_index = 4

    def _lockstep_own_call(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled_call_impl  # type: ignore[attr-defined]
        if compiled is not None:
            return compiled(*args, **kwargs)
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile its own call, which is given whole parameters."""
        if getattr(super().compile, "__func__", None) is not nn.Module.compile:  # type: ignore[misc]
            return super().compile(*args, **kwargs)  # type: ignore[misc]
        self._compiled_call_impl = torch.compile(super()._call_impl, *args, **kwargs)  # type: ignore[misc]
        return None


_classes: dict[tuple[type, frozenset[str]], type] = {}


def give_face(module: nn.Module, unit: Unit) -> None:
    """Make ``module`` a sharded one, in place."""
    own = type(module)
    added = names_for(module)
    kind = (own, frozenset(added))
    if kind not in _classes:
        face = _CalledAsAnyModule if own.__call__ is nn.Module.__call__ else ShardedModule
        _classes[kind] = type(f"FSDP{own.__name__}", (face, own), added)
    object.__setattr__(module, "_lockstep_unit", unit)
    unit.on_layout = _show_layout
    _show_layout(unit)
    torch_private.mark_as_sharded(module, State(unit))
    take_part_in_loading(module, unit)
    module.__class__ = _classes[kind]


def _show_layout(unit: Unit) -> None:
    """Let compilers see how the unit is laid out now."""
    for module in unit.modules:
        object.__setattr__(module, "_lockstep_paths", _paths(module, unit))
    make_known(unit)


def _paths(module: nn.Module, unit: Unit) -> Paths:
    """For each module inside that has parameters of the unit: the way there, and the name, store and number of each."""
    ways = {id(child): tuple(name.split(".")) if name else () for name, child in module.named_modules()}
    found: dict[tuple[str, ...], list[tuple[str, int, int]]] = {}
    for number, store in enumerate(unit.stores):
        for position, parameter in enumerate(store.parameters):
            for reference, name in parameter.owners:
                way = ways.get(id(reference()))
                if way is not None:
                    found.setdefault(way, []).append((name, number, position))
    return tuple((way, tuple(places)) for way, places in found.items())


def state_of(module: nn.Module) -> State | None:
    """What torch's ``fully_shard.state(module)`` gives: a view of its state; None for a module that is not sharded."""
    return State(module._lockstep_unit) if isinstance(module, ShardedModule) else None


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """See ``torch.distributed.fsdp.register_fsdp_forward_method``; a module that is not sharded is left alone."""
    if not isinstance(module, ShardedModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        unit = module._lockstep_unit
        if torch.compiler.is_compiling() and not unit.has_own_gathers:
            return traced_call(module, method, args, kwargs)
        if unit.traced_by is not None:
            return unit.traced_by(unit, method, args, kwargs)
        with _failure_noted(unit):
            args, kwargs = before_forward(unit, module, args, kwargs)
            return after_forward(unit, module, method(*args, **kwargs))

    object.__setattr__(module, method_name, gathered)
