"""What the code of a function reads by name: globals, attributes, modules that it imports."""

from __future__ import annotations

import dis
import sys
import types
from functools import lru_cache
from typing import NamedTuple


class Reads(NamedTuple):
    """The names in the code of a function, with those of functions and comprehensions inside of it."""

    globals: tuple[str, ...]
    names: tuple[str, ...]  # all of them, of attributes too
    imports: tuple[str, ...]  # modules that are imported inside of it


@lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """Go through the instructions once; a name may be a global, or an attribute of something, or both."""
    known: dict[str, None] = {}
    imported: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            known[str(instruction.argval)] = None
        elif instruction.opname == "IMPORT_NAME":
            imported[str(instruction.argval)] = None
    if "globals" in known:  # a word in such a function may be a name
        known |= dict.fromkeys(word for word in code.co_consts if isinstance(word, str))
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            theirs = reads_of(inner)
            known |= dict.fromkeys(theirs.globals)
            names |= dict.fromkeys(theirs.names)
            imported |= dict.fromkeys(theirs.imports)
    return Reads(tuple(known), tuple(names), tuple(imported))


def modules_of(function: types.FunctionType) -> list[types.ModuleType]:
    """The modules that a function can name: among its globals, closed over, imported in it."""
    reads = reads_of(function.__code__)
    seen = [function.__globals__.get(name) for name in reads.globals]
    for name in reads.imports:
        seen += [sys.modules.get(name), sys.modules.get(name.partition(".")[0])]
    for cell in function.__closure__ or ():
        try:
            seen.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return [module for module in seen if isinstance(module, types.ModuleType)]
