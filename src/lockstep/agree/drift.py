"""What makes ranks drift apart between two windows, told in one error on all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from lockstep.agree.board import Board
from lockstep.errors import Disagreement, rank_table

# Settings of optimizers that decide by how much a weight changes. Others may be a rank's own matter (foreach, fused).
SETTINGS = (
    "lr",
    "betas",
    "momentum",
    "dampening",
    "nesterov",
    "weight_decay",
    "decoupled_weight_decay",
    "eps",
    "alpha",
    "rho",
    "lr_decay",
    "amsgrad",
    "centered",
    "maximize",
)

# The settings of a group of an optimizer; and by which settings which parameters were updated, those as a number with a
# byte for each, 1 where it is one of them: as cheap to make of flags as to unite.  Of shards, how often it was.
Settings = tuple[tuple[str, Any], ...]
Updates = Mapping[Settings, int]
_HALF_BITS = 31


def _going_on(how: str) -> str:
    """What can be done about it; ``how`` weights are made equal, empty where they are equal still."""
    found = "No rank has updated its weights by that yet: give all ranks the same."
    if how:
        found = (
            "Ranks have updated their weights differently by now; nothing was updated in this step. To go on in this "
            f"process, {how}."
        )
    return f"{found} check='off' turns this comparison off, of a lockstep.DDP."


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The settings by which an optimizer updates one of its groups."""
    return tuple([(name, _plain(group[name])) for name in SETTINGS if name in group])


def can_change(value: Any) -> bool:
    """Whether a value may become another without being replaced."""
    if isinstance(value, tuple):
        return any(map(can_change, value))
    return not isinstance(value, (float, int, str, type(None)))


def _plain(value: Any) -> Any:
    """A setting as a value that can be compared between processes."""
    kind = type(value)
    if kind is float or kind is bool or value is None:
        return value  # nearly always, and looked at before each update
    if isinstance(value, torch.Tensor):
        # To read it from a GPU would stop its queue.
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        return tuple([_plain(one) for one in value])
    return type(value).__name__  # what it prints may be of this process alone


def word_of(updates: Updates) -> int:
    """A positive number that stands for what was updated (the upper half) and how (the lower); 0 for nothing."""
    updated = 0
    for places in updates.values():
        updated |= places
    if not updated:
        return 0
    how = sorted((repr(settings), places) for settings, places in updates.items() if places)
    return (1 + _half_word(hex(updated))) << _HALF_BITS | _half_word(repr([(one, hex(places)) for one, places in how]))


def _half_word(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (1 << _HALF_BITS)


def words_differ(words: Iterable[int], *, of_shards: bool = False) -> bool:
    """Whether any ranks have updated the same by other settings.

    A rank may update only its share of a replicated model, or nothing yet.  But each updates its shard of every
    parameter, so of shards ranks that have updated anything have updated the same, as often.
    """
    how: dict[int, set[int]] = {}
    if of_shards:
        return len({word for word in words if word}) > 1
    for word in words:
        how.setdefault(word >> _HALF_BITS, set()).add(word)
    return any(len(found) > 1 for found in how.values())


def settings_shown(updates: Updates, names: Sequence[str]) -> list[str]:
    """A line for each kind of update: by which settings, how often, and of which parameters where not of all."""
    shown = []
    for settings, places in updates.items():
        text = ", ".join(f"{name}={value}" for name, value in settings)
        by_times: dict[int, list[str]] = {}
        for place, name in enumerate(names):
            if times := places >> 8 * place & 0xFF:
                by_times.setdefault(times, []).append(name)
        for times, updated in by_times.items():
            line = text if times == 1 else f"{text}, {times} times"
            if len(updated) < len(names):
                more = f" and {len(updated) - 3} more" if len(updated) > 3 else ""
                line += f" (of {', '.join(updated[:3])}{more})"
            shown.append(line)
    return sorted(shown)


def settings_differ(
    board: Board, key: str, mine: Sequence[str], ranks: Collection[int], how: str, seconds: float, *, of_shards: bool
) -> Disagreement:
    """Once words differ, on all ranks: post the settings, and make the error that shows those of ``ranks``."""
    told = board.gather(f"{key} settings", json.dumps(mine), seconds)
    shown = {rank: _read(text) for rank, text in told.items() if rank in ranks}
    values = _differing(board.by_global(shown))
    title = "have updated the shards differently" if of_shards else "update the model with other settings"
    more = ", or an optimizer that stepped more often, or on gradients that were cleared or changed" * of_shards
    return Disagreement(
        f"Optimizers {title} on some ranks:\n{rank_table(values)}\n"
        "  likely cause: a scheduler that is stepped on some ranks only, or with a number of each rank's own (a loss "
        f"that was not averaged), or a setting restored on some ranks only{more}\n" + _going_on(how),
        values,
    )


def _read(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return [str(one)[:500] for one in value] if isinstance(value, list) else [str(value)[:500]]


def _differing(values: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Without the groups that all ranks have alike."""
    common = set.intersection(*map(set, values.values()))
    left = {rank: "; ".join([one for one in own if one not in common][:4]) for rank, own in values.items()}
    return {rank: text or "none" for rank, text in left.items()}


def weights_differ(name: str, norms: Mapping[int, float], how: str) -> Disagreement:
    """The error for a parameter that has come to be another one on some ranks."""
    values = {rank: f"weighted norm {norm:.8g}" for rank, norm in norms.items()}
    return Disagreement(
        f"The weights of ranks differ, in (a part of) {name} at least:\n{rank_table(values)}\n"
        "  likely cause: weights or optimizer state that were loaded or changed on some ranks only; init_sync=False "
        "with weights that were not equal; an optimizer with state (momentum) after join(), where ranks that ran out "
        "of data made fewer updates; a module that changes its own weights in the forward\n" + _going_on(how),
        values,
    )
