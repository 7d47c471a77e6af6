"""What a rank does for its launcher: ends with it, says where it is, shows its stack when asked, leaves last words."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from lockstep import settings
from lockstep.agree import sudden
from lockstep.launch.page import Page, page_path
from lockstep.launch.processes import die_with_parent
from lockstep.launch.words import Words, words_of, write_words
from lockstep.observe import moments

PARENT_FILE = "launcher"
_POLL_SECONDS = 0.5
# One that programs and schedulers leave alone: SIGUSR1 and SIGUSR2 mean "requeue" to some.
STACK_SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else 0


class Inside(NamedTuple):
    """This process as a rank of a launcher."""

    folder: Path
    rank: int
    pid: int
    stacks: IO[str]


_OURS = str(Path(__file__).parent.parent / "agree")
_inside: Inside | None = None


def stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"


def guard() -> Path | None:
    """End with the launcher, whatever ends it; the folder that it shares with its ranks, if there is a launcher."""
    folder = settings.run_folder()
    if folder is None:
        return None
    die_with_parent()
    try:
        parent = int((folder / PARENT_FILE).read_text())
    except (OSError, ValueError):
        os._exit(1)  # the folder goes when the launcher has gone
    if os.getppid() != parent:
        os._exit(1)
    return folder


def enter() -> None:
    """Become a rank of the launcher that started this process; nothing happens where there is none."""
    global _inside
    folder = guard()
    if folder is None:
        return
    rank = int(os.environ["RANK"])
    stacks = open(stack_path(folder, rank), "a")  # noqa: SIM115 (a signal may come until the very end)
    _inside = Inside(folder, rank, os.getpid(), stacks)
    if STACK_SIGNAL:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks)
    try:
        moments.listeners.append(Page(page_path(folder, rank)).write)
    except OSError as error:
        print(f"lockstep: rank {rank} cannot say where it is: {error}", file=sys.stderr)
    moments.reached(moments.StepMoment.STARTED)
    _note_errors_of_threads()
    sudden.listeners.append(note_error)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), name="lockstep guards", daemon=True).start()


def note_error(error: BaseException, trace: TracebackType | None = None) -> None:
    """Leave last words for an error that ends this process, also if the handler of a signal raises meanwhile."""
    try:
        _note_error(error, trace)
    except BaseException as interruption:  # a data loader's, say, whose worker is the reason of both
        _note_error(error, trace)
        if not isinstance(interruption, Exception):
            raise
        _leave(words_of(interruption))


def _note_error(error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return
        text = f"sys.exit({error.code!r})"
        where = _last_line(trace)
        _leave(words_of(error, trace, text=f"{text} at {where}" if where else text))
    else:
        _leave(words_of(error, trace))


def _leave(words: Words) -> None:
    if _inside is not None and os.getpid() == _inside.pid:
        write_words(_inside.folder, _inside.rank, words)


def _last_line(trace: TracebackType | None) -> str:
    """Where it was raised; our own ``sys.exit`` (``agree/last_words.py``) is not the place."""
    place = ""
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _note_errors_of_threads() -> None:
    previous = threading.excepthook

    def note_and_show(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            name = arguments.thread.name if arguments.thread is not None else "a thread"
            _leave(words_of(arguments.exc_value, arguments.exc_traceback, thread=name))
        previous(arguments)

    threading.excepthook = note_and_show


def _end_with(parent: int) -> None:
    """Where the kernel does not do it: end this rank and its session when the launcher has gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def become(words: list[str]) -> None:
    """End with the launcher, and become another program, which knows nothing of it."""
    guard()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"lockstep run: {words[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    become(sys.argv[1:])
