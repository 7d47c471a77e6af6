"""A parameter that is read while it is sharded: what to tell the program, in eager mode and where a compiler traces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lockstep import torch_private
from lockstep.shard.unit import Unit

_MIXED = "mixed torch.Tensor and DTensor"  # torch's words: a whole tensor was combined with a shard
_LOCAL_SHAPE = re.compile(r"DTensor\(local_tensor=\w*[Tt]ensor\([^()]*size=\(([\d, ]*)\)")
_MOST_NAMES = 20


def note_read(error: BaseException, units: Iterable[Unit]) -> None:
    """Add to an error which parameters are sharded now, and what to do, if it comes from that."""
    text = str(error)
    if _MIXED not in text or any("lockstep: a parameter was read" in note for note in getattr(error, "__notes__", ())):
        return
    # In any order of dimensions: it may have been transposed.
    shapes = [sorted(int(size) for size in found.split(",") if size.strip()) for found in _LOCAL_SHAPE.findall(text)]
    names: dict[str, tuple[int, ...]] = {}
    for unit in units:
        if not unit.is_full:
            names |= _names_of(unit)
    likely = [name for name, shape in names.items() if sorted(shape) in shapes] or list(names)
    error.add_note(
        "lockstep: a parameter was read while it is sharded, outside of the forward of the module that has it. These "
        f"are sharded now: {', '.join(likely[:_MOST_NAMES])}{', ...' if len(likely) > _MOST_NAMES else ''}. Call the "
        "module that has it, or unshard() it before; or leave it to the module around both, by not sharding it alone."
    )


def _names_of(unit: Unit) -> dict[str, tuple[int, ...]]:
    """Its parameters as the outermost module names them, with the shapes of this rank's parts."""
    names: dict[int, str] = {}
    for module in unit.top().modules:
        names |= {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    return {names.get(id(p.sharded), p.name): tuple(p.local.shape) for p in unit.parameters}


def note_reads_in_trace(units: Any) -> None:
    """While a forward is traced: if the compiler gives up, add the same to its error; ``units`` finds them all then."""
    torch_private.when_compiling_fails(lambda error: note_read(error, units()))
