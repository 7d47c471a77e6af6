"""The folder that a launcher shares with its ranks; what dead launchers left behind is removed by the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from lockstep.agree.alive import card, is_dead

_PREFIX = "lockstep-run-"
_OWNER = "owner"


def make_run_folder() -> Path:
    """Make a new one, for this process; OSError where there is no place for it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    (folder / _OWNER).write_text(card())
    _remove_litter(folder.parent)
    return folder


def _remove_litter(place: Path) -> None:
    """Remove folders of this user whose launcher is known to have ended: killed together with its reaper."""
    with contextlib.suppress(OSError):
        for folder in place.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
                if is_ours and is_dead((folder / _OWNER).read_text()):
                    shutil.rmtree(folder, ignore_errors=True)
