"""Whether ranks still have the same weights: in each window a few of them are looked at, and all ranks compare.

Ranks that begin with equal weights and apply equal gradients stay equal, as long as they update alike.  An optimizer
that was restored on some ranks only, a weight that one rank has changed by hand, or weights that were never made equal
would go unseen for good.  So each window takes one number of a part of one parameter, the next one in the next window,
and sends it with the exchange that ends a window anyway.  What differs by no more than rounding is left alone.

[Note: one number]  The norm alone would be the same for weights with other signs, in another order, or of another
orthogonal matrix.  So it is the norm times a factor between 1/2 and 3/2, which the direction decides: a fixed pattern
is added to the part, half as long as the part itself, and the norm of that is taken.

[Note: one at a time]  On a GPU the number is read when it is there, without waiting for it, so a rank may have it later
than another.  It is sent until all ranks have it, and only then another part is looked at: all ranks see in the same
exchange that all have it, and so all look at the same parts.

[Note: how often]  In each of the first windows, when what was loaded or made anew shows, later once in a few: a look
costs as much as all else that ranks compare.  It is the number of the window that decides, which all ranks have alike.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.bucket import Slot, local_tensor

_MOST_ELEMENTS = 16_384
_NUM_FIRST_WINDOWS, _WINDOWS_PER_LOOK = 100, 4
# By how much numbers may differ, relative to the larger one; coarse types round more.
_TOLERANCE, _COARSE_TOLERANCE = 1e-4, 2e-2
_COARSE, _FINE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
# By how much an element may differ in any case: where a weight passes through zero, rounding is all that is left of it.
_LEAST_DIFFERENCE = 1e-6
_WINDOW_BITS = 30
_NOTHING = 0  # in the place of a number: there is none, or it is not there yet


class Weights:
    """Looks at the weights of one replicated model, a part in each window."""

    def __init__(self) -> None:
        self.name = ""  # of the parameter that was looked at last
        self.skipped: Collection[str] = ()  # parameters that each rank changes by itself
        self._tolerances = (0.0, 0.0)  # relative to the larger number, and absolute
        self._window = -1  # of the look that not all ranks have compared yet
        self._number = -1  # of that look, see [Note: how often]
        self._numbers: Tensor | tuple[Tensor, Tensor] | None = None  # the squared norm, the product with the pattern
        self._num_elements = 0
        self._event: Any = None

    def look(self, window: int, slots: Sequence[Slot], *, is_before_update: bool = True) -> None:
        """Look at a part of the parameter whose turn it is, unless a look is still to be compared.

        What is seen as a step begins is not compared with what another rank saw before an update.
        """
        later = window - _NUM_FIRST_WINDOWS
        number = window if later < 0 else _NUM_FIRST_WINDOWS + later // _WINDOWS_PER_LOOK
        if self._numbers is not None or not slots or number == self._number:
            return
        self._number = number
        slot = slots[number % len(slots)]
        parameter = slot.parameter.detach()
        if slot.is_dtensor:  # of a tensor-parallel one the part that lies here
            parameter = local_tensor(parameter)
        if type(parameter) is not Tensor or slot.name in self.skipped:
            return  # classes of their own may have no norm
        device = parameter.device
        if not parameter.is_cpu and (device.type != "cuda" or torch.cuda.is_current_stream_capturing()):
            return
        part = _part(parameter, number // len(slots)).reshape(-1)
        num_elements, is_coarse = part.numel(), part.dtype in _COARSE
        if num_elements == 0 or (not is_coarse and part.dtype not in _FINE):
            return  # there are no norms of it
        part = part.float() if is_coarse else part
        self.name, self._window = slot.name, 2 * window + is_before_update
        self._tolerances = (_COARSE_TOLERANCE if is_coarse else _TOLERANCE, _LEAST_DIFFERENCE * num_elements**0.5)
        pattern = _pattern(part.dtype, device, num_elements)
        if parameter.is_cpu:
            self._numbers = (part.dot(part), part.dot(pattern))
        else:
            numbers = torch.stack([(part * part).sum(), (part * pattern).sum()])  # without cuBLAS
            host = torch.empty(2, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(part.device))
        self._num_elements = num_elements

    def word(self) -> int:
        """What this rank tells the others: of which window the look is, and its number; 0 where there is none yet."""
        if self._numbers is None or (self._event is not None and not _has_passed(self._event)):
            return _NOTHING
        squares, product = map(float, self._numbers)
        number = _as_single(_stretched(math.sqrt(squares), product / self._num_elements**0.5))
        bits = int.from_bytes(struct.pack("<f", number), "little")
        return (1 + self._window % (1 << _WINDOW_BITS)) << 32 | bits

    def compare(self, words: Sequence[int]) -> dict[int, float]:
        """Hear the words of the ranks that take part; returns their numbers, by place, if these differ."""
        if self._numbers is None and not any(words):
            return {}
        windows = {word >> 32 for word in words}
        if _NOTHING in windows and len(windows) <= 2:
            return {}  # some do not have it yet: see [Note: one at a time]
        self.forget()
        if len(windows) > 1:
            return {}  # not of the same part; from now on they are
        numbers = [struct.unpack("<f", (word & 0xFFFFFFFF).to_bytes(4, "little"))[0] for word in words]
        return dict(enumerate(numbers)) if _differ(numbers, *self._tolerances) else {}

    def forget(self) -> None:
        """Let go of a look, compared or not; on all ranks."""
        self._numbers = self._event = None

    def begin_anew(self) -> None:
        """Look again in the window that comes next: weights have been made equal."""
        self.forget()
        self._number = -1


def _has_passed(event: Any) -> bool:
    """Whether the GPU has come to an event; it cannot be asked while it records a graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return bool(event.query())


