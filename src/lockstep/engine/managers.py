"""Which wrappers manage a parameter: more than one, where a wrapped module sits inside another wrapped module.

Then no wrapper may let ``.grad`` point at memory that is being reduced, since the other one still has to read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep import torch_private
from lockstep.engine.reducer import Reducer


def find_shared(reducer: Reducer, parameters: Sequence[nn.Parameter]) -> None:
    """Tell ``reducer`` and the reducers of other wrappers whose hooks sit on these parameters, if there are any."""
    for parameter in parameters:
        for hook in torch_private.gradient_hooks(parameter):
            caller = getattr(getattr(hook, "func", None), "__self__", None)
            other = getattr(caller, "reducer", None)
            if isinstance(other, Reducer) and other is not reducer:
                other.shares_parameters = reducer.shares_parameters = True
