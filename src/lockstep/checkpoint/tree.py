"""State as JSON: plain values as they are, tensors by name, and the few other types that state is made of.

``{"$": kind, "v": value}`` stands for what JSON has no word for.  What is not in the table is refused when it is saved,
by its place; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Set
from numbers import Integral, Real
from typing import Any

import torch

from lockstep.checkpoint.tensorfile import DTYPES, dtype_name

TAG = "$"
_SEPARATOR = "/"
_MOST_BITS = 10_000  # of a number in digits: Python refuses to read very long ones

TakeTensor = Callable[[str, torch.Tensor], str]
GiveTensor = Callable[[str], Any]


def encode(value: Any, place: str, take: TakeTensor) -> Any:
    """Turn ``value`` into JSON; ``take(place, tensor)`` is given every tensor and returns its name."""
    try:
        return _encode(value, place, take)
    except RecursionError:
        raise TypeError(f"{place} contains itself, or goes too deep to be stored") from None


def _encode(value: Any, place: str, take: TakeTensor) -> Any:
    if value is None or isinstance(value, bool | str):
        return str.__str__(value) if isinstance(value, str) else value  # of an enum, too
    if isinstance(value, torch.Tensor):
        return _tagged("tensor", take(place, value))
    if isinstance(value, Integral):
        number = int(value)
        return number if number.bit_length() <= _MOST_BITS else _tagged("int", hex(number))
    if isinstance(value, Real) and _is_a_float(value):
        real = float(value)
        return real if math.isfinite(real) else _tagged("float", repr(real))
    if isinstance(value, complex):
        return _tagged("complex", [repr(value.real), repr(value.imag)])
    if isinstance(value, bytes):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, torch.dtype):
        return _tagged("dtype", dtype_name(value))
    if isinstance(value, torch.Size):
        return _tagged("size", list(value))
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, take)
    if type(value) in (list, tuple) or isinstance(value, list):
        items = [_encode(item, f"{place}{_SEPARATOR}{number}", take) for number, item in enumerate(value)]
        return _tagged("tuple", items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        kind = "frozenset" if isinstance(value, frozenset) else "set"
        return _tagged(kind, [_encode(item, f"an item of {place}", _no_tensor) for item in _in_order(value)])
    raise TypeError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: a checkpoint holds "
        "tensors, numbers, texts, lists, tuples, sets and dicts, and nothing that would have to be unpickled"
    )


def _is_a_float(value: Any) -> bool:
    """Whether a number is one that a float can hold: a third is not."""
    try:
        return bool(float(value) == value or value != value)
    except OverflowError:
        return False


def _in_order(items: Set[Any]) -> list[Any]:
    """The items of a set in an order that does not depend on the process."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: (type(item).__qualname__, repr(item)))


def _encode_mapping(value: Mapping[Any, Any], place: str, take: TakeTensor) -> Any:
    kind = "counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(type(key) is str for key in value) and TAG not in value:
        return {key: _encode(item, f"{place}{_SEPARATOR}{key}", take) for key, item in value.items()}
    pairs = [
        [_encode(key, f"a key of {place}", _no_tensor), _encode(item, f"{place}{_SEPARATOR}{key}", take)]
        for key, item in value.items()
    ]
    return _tagged(kind, pairs)


def decode(value: Any, give: GiveTensor) -> Any:
    """Turn JSON back into what was encoded; ``give(name)`` finds a tensor.  ValueError for what was never encoded."""
    if isinstance(value, list):
        return [decode(item, give) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, give) for key, item in value.items()}
    if set(value) != {TAG, "v"} or value[TAG] not in _DECODERS:
        raise ValueError(f"unknown entry {str(value)[:200]}")
    return _DECODERS[value[TAG]](value["v"], give)


def tensor_names(value: Any) -> list[str]:
    """List the names of all tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(TAG) == "tensor":
        return [value["v"]] if isinstance(value.get("v"), str) else []
    return [name for item in value.values() for name in tensor_names(item)]


def tensor_name(value: Any) -> str | None:
    """Return the name where an encoded value is a tensor."""
    return value["v"] if isinstance(value, dict) and value.get(TAG) == "tensor" else None


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {TAG: kind, "v": value}


def _no_tensor(place: str, tensor: torch.Tensor) -> str:
    raise TypeError(f"{place} is a tensor")


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:200]} is not the name of a tensor")
    return value


def _float(value: Any, _: GiveTensor) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError(f"unknown number {value!r}")
    return float(value)


def _pairs(value: Any, give: GiveTensor) -> dict[Any, Any]:
    return {decode(key, give): decode(item, give) for key, item in value}


_DECODERS: dict[str, Callable[[Any, GiveTensor], Any]] = {
    "tensor": lambda value, give: give(_name(value)),
    "float": _float,
    "complex": lambda value, _: complex(float(value[0]), float(value[1])),
    "bytes": lambda value, _: base64.b64decode(value, validate=True),
    "dtype": lambda value, _: DTYPES[value],
    "size": lambda value, _: torch.Size(value),
    "tuple": lambda value, give: tuple(decode(item, give) for item in value),
    "int": lambda value, _: int(value, 16),
    "set": lambda value, give: {decode(item, give) for item in value},
    "frozenset": lambda value, give: frozenset(decode(item, give) for item in value),
    "dict": _pairs,
    "counter": lambda value, give: Counter(_pairs(value, give)),
}

__all__ = ["TAG", "decode", "encode", "tensor_name", "tensor_names"]
