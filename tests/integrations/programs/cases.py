"""Run the cases of a program one after the other and write down what each ended with."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

OUT = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def wrapper_of(module: nn.Module) -> str:
    """Where the DDP class comes from that this model is wrapped in, below torch.compile if need be."""
    module = getattr(module, "_orig_mod", module)
    return type(module).__module__


class Record:
    """What a case leaves behind: the class that wrapped the model, its parameters before and after."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.start = parameters_of(module)

    def end(self, wrapped: nn.Module) -> dict[str, Any]:
        return {"wrapper": wrapper_of(wrapped), "start": self.start, "parameters": parameters_of(self.module)}


def run_cases(*cases: Callable[[], dict[str, Any]]) -> None:
    """An error is the outcome of its case; the next ones still run, unless the ranks are apart by then."""
    recorded: dict[str, Any] = {}
    for case in cases:
        torch.manual_seed(RANK)  # ranks start apart, so that equal weights come from the wrapper
        began = time.monotonic()
        try:
            recorded[case.__name__] = case()
        except Exception:
            recorded[case.__name__] = {"error": traceback.format_exc()}
        recorded[case.__name__]["seconds"] = time.monotonic() - began
        torch.save(recorded, OUT / f"rank{RANK}.pt")
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads still let go of Python objects; a regular exit right now may abort