def _part(parameter: Tensor, turn: int) -> Tensor:
    """Some of a parameter's elements, others in each turn."""
    if parameter.is_complex():
        parameter = torch.view_as_real(parameter)
    while parameter.numel() > _MOST_ELEMENTS:
        rows = len(parameter)
        num = max(1, _MOST_ELEMENTS * rows // parameter.numel())
        start = turn * num % rows
        parameter = parameter.narrow(0, start, min(num, rows - start))
        if num == 1:
            parameter = parameter[0]
    return parameter


_patterns: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}


def _pattern(dtype: torch.dtype, device: torch.device, num: int = _MOST_ELEMENTS) -> Tensor:
    """Ones with signs that follow no rule which weights would follow too, the same on all ranks."""
    known = _patterns.get((dtype, device, num))
    if known is None:
        known = _make_pattern(dtype, device) if num == _MOST_ELEMENTS else _pattern(dtype, device)[:num]
        _patterns[dtype, device, num] = known
    return known


def _make_pattern(dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.arange(_MOST_ELEMENTS, dtype=torch.int64, device="cpu")
    for _ in range(3):  # a step of a known generator of random numbers, in 31 bits
        numbers = (numbers * 1_103_515_245 + 12_345) % (1 << 31)
        numbers ^= numbers >> 13
    return ((numbers >> 7) % 2 * 2 - 1).to(dtype=dtype, device=device)


def _stretched(norm: float, along: float) -> float:
    """See [Note: one number]; ``along``: the length of the part in the pattern's direction."""
    if not math.isfinite(norm) or norm == 0.0:
        return norm
    return norm * math.sqrt(max(0.0, 1.25 + max(-1.0, min(1.0, along / norm))))


def _as_single(value: float) -> float:
    """A number that single precision has, or infinity."""
    return value if not math.isfinite(value) or abs(value) < 3e38 else math.copysign(math.inf, value)


def _differ(numbers: Sequence[float], relative: float, absolute: float) -> bool:
    finite = [number for number in numbers if math.isfinite(number)]
    if len(finite) < len(numbers):
        return bool(finite)  # NaN on some ranks only
    return max(numbers) - min(numbers) > relative * max(numbers) + absolute
