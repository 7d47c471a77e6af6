"""How gradients and states are compared, with the tolerance stated once.

Two sums of the same numbers in another order differ by rounding. For a gradient of a tiny model that is a few
units in the last place of its largest element, so the tolerance is relative to the largest element of the
tensor: 1e-9 in float64 (a wrong factor, a missed or a doubled contribution is many orders above it), 2e-4 in
float32 after several optimizer steps. To that comes a small share of the largest element of the whole model,
because some gradients are zero in exact arithmetic (the bias of an attention key, a bias before batch norm)
and pure rounding noise in practice. Ranks against each other, and a run against its repetition, are compared
bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4}
NOISE_SHARE = 0.05  # of the tolerance, relative to the model's largest element

Tensors = Mapping[str, torch.Tensor | None]


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies, named as in the plain module, whether or not the module is wrapped."""
    plain = module.module if hasattr(module, "no_sync") else module
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in plain.named_parameters()}


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    plain = module.module if hasattr(module, "no_sync") else module
    return {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}


def assert_close(actual: Tensors, expected: Tensors, what: str, tolerance: float | None = None) -> None:
    """Every tensor within the tolerance of its dtype, all differing names reported at once."""
    assert actual.keys() == expected.keys(), f"{what}: names differ: {actual.keys() ^ expected.keys()}"
    model_scale = max((largest(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
    wrong = [
        f"{name}: {problem}"
        for name in expected
        if (problem := difference(actual[name], expected[name], tolerance, model_scale)) is not None
    ]
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} tensors are wrong\n  " + "\n  ".join(wrong)


def difference(
    actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float | None, model_scale: float
) -> str | None:
    if actual is None or expected is None:
        if actual is None and expected is None:
            return None
        return f"is {'None' if actual is None else 'a tensor'}, expected the opposite"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if actual.is_sparse != expected.is_sparse:
        return f"is {'sparse' if actual.is_sparse else 'dense'}, expected the opposite"
    if not (actual.is_floating_point() or actual.is_complex()):
        return None if torch.equal(actual, expected) else "integers differ"
    if tolerance is None:
        tolerance = TOLERANCE[actual.dtype]
    scale, error = largest(expected), largest(actual.to_dense() - expected.to_dense())
    if error <= tolerance * (scale + NOISE_SHARE * model_scale):  # a NaN is not
        return None
    return f"largest error {error:.3e}, largest expected element {scale:.3e}"


def largest(tensor: torch.Tensor) -> float:
    return tensor.to_dense().abs().max().item() if tensor.numel() else 0.0


def assert_identical(first: Any, second: Any, what: str) -> None:
    """Bit by bit, through any nesting of dicts, lists and tuples."""
    problem = first_difference(first, second, "")
    assert problem is None, f"{what}: {problem}"


def first_difference(first: Any, second: Any, path: str) -> str | None:
    if type(first) is not type(second):
        return f"{path or 'value'} is {type(first).__name__} and {type(second).__name__}"
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        if same and torch.equal(bits(first), bits(second)):
            return None
        return f"{path or 'tensor'} differs"
    if isinstance(first, Mapping):
        if first.keys() != second.keys():
            return f"{path or 'mapping'} has other keys: {sorted(map(str, first.keys() ^ second.keys()))}"
        pairs = [(f"{path}[{key!r}]", first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple):
        if len(first) != len(second):
            return f"{path or 'sequence'} has length {len(first)} and {len(second)}"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(first, second, strict=True))]
    else:
        return None if first == second else f"{path or 'value'}: {first!r} and {second!r}"
    return next((p for name, a, b in pairs if (p := first_difference(a, b, name)) is not None), None)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
