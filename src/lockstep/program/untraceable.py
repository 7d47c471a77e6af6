"""The error for a step that cannot be traced."""

from __future__ import annotations


class Untraceable(Exception):
    """The step cannot be one program, for the reason that the message gives."""
