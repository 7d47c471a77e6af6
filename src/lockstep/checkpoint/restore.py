"""Restoring: first a complete account of what fits and what does not, then the writing into live objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.collect import plain_keys
from lockstep.checkpoint.hook_state import restore_hook, sharded_in, wrapper_of
from lockstep.checkpoint.manifest import STATE, state_of
from lockstep.checkpoint.optimizers import SavedOptimizer, goes_by_name, is_of
from lockstep.checkpoint.pieces import held
from lockstep.checkpoint.reading import Reader, Region
from lockstep.checkpoint.rng import check_rng, restore_rng
from lockstep.checkpoint.snapshot import own_name
from lockstep.checkpoint.tensorfile import DTYPES
from lockstep.checkpoint.tree import decode, tensor_name, tensor_names
from lockstep.checkpoint.undo import Undo
from lockstep.errors import CheckpointDamaged, bullet_list
from lockstep.plan import Plan
from lockstep.state_dict import own_state, unwrap


@dataclass
class Targets:
    """The live objects that are to be restored."""

    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    scaler: Any
    data: Any
    extra: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    strict: bool = True


@dataclass
class Restored:
    """What is handed to the caller: values that have no object to go into, and what to know about them."""

    extra: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Restoration:
    """One checkpoint and the objects it goes into."""

    def __init__(self, reader: Reader, targets: Targets, rank: int, world: int) -> None:
        self.reader = reader
        self._targets = targets
        self._rank = rank
        self.is_same_world = reader.manifest.world == world
        self.shared = reader.shared()
        self._own = reader.own(rank) if rank < reader.manifest.world else None
        self._require_sound(STATE, self.shared, _is_shared_state)
        if self._own is not None:
            self._require_sound(state_of(rank), self._own, _is_own_state)
        self.plan = Plan.from_json(self.shared["plan"]) if self.shared.get("plan") else None

    def _require_sound(self, name: str, tree: dict[str, Any], is_sound: Callable[[dict[str, Any]], bool]) -> None:
        """Raise CheckpointDamaged unless a tree is such as is saved; digests only say that it is as it was written."""
        path = self.reader.directory / name
        try:
            decode(tree, lambda _: None)
            good = is_sound(tree)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(f"{path} cannot be read ({error}).", file=path) from None
        if not good:
            raise CheckpointDamaged(f"{path} is not what a save writes.", file=path)

    # ---------------------------------------------------------------- before anything is written

    def check(self) -> None:
        """Raise ValueError, with everything that does not fit, before anything is changed; read no tensor yet."""
        problems: list[str] = []
        known = self.reader.manifest.tensors.keys()
        named = tensor_names(self.shared) + [own_name(self._rank, name) for name in tensor_names(self._own or {})]
        problems += [f"it has no tensor {name!r}" for name in sorted(set(named) - known)]
        targets = self._targets
        if targets.model is not None:
            problems += self._check_model(targets.model)
        if targets.optimizer is not None and "optimizer" not in self.shared:
            problems.append("it was saved without an optimizer")
        problems += self._strangers()
        for optimizer in self._optimizers():
            problems += optimizer.check()
        for name in ("scheduler", "scaler", "data"):
            if getattr(targets, name) is not None and name not in self.shared:
                problems.append(f"it was saved without {name}=")
        problems += _other_scheduler(targets.scheduler, self.shared.get("scheduler"))
        for name, given in (("extra", targets.extra), ("per_rank", targets.per_rank)):
            saved = self.shared["extra"] if name == "extra" else (self._own or {}).get("per_rank", given)
            problems += [f"it was saved without {name}[{key!r}]" for key in given if key not in saved]
        if problems:
            raise ValueError(
                f"The checkpoint {self.reader.directory} does not fit; nothing was changed:\n{bullet_list(problems)}"
            )

    def _check_model(self, model: nn.Module) -> list[str]:
        saved, problems = self.shared["model"], []
        state = plain_keys(model)
        if self._targets.strict:
            problems += [f"the model has {key}, and the checkpoint does not" for key in state if key not in saved]
            problems += [f"the checkpoint has {key}, and the model does not" for key in saved if key not in state]
        for key, value in state.items():
            name = tensor_name(saved.get(key))
            is_extra = key.rpartition(".")[2] == "_extra_state"  # whatever it was, the module takes it back itself
            if name is None and key in saved and isinstance(value, torch.Tensor) and not is_extra:
                problems.append(f"{key} is a tensor in the model, and none in the checkpoint")
            if name is None or not isinstance(value, torch.Tensor) or name not in self.reader.manifest.tensors:
                continue
            entry = self.reader.manifest.tensors[name]
            cannot = _why_not_filled(key, value)
            if cannot:
                problems.append(cannot)
            elif entry.shape != tuple(value.shape):
                problems.append(f"{key} has the shape {list(entry.shape)} there, and {list(value.shape)} in the model")
            elif DTYPES[entry.dtype] is not value.dtype and self._targets.strict:
                problems.append(f"{key} is {entry.dtype} there, and {value.dtype} in the model; strict=False converts")
        for key, (buffer, tree) in self._own_buffers(model).items():
            name = tensor_name(tree)
            own = None if name is None else self.reader.manifest.tensors.get(own_name(self._rank, name))
            if own is None or own.shape != tuple(buffer.shape):
                problems.append(f"this rank's own {key} is not of the shape {list(buffer.shape)} there")
        return problems

    def _strangers(self) -> list[str]:
        """Say which optimizers of extra= cannot be restored, since they go by names of the model's parameters."""
        model = self._targets.model
        return [
            f"extra[{key!r}] goes by the names of the model's parameters, and " + why
            for key, target in self._targets.extra.items()
            if isinstance(target, torch.optim.Optimizer) and goes_by_name(self.shared["extra"].get(key))
            for why in (["the model was not given"] if model is None else ["this optimizer has others"])
            if not is_of(model, target)
        ]

    def _optimizers(self) -> list[SavedOptimizer]:
        """Pair the optimizers of the model with the saved state that goes into them."""
        targets, found = self._targets, []
        model = targets.model
        if model is None:
            return []
        if targets.optimizer is not None and "optimizer" in self.shared:
            saved = self.shared["optimizer"]
            found.append(SavedOptimizer("the optimizer", saved, targets.optimizer, model, self.reader))
        for key, target in targets.extra.items():
            saved = self.shared["extra"].get(key)
            if goes_by_name(saved) and is_of(model, target):
                found.append(SavedOptimizer(f"extra[{key!r}]", saved, target, model, self.reader))
        return found

    def files(self) -> set[str]:
        """Name the files with the tensors that this rank will read."""
        needed: list[tuple[str, Region | None]] = []
        local = self._local_regions()
        for section, tree in self.shared.items():
            wanted = section in ("extra", "plan") or getattr(self._targets, section, None) is not None
            for name in tensor_names(tree) if wanted else []:
                needed.append((name, local.get(name)))
        needed += [(own_name(self._rank, name), None) for name in tensor_names(self._own or {})]
        return self.reader.files_for(needed)

    def _local_regions(self) -> dict[str, Region]:
        """Find the part that this rank needs of each tensor that goes into a sharded one."""
        regions: dict[str, Region] = {}
        if self._targets.model is None:
            return regions
        for key, value in plain_keys(self._targets.model).items():
            name = tensor_name(self.shared["model"].get(key))
            if name is not None and isinstance(value, torch.Tensor):
                part = held(value, key)
                regions[name] = Region(part.offsets, tuple(part.local.shape))
        for optimizer in self._optimizers():
            regions |= optimizer.regions()
        return regions

    def try_out(self) -> None:
        """Decode what goes into objects that nothing else checks, after it was verified; still nothing is changed."""
        if self._own is None:
            return
        path = self.reader.directory / state_of(self._rank)
        try:
            check_rng(self._decoded_own(self._own["rng"]))
        except Exception as error:
            raise CheckpointDamaged(
                f"{path} has random numbers that cannot be put back ({type(error).__name__}: {error}).", file=path
            ) from None

    # ---------------------------------------------------------------- write into live objects

    def apply_to_objects(self, undo: Undo) -> Restored:
        """Put in its place what another one's code takes, and may refuse; ``undo`` knows what was there."""
        targets, result = self._targets, Restored()
        if targets.model is not None:
            self._try_extra_states(targets.model, undo)
        for optimizer in self._optimizers():
            optimizer.restore(undo)
        for name in ("scheduler", "scaler", "data"):
            target = getattr(targets, name)
            if target is not None:
                state = self._decoded(self.shared[name])
                if state:  # that of a scaler that is switched off is empty
                    undo.keep(name, target)
                    target.load_state_dict(state)
        result.extra = self._restore_objects("extra", self.shared["extra"], undo)
        if self._own is None:
            result.notes.append("this rank did not exist when it was saved, and keeps its random numbers")
        else:
            self._restore_own(self._own, result, undo)
        return result

    def apply_to_model(self) -> None:
        """Write the tensors of the model, which were compared and verified; nothing but the disk can refuse now."""
        model = self._targets.model
        if model is None:
            return
        plain = unwrap(model)
        kept = self._state_for(plain)
        for key, value in kept.items():
            name = tensor_name(self.shared["model"].get(key.replace("_orig_mod.", "")))
            if name is not None and isinstance(value, torch.Tensor):
                part = held(value, key)
                self.reader.fill(part.local, name, part.offsets)
        # Copies every tensor onto itself, which changes nothing, and lets modules see that they were loaded; a class
        # whose state dict holds copies takes them.
        plain.load_state_dict(kept, strict=self._targets.strict)
        for buffer, tree in self._own_buffers(model).values():
            buffer.copy_(self._decoded_own(tree))

    def _decoded(self, tree: Any) -> Any:
        return decode(tree, self.reader.tensor)

    def _decoded_own(self, tree: Any) -> Any:
        return decode(tree, lambda name: self.reader.tensor(own_name(self._rank, name)))

    def _state_for(self, plain: nn.Module) -> dict[str, Any]:
        """The state to give to the plain model: its own tensors, and what is saved of everything else."""
        saved, kept = self.shared["model"], {}
        for key, value in own_state(plain).items():
            there = saved.get(key.replace("_orig_mod.", ""))
            if there is not None and tensor_name(there) is None:
                kept[key] = self._decoded(there)
            elif there is not None and isinstance(value, torch.Tensor):
                kept[key] = value
        return kept

    def _try_extra_states(self, model: nn.Module, undo: Undo) -> None:
        """Let modules take what they keep beside tensors, or refuse it, before a tensor is written."""
        plain = unwrap(model)
        kept = self._state_for(plain)
        before = {key: value for key, value in own_state(plain).items() if key in kept}
        if any(not isinstance(value, torch.Tensor) for value in (*kept.values(), *before.values())):
            own = {key: v if isinstance(v, torch.Tensor) else copy.deepcopy(v) for key, v in before.items()}
            undo.add("the model", lambda: plain.load_state_dict(own, strict=False))
            plain.load_state_dict(kept, strict=self._targets.strict)

    def _own_buffers(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, Any]]:
        """The buffers that each rank has for itself, with what is saved of them."""
        saved = (self._own or {}).get("buffers", {})
        if wrapper_of(model) is None and not sharded_in(model):
            return {}
        buffers = {key.replace("_orig_mod.", ""): buffer for key, buffer in unwrap(model).named_buffers()}
        return {key: (buffers[key], tree) for key, tree in saved.items() if key in buffers}

    def _restore_own(self, own: dict[str, Any], result: Restored, undo: Undo) -> None:
        undo.keep_rng()
        restore_rng(self._decoded_own(own["rng"]))
        if not own["rng"]:
            result.notes.append("it was made from another format and holds no random numbers")
        model = self._targets.model
        if model is not None and "hook" in own:
            if self.is_same_world:
                note = restore_hook(model, self._decoded_own(own["hook"]), undo)
            else:
                note = "what the communication hook left out is dropped, since it belongs to another world size"
            result.notes += [note] if note else []
        result.per_rank = self._restore_objects("per_rank", own["per_rank"], undo)

    def _restore_objects(self, section: str, saved: Mapping[str, Any], undo: Undo) -> dict[str, Any]:
        """Restore a user's objects, and return the values for all names but those of optimizers that go by name."""
        given = self._targets.extra if section == "extra" else self._targets.per_rank
        decoded = self._decoded if section == "extra" else self._decoded_own
        # An optimizer of the model has its state by now, of which this rank may have read its part only.
        model = self._targets.model
        has_state = {
            key for key in given if section == "extra" and goes_by_name(saved.get(key)) and is_of(model, given[key])
        }
        values = {key: decoded(tree) for key, tree in saved.items() if key not in has_state}
        for key, target in given.items():
            if key not in values:
                continue
            is_generator = isinstance(target, torch.Generator)
            if is_generator or callable(getattr(target, "load_state_dict", None)):
                undo.keep(f"{section}[{key!r}]", target)
                (target.set_state if is_generator else target.load_state_dict)(values[key])
        return values


