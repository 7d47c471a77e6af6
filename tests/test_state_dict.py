"""Keys with and without wrapper prefixes; a name that could mean two tensors is never guessed."""

from __future__ import annotations

import pytest
from torch import nn

from lockstep.state_dict import plain_key, rename_keys, unwrap


@pytest.mark.parametrize(
    "key",
    [
        "fc.weight",
        "module.fc.weight",
        "_orig_mod.fc.weight",
        "_orig_mod.module.fc.weight",
        "module._orig_mod.fc.weight",
    ],
)
def test_any_order_of_wrappers_means_the_same_tensor(key: str) -> None:
    assert plain_key(key) == "fc.weight"
    state = {key: 1}
    rename_keys(state, "", {"module.fc.weight"})
    assert state == {"module.fc.weight": 1}


def test_keys_that_fit_or_mean_nothing_here_stay() -> None:
    state = {"module.fc.weight": 1, "other": 2, "deeper.module.fc.weight": 3}
    rename_keys(state, "", {"module.fc.weight"})
    assert state == {"module.fc.weight": 1, "other": 2, "deeper.module.fc.weight": 3}


def test_a_prefix_is_kept() -> None:
    state = {"net.fc.weight": 1, "fc.weight": 2}
    rename_keys(state, "net.", {"net.module.fc.weight"})
    assert state == {"net.module.fc.weight": 1, "fc.weight": 2}


def test_a_module_that_is_itself_called_module() -> None:
    expected = {"module.module.weight", "module.head.weight"}
    state = {"module.weight": 1, "head.weight": 2}
    rename_keys(state, "", expected)
    assert state == {"module.module.weight": 1, "module.head.weight": 2}


def test_ambiguous_keys_are_refused() -> None:
    with pytest.raises(KeyError, match="could mean any of"):
        rename_keys({"weight": 1}, "", {"module.weight", "module.module.weight"})
    with pytest.raises(KeyError, match="both name the same tensor"):
        rename_keys({"fc.weight": 1, "module.fc.weight": 2}, "", {"module.fc.weight"})


def test_unwrap_leaves_a_plain_module_alone() -> None:
    plain = nn.Linear(2, 2)
    assert unwrap(plain) is plain
