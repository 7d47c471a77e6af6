"""Which modules are blocks."""

from __future__ import annotations

from torch import nn

from lockstep.shard.auto import repeated_blocks
from multirank.models import GPT, MLP, ConvNet


def test_the_blocks_of_a_transformer() -> None:
    model = GPT(num_blocks=3)
    assert repeated_blocks(model) == list(model.blocks)


def test_layers_are_no_blocks() -> None:
    assert repeated_blocks(MLP()) == []
    assert repeated_blocks(ConvNet()) == []


def test_a_row_of_different_modules_is_no_stack() -> None:
    first = nn.Sequential(nn.Linear(2, 2))
    assert repeated_blocks(nn.ModuleList([first, nn.Linear(2, 2)])) == []


def test_the_outer_blocks_are_taken() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))

    model = nn.Sequential(stage(), stage())
    assert repeated_blocks(model) == list(model)


def test_a_block_that_stands_twice_is_one() -> None:
    block = nn.Sequential(nn.Linear(2, 2))
    assert repeated_blocks(nn.ModuleList([block, block, nn.Sequential(nn.Linear(2, 2))]))[0] is block
