"""What the project says on a rank: the warnings of its log."""

from __future__ import annotations

import logging


class Words(logging.Handler):
    """Keeps the warnings of this rank from now on, of those with ``about`` in them."""

    def __init__(self, about: str = "") -> None:
        super().__init__()
        self._about = about
        self.warnings: list[str] = []
        logging.getLogger("lockstep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and self._about in record.getMessage():
            self.warnings.append(record.getMessage())
