"""The whole step as one program: forward, backward, reduction, clipping and the optimizer."""

from lockstep.program.step import TrainStep

__all__ = ["TrainStep"]
