"""Feeders: who tells a step that gradients have come.  They decide nothing else."""
