"""Last words: a process that ends tells its peers why, before all they see is a connection that closed.

an exception that nobody caught   its type and text, from ``sys.excepthook``
a raise in another thread         a note beside the signs of life, since the process goes on
the end of the program            which step it was in: its end, ``sys.exit``, fewer batches than others

An exception that was caught is nobody's business, also if a program calls ``sys.excepthook`` with it to show it.  A
forked child says nothing: it is not a rank.  The process that hosts the store stays a moment, so that its own last
words can be read.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from lockstep.agree import pulse as pulses
from lockstep.agree.beat import Words, words_of

logger = logging.getLogger("lockstep")

_TELLING_SECONDS = 1.0
_STAY_SECONDS = 2.5  # at most, for the host of the store: others hear once a second
_CLOSING_SECONDS = 1.0
_POLL_SECONDS = 0.02


class _State:
    """How far this process has come with it."""

    is_prepared = is_installed = has_ended = False
    pid = 0  # of the process that has peers, once it has


def prepare() -> None:
    """See to the end of the process, and to exceptions once it has peers; changes nothing until then."""
    if not _State.is_prepared:
        _State.is_prepared = True
        atexit.register(_end)
        pulses.on_new_pulse = _install


def _install() -> None:
    """The process has peers: tell them from now on."""
    if not _State.is_installed:
        _State.is_installed = True
        _State.pid = os.getpid()
        _hook_exceptions()
        _hook_threads()
        # Once more, since what is registered last is called first: before others end what we need.
        atexit.register(_end)


def _hook_exceptions() -> None:
    previous = sys.excepthook

    def post_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_called_by_hand():
            _tell(error)
        previous(kind, error, trace)

    post_and_show.is_lockstep = True  # type: ignore[attr-defined]
    sys.excepthook = post_and_show


def _hook_threads() -> None:
    previous = threading.excepthook

    def note_and_show(args: Any) -> None:
        with contextlib.suppress(Exception):
            name = args.thread.name if args.thread is not None else "?"
            for pulse in pulses.living_pulses():
                pulse.note(f"its thread {name!r} has raised {args.exc_type.__name__}: {args.exc_value}")
        previous(args)

    threading.excepthook = note_and_show


def _is_called_by_hand() -> bool:
    """Whether the program, and not the interpreter at its end, calls the hook: then its own frames are below.

    The interpreter calls it with nothing below; other hooks that pass it on may be in between.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive or threading.current_thread() is not threading.main_thread():
        return True  # the process goes on after it
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main", "_bootstrap")


def _is_child() -> bool:
    """Whether this process was forked by a rank: it is none, and its end is not a rank's."""
    return _State.pid not in (0, os.getpid())


def _tell(error: BaseException) -> None:
    """Leave the words of an exception that ends this process, also where it has not come to wrap a model."""
    if _is_child():
        return
    with contextlib.suppress(Exception):
        pulses.pulse_of_this_process()
    for pulse in pulses.living_pulses():
        with contextlib.suppress(Exception):
            pulse.end_with(words_of(error, pulse.rank), _TELLING_SECONDS)


def _end() -> None:
    """The process ends: say so, let those who need the store hear it, and end the threads that speak to it."""
    if _State.has_ended or _is_child():
        return
    # Python sets this for an exception that nobody caught, and for no other: also for one before a model was wrapped.
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):
        _tell(error)
    for pulse in pulses.living_pulses():
        _State.has_ended = True
        with contextlib.suppress(Exception):
            said = f"ended its program {pulse.doing() or 'before it trained anything'}"
            pulse.end_with(Words(pulse.rank, "", said, ended=True), _TELLING_SECONDS)
            deadline = monotonic() + _STAY_SECONDS
            while pulse.hosts_store and monotonic() < deadline and not pulse.has_been_heard():
                sleep(_POLL_SECONDS)
        pulse.line.close(_CLOSING_SECONDS)
