"""The whole step as one program: forward, backward, reduction, clipping and the optimizer."""

from lockstep.program.step import TrainStep, load_step

__all__ = ["TrainStep", "load_step"]
