"""What makes ranks drift apart between two windows, told in one error on all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
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


def _going_on(how: str) -> str:
    """What can be done about it; ``how`` weights are made equal, empty where they are equal still."""
    found = "No rank has updated its weights by that yet: give all ranks the same."
    if how:
        found = (
            "Ranks have updated their weights differently by now; nothing was updated in this step. To go on in this "
            f"process, {how}."
        )
    return f"{found} check='off' on the wrapper turns this comparison off."


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The settings by which an optimizer updates, of each of its groups."""
    return tuple(
        [tuple([(name, _plain(group[name])) for name in SETTINGS if name in group]) for group in optimizer.param_groups]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # To read it from a GPU would stop its queue.
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
    return value


def word_of(settings: Iterable[Any]) -> int:
    """A positive number that stands for the settings of all updates since the last window; 0 for none."""
    text = repr(sorted(map(repr, settings)))
    return 0 if text == "[]" else 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def settings_differ(board: Board, key: str, mine: Iterable[Any], how: str, seconds: float) -> Disagreement:
    """Once words differ, on all ranks: post the settings, and make the error that shows them."""
    shown = sorted({", ".join(f"{name}={value}" for name, value in group) for one in mine for group in one})
    told = board.gather(f"{key} settings", json.dumps("; ".join(shown)), seconds)
    values = {rank: _read(text) for rank, text in board.by_global(told).items()}
    values = _differing(values)
    return Disagreement(
        f"Optimizers update the model with other settings on some ranks:\n{rank_table(values)}\n"
        "  likely cause: a scheduler that is stepped on some ranks only, or with a number of each rank's own (a loss "
        "that was not averaged), or a setting restored on some ranks only\n" + _going_on(how),
        values,
    )


def _read(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return str(value)[:2000]


def _differing(values: Mapping[int, str]) -> dict[int, str]:
    """Without the groups that all ranks have alike."""
    groups = {rank: value.split("; ") for rank, value in values.items()}
    common = set.intersection(*map(set, groups.values()))
    left = {rank: "; ".join([one for one in own if one not in common][:4]) for rank, own in groups.items()}
    return {rank: text or "none" for rank, text in left.items()}


def weights_differ(name: str, norms: Mapping[int, float], how: str) -> Disagreement:
    """The error for a parameter that has come to be another one on some ranks."""
    values = {rank: f"norm {norm:.8g}" for rank, norm in norms.items()}
    return Disagreement(
        f"The weights of ranks differ, in (a part of) {name} at least:\n{rank_table(values)}\n"
        "  likely cause: weights or optimizer state that were loaded or changed on some ranks only, or "
        "init_sync=False with weights that were not equal\n" + _going_on(how),
        values,
    )
