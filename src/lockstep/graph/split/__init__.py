"""The `split` strategy: one compiled graph per bucket, so that a bucket can travel while the backward still computes.

A compiled backward hands out all of its gradients at once, at its end.  Here the forward graph is cut where a bucket is
full.  Each part gets a backward of its own, and the gradients of a part arrive when that backward is done: the part
nearest the output first.
"""

from lockstep.graph.split.optimizer import SplitOptimizer

__all__ = ["SplitOptimizer"]
