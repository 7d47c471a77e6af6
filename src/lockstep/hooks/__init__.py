"""Gradient compression hooks for ``register_comm_hook``; they run on torch's DDP too."""

from lockstep.hooks.bf16 import Bf16State, bf16_hook
from lockstep.hooks.int8 import Int8State, int8_hook
from lockstep.hooks.topk import TopKState, topk_hook

__all__ = ["Bf16State", "Int8State", "TopKState", "bf16_hook", "int8_hook", "topk_hook"]
