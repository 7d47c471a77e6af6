"""Tools for tests of programs that must survive."""

from lockstep.testing import inject

__all__ = ["inject"]
