"""Ranges in profiles."""

from __future__ import annotations

from typing import Any

import torch

# A profiler range that costs a fraction of a microsecond while no profiler runs; the public one costs several.
RecordFunction: Any = torch._C._profiler._RecordFunctionFast
