"""Which wrappers manage a parameter: more than one, where a wrapped module sits inside another wrapped module.

Then no wrapper may let ``.grad`` point at memory that is being reduced, since the other one still has to read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from lockstep.engine.eager import EagerBackward

# Beside the parameters and not on them: attributes of a parameter travel with it into checkpoints.
_managers = WeakTensorKeyDictionary()


def register_manager(manager: EagerBackward, parameters: Sequence[nn.Parameter]) -> bool:
    """Note that ``manager`` reduces these; returns whether another living one reduces any of them too."""
    shares = False
    for parameter in parameters:
        managers = _managers.setdefault(parameter, weakref.WeakSet())
        for other in managers:
            if other is not manager and other.is_attached:
                other.reducer.shares_parameters = shares = True
        managers.add(manager)
    return shares