def _other_scheduler(scheduler: Any, saved: Any) -> list[str]:
    """Say so if a scheduler of torch's has the state of another kind, which it would take without a word.

    One side alone may have more: a newer torch adds settings.
    """
    if not isinstance(scheduler, LRScheduler) or not isinstance(saved, dict):
        return []
    known = {name for name in scheduler.state_dict() if not name.startswith("_")}
    gone, new = sorted(name for name in saved if not name.startswith("_") and name not in known), known - saved.keys()
    new -= {"verbose"}
    if not gone or gone == ["verbose"] or not new:
        return []
    return [
        f"scheduler was saved by one of another kind: it has {', '.join(gone)}, and this one, a "
        f"{type(scheduler).__name__}, has {', '.join(sorted(new))}"
    ]


def _why_not_filled(key: str, target: torch.Tensor) -> str:
    """Say why a tensor of the model cannot be written into; empty where it can."""
    try:
        local = held(target, key).local
    except TypeError as error:
        return str(error)
    if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
        return f"{key} is expanded in the model: several of its elements are the same memory; give it its own"
    return ""


def _is_shared_state(tree: dict[str, Any]) -> bool:
    """Tell whether a tree has what all ranks share."""
    if not isinstance(tree.get("model"), dict) or not isinstance(tree.get("extra"), dict):
        return False
    if tree.get("plan") is not None:
        Plan.from_json(tree["plan"])
    if "optimizer" not in tree:
        return True
    saved = tree["optimizer"]
    names = [name for group in saved["param_groups"] for name in group["params"]]
    return isinstance(saved["state"], dict) and all(isinstance(name, str) for name in names)


def _is_own_state(tree: dict[str, Any]) -> bool:
    """Tell whether a tree has what a rank saves for itself."""
    return isinstance(tree.get("rng"), dict) and isinstance(tree.get("per_rank"), dict)
