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


def check_rng(state: dict[str, Any]) -> None:
    """Raise, whatever it is, where a state cannot be put back; generators of their own are tried."""
    if not state:
        return
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        numpy.random.RandomState().set_state(_numpy_state(numpy, state["numpy"]))
    if "cuda" in state and not (isinstance(state["cuda"], torch.Tensor) and state["cuda"].dtype is torch.uint8):
        raise ValueError("the state of a GPU's random numbers is not made of bytes")


def restore_rng(state: dict[str, Any]) -> None:
    """Put the states back; a checkpoint that was made from another format has none."""
    if not state:
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        numpy.random.set_state(_numpy_state(numpy, state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _numpy() -> Any:
    """Numpy, where there is one."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _numpy_state(numpy: Any, saved: dict[str, Any]) -> dict[str, Any]:
    key = numpy.array(saved["key"], dtype=numpy.uint32)
    if key.shape != (624,) or not 0 <= saved["pos"] <= 624:
        raise ValueError("the state of numpy's random numbers is not one")
    return {
        "bit_generator": "MT19937",
        "state": {"key": key, "pos": saved["pos"]},
        "has_gauss": saved["has_gauss"],
        "gauss": saved["gauss"],
    }
