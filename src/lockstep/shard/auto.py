"""Find the blocks of a model: modules of one kind that stand in a row."""

from __future__ import annotations

from collections import Counter

from torch import nn

# A row shorter than this is no stack of blocks.
_MIN_REPEATS = 2


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks in ``root``, none inside another: of each row of equal modules that hold most of it.

    A row is a ``ModuleList`` or ``Sequential`` with at least two children of one class that hold submodules of their
    own and parameters.
    """
    blocks: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        row: set[type] = set()
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in children if _is_block(child))
            row = {kind for kind, count in kinds.items() if count >= _MIN_REPEATS}
        for child in children:
            if type(child) in row and _is_block(child):
                if child not in blocks:
                    blocks.append(child)
            else:
                walk(child)

    walk(root)
    return blocks


def _is_block(module: nn.Module) -> bool:
    """Whether it is made of parts, and has parameters."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
