"""The states of the random number generators that a rank uses: Python's, numpy's if it is loaded, torch's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Collect the states of this process."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        if numpy.get("bit_generator") == "MT19937":
            state["numpy"] = {
                "key": numpy["state"]["key"].tolist(),
                "pos": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the states back; a checkpoint that was made from another format has none."""
    if not state:
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        try:
            import numpy
        except ImportError:
            pass
        else:
            saved = state["numpy"]
            inner = {"key": numpy.array(saved["key"], dtype=numpy.uint32), "pos": saved["pos"]}
            numpy.random.set_state(
                {
                    "bit_generator": "MT19937",
                    "state": inner,
                    "has_gauss": saved["has_gauss"],
                    "gauss": saved["gauss"],
                }
            )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
