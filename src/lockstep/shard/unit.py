"""A unit: parameters that are gathered, freed and reduced together; what one call of ``fully_shard`` makes.

    SHARDED    this rank has its shard only, and the modules have it registered
    GATHERING  the whole is on its way
    FULL       the modules have the whole parameters registered

When it is gathered and when it is freed is decided in ``moments.py``, when its gradients leave in the engine's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep import torch_private
from lockstep.observe.timeline import now
from lockstep.shard.calls import Calls
from lockstep.shard.mesh import Links, ShardMesh
from lockstep.shard.own_gather import OwnStore
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.store import FlatStore, GroupMemory

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep
    from lockstep.shard.level import GatherLog
    from lockstep.shard.root import Root


class Residence(Enum):
    """What this rank has of the parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class Phase(Enum):
    """Where the unit is in a step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"  # between the first gradient of its outputs and the last of its inputs


class Gathers:
    """How often a unit was gathered in a step, and how often by compiled graphs."""

    def __init__(self) -> None:
        self.total = self.in_graph = self.in_graph_backward = 0

    def note_in_graph(self) -> None:
        self.note_in_program(again=torch_private.in_backward())

    def note_in_program(self, *, again: bool) -> None:
        self.total += 1
        self.in_graph += 1
        self.in_graph_backward += again


class Unit:
    """Some modules' parameters, sharded over a mesh."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[ShardedParameter],
        mesh: ShardMesh,
        *,
        policy: Any,
        offload: Any,
        reshard_after_forward: bool | None,
        num_keepers: int = 0,
    ) -> None:
        self.modules = weakref.WeakSet(modules)
        self.module_references = tuple(weakref.ref(module) for module in modules)
        self.num_modules = len(modules)
        self.parameters = list(parameters)
        self.mesh = mesh
        self.device = mesh.device
        self.policy = policy
        self.name = type(modules[0]).__name__
        self.index = -1
        self.offloads = hasattr(offload, "pin_memory")
        self._pins = self.offloads and bool(offload.pin_memory) and torch.accelerator.is_available()
        if self.offloads:
            self._move_shards_to_host()
        self.parent: weakref.ref[Unit] | None = None
        self.root: Root | None = None
        self.step: weakref.ref[SyncStep] | None = None  # that reduces its gradients
        self.gather_log: GatherLog | None = None  # of its team
        self.links = Links(mesh, own_scatter_group=False)  # until there is a root, with its own way to watch
        self.residence = Residence.SHARDED
        self.is_ahead = False  # on its way, or there, for a forward that has not come yet
        self.phase = Phase.IDLE
        # What the program chose; a reshard_after_forward that it left open is True, except for the root.
        self.reshard_after_forward = reshard_after_forward
        self.num_keepers = (
            num_keepers  # ranks that keep the whole between them after a forward; 0: all, by their shards
        )
        self.reshard_after_backward = True
        self.gathers_in_backward = True
        self.syncs = True
        self.all_reduces = True
        self.divisor: float | None = None
        self.only_sums = False
        self.gather_comm: Any = None
        self.scatter_comm: Any = None
        self.all_reduce_hook: Any = None
        self.all_reduce_hook_stream: Any = None
        self.max_scatter_inputs = 1
        self.uses_group_memory = False
        self.keeps_storage = False
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.order_positions: list[int] = []  # in the order of this step's forwards
        self.modules_to_run: set[nn.Module] = set()  # of a unit of several, in this forward
        self.calls = Calls()  # whose backward is still to come
        self._versions: list[list[int]] = []  # of the shards that were gathered
        self.gathers = Gathers()
        self.last_gathers = Gathers()  # of the last step, for explain.py
        # Who runs the forwards of its modules, while a program of the whole step is traced (program/shard_trace.py).
        self.traced_by: Callable[[Unit, Callable[..., Any], Any, Any], Any] | None = None
        # Told whenever it was laid out anew.
        self.on_layout: Callable[[Unit], None] | None = None
        self.stores: list[FlatStore | OwnStore] = []
        self._lay_out()

    def _move_shards_to_host(self) -> None:
        for parameter in self.parameters:
            if not parameter.local.is_meta:
                torch_private.set_local(parameter.sharded, parameter.local.cpu())

    def _lay_out(self) -> None:
        """One store for each dtype; those that gather themselves have their own."""
        by_kind: dict[tuple[torch.dtype, bool], list[ShardedParameter]] = {}
        for parameter in self.parameters:
            by_kind.setdefault((parameter.sharded.dtype, parameter.gathers_itself), []).append(parameter)
        self.stores = [
            OwnStore(group, self.device, self.policy)
            if gathers_themselves
            else FlatStore(group, self.device, self.policy.param_dtype, pins=self._pins)
            for (_, gathers_themselves), group in by_kind.items()
        ]
        # Some parameters bring their own all-gather, which no graph can hold.
        self.has_own_gathers = any(isinstance(store, OwnStore) for store in self.stores)
        for store in self.stores:
            store.share_among(max(1, self.num_keepers))
        for parameter in self.parameters:
            parameter.full = None
        if self.on_layout is not None:
            self.on_layout(self)

    def make_whole(self) -> None:
        """Make the whole parameters, as objects: their memory comes and goes."""
        for store in self.stores:
            if isinstance(store, OwnStore):
                store.make_whole(self.links.gather, self.moment)
            else:
                store.make_whole()

    def name_anew(self) -> None:
        """Take up the names that parameters have from the root."""
        for store in self.stores:
            store.name_anew()

    # ---------------------------------------------------------------- facts

    @property
    def is_full(self) -> bool:
        return self.residence is Residence.FULL

    @property
    def frees_after_forward(self) -> bool:
        if self.reshard_after_forward is None:
            return self.parent is not None
        return self.reshard_after_forward

    @property
    def gathers_again(self) -> bool:
        """Whether a compiled graph gathers in the backward what it gathered in the forward."""
        return self.frees_after_forward and self.gathers_in_backward

    @property
    def wants_reduce_dtype(self) -> torch.dtype | None:
        return self.policy.reduce_dtype  # type: ignore[no-any-return]

    @property
    def settings(self) -> tuple[Any, ...]:
        """What the program chose for it, by which a captured step was made."""
        ahead = [None if units is None else tuple(unit.index for unit in units) for units in self._prefetches]
        when = (self.frees_after_forward, self.gathers_in_backward, self.max_scatter_inputs, *ahead)
        return *when, self.divisor, self.only_sums, id(self.gather_comm), id(self.scatter_comm)

    @property
    def _prefetches(self) -> tuple[list[Unit] | None, list[Unit] | None]:
        return self.forward_prefetch, self.backward_prefetch

    def top(self) -> Unit:
        """The unit around all others that this one is in."""
        unit = self
        while unit.parent is not None and (parent := unit.parent()) is not None:
            unit = parent
        return unit

    # ---------------------------------------------------------------- follow the program

    def follow_modules(self) -> bool:
        """Take up what the program did to the shards: replaced, cast or moved them; returns whether it is laid out
        anew."""
        self.reshard()
        replaced = [parameter.follow_module() for parameter in self.parameters]
        if not all(store.is_laid_out_for_them for store in self.stores):
            self._lay_out()
            return True
        for store in self.stores:
            moved = store.home is None or store.home.device != store.parameters[0].local.device
            if (any(replaced) or moved) and not any(p.local.is_meta for p in store.parameters):
                store.settle()
        return False

    def require_real(self) -> None:
        """Raise if shards are still on the meta device."""
        names = [parameter.name for parameter in self.parameters if parameter.sharded.device.type == "meta"]
        if names:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training, but the following were "
                f"still on meta device: {names}\nFor example, call module.to_empty(device) to materialize to device "
                "and call module.reset_parameters() on each module to initialize values."
            )
        if self.offloads:
            wrong = [(p.name, p.local.device) for p in self.parameters if p.local.device.type != "cpu"]
            if wrong:
                raise RuntimeError(
                    "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a "
                    "CPU state dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU "
                    f"device: {wrong}"
                )

    # ---------------------------------------------------------------- gather and free

    def start_ahead(self) -> None:
        """Start gathering for a forward or backward that will probably come next."""
        if self.residence is Residence.SHARDED:
            self.start_gather()
            self.is_ahead = True

    def start_gather(self) -> None:
        """Start gathering, if it is not there or on its way."""
        if self.residence is not Residence.SHARDED or not self.parameters:
            return
        start = now()
        self.gathers.total += 1
        for store in self.stores:
            store.follow()  # which gives shards other memory, and that is no change of theirs
        self._versions = [self.versions_of(store) for store in self.stores]
        trains = torch.is_grad_enabled() and not torch_private.in_backward()
        with torch_private.RecordFunction(f"lockstep::gather {self.name}"):
            for number, store in enumerate(self.stores):
                if self._start_among_keepers(store, number):
                    continue
                comm = self.gather_comm or (GroupMemory() if self.uses_group_memory else None)
                if self.gather_log is not None:
                    self.gather_log.compare(self, number, trains=trains)
                store.start(self.links.gather, comm, f"gather of {self.name} ({number})")
                if self.gather_log is not None:
                    self.gather_log.note(self, number)
        self.residence = Residence.GATHERING
        self._note("gather", start)

    def _start_among_keepers(self, store: FlatStore | OwnStore, number: int) -> bool:
        if not self.num_keepers:
            return False
        if not torch_private.in_backward():
            store.forget_part()
        if not store.has_part:
            return False
        if self.gather_log is not None:
            self.gather_log.compare(self, number, trains=False, among_keepers=True)  # in a backward
        store.start_among_keepers(self.links.keepers(self.num_keepers), f"gather of {self.name}")
        if self.gather_log is not None:
            self.gather_log.note(self, number, among_keepers=True)
        return True

    def free_after_forward(self) -> None:
        """As ``reshard``; but where fewer ranks are to have the whole between them, this one keeps its part."""
        if self.num_keepers and self.is_full and torch.is_grad_enabled():
            number = self.links.keepers(self.num_keepers).rank
            for store in self.stores:
                store.keep_part(number)
        self.reshard()

    def fail_forward(self) -> None:
        """Its forward has raised, or one around it: whoever goes on finds the shards."""
        self.phase = Phase.IDLE
        self.modules_to_run.clear()
        is_needed = self.root is not None and self.root.is_recorded  # by the backward of a backward
        if self.is_full and self.gathers_in_backward and not is_needed:
            self.reshard()

    def wait(self) -> None:
        """Let the modules have the whole parameters."""
        self.start_gather()
        self.is_ahead = False
        if self.residence is not Residence.GATHERING:
            return
        start = now()
        with torch_private.RecordFunction(f"lockstep::gathered {self.name}"):
            for store in self.stores:
                store.finish(self.links.gather, self.moment)
        for parameter in self.parameters:
            assert parameter.full is not None
            parameter.follow_requires_grad()
            parameter.register(parameter.full)
        self.residence = Residence.FULL
        self._note("gathered", start)

    def reshard(self) -> None:
        """Let the modules have their shards, and free the whole."""
        self.is_ahead = False
        if self.residence is Residence.GATHERING:
            for store in self.stores:
                store.finish(self.links.gather, self.moment)
        if self.residence is Residence.SHARDED:
            return
        self.take_requires_grad()
        for parameter in self.parameters:
            parameter.register(parameter.sharded)
        for store in self.stores if not self.keeps_storage else ():
            store.free()
        self.residence = Residence.SHARDED

    def take_requires_grad(self) -> None:
        """Take up what the program has frozen or unfrozen of whole parameters."""
        if self.residence is Residence.FULL:
            for parameter in self.parameters:
                parameter.take_requires_grad()

    def refresh(self) -> None:
        """Before it is used while it is there, or on its way: the shards may have been updated since."""
        if self.residence is Residence.SHARDED:
            return
        if self._versions != [self.versions_of(store) for store in self.stores]:
            self.reshard()

    def versions_of(self, store: FlatStore | OwnStore) -> list[int]:
        """Changes whenever a shard of the store is written to, also by optimizers whose writes no tensor counts."""
        step = None if self.step is None else self.step()
        return [*store.versions, 0 if step is None else step.num_writes]

    def moment(self) -> str:
        step = "" if self.root is None else f" in step {self.root.timeline.step}"
        return f"the gathering of {self.name}{step}"

    def end_step(self) -> None:
        """Its gradients have been reduced."""
        self.last_gathers, self.gathers = self.gathers, Gathers()

    def _note(self, what: str, start: int) -> None:
        if self.root is not None:
            self.root.timeline.record(what, start, now(), self.index)
