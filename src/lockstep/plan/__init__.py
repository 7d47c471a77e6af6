"""What travels together, and in which order: pure data, no process group, no tensors."""

from lockstep.plan.build import build_plan
from lockstep.plan.caps import BucketCaps
from lockstep.plan.model import Bucket, ParameterSpec, Plan

__all__ = ["Bucket", "BucketCaps", "ParameterSpec", "Plan", "build_plan"]
