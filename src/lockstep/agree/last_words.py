"""Last words: a process that ends tells its peers why, before all they see is a connection that closed.

an exception that nobody caught   its type and text, from ``sys.excepthook``
one that the program caught, and  the same, as far as it was seen: ``sys.exit`` was called where it was handled, or it
then ended                        came out of a forward, and no step was finished since
a raise in another thread         a note beside the signs of life, since the process goes on
the end of the program            which step it was in: its end, ``sys.exit``, fewer batches than others

An exception that was caught is nobody's business while the program goes on, also if it calls ``sys.excepthook`` to show
it: a step that ends well is the proof that it was handled.  A forked child says nothing: it is not a rank.  The process
that hosts the store stays a moment, so that its own last words can be read.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from lockstep.agree import pulse as pulses
from lockstep.agree.beat import Words, words_of
from lockstep.agree.leaving import abandon_groups, has_abandoned
from lockstep.agree.line import end_threads
from lockstep.agree.lookout import keep_lookout

logger = logging.getLogger("lockstep")

_TELLING_SECONDS = 1.0
_CLOSING_SECONDS = 1.0


class _State:
    """How far this process has come with it."""

    is_prepared = is_installed = has_ended = False
    pid = 0  # of the process that has peers, once it has
    noticed: Words | None = None  # of an error that may have been handled
    leaving = ""  # how sys.exit was called, for a status that is not 0


_unfinished: list[Callable[[], None]] = []


def prepare() -> None:
    """See to the end of the process, and to exceptions once it has peers; changes nothing until then."""
    if not _State.is_prepared:
        _State.is_prepared = True
        atexit.register(_end)
        pulses.on_new_pulse = _begin


def finish_before_end(function: Callable[[], None]) -> None:
    """Call this at the end of the process, while ranks can still tell each other something; perhaps more than once."""
    prepare()
    _unfinished.append(function)
    atexit.register(function)


def _begin(pulse: pulses.Pulse) -> None:
    """A pulse was made: look after those who belong to it, and tell them of the end."""
    keep_lookout(pulse, is_excused=lambda: _State.noticed is not None)
    _install()


def _install() -> None:
    """The process has peers: tell them from now on."""
    if not _State.is_installed:
        _State.is_installed = True
        _State.pid = os.getpid()
        _hook_exceptions()
        _hook_threads()
        _hook_exit()
        if multiprocessing.parent_process() is not None:
            # A process of multiprocessing ends by itself, without handlers of atexit if it was forked.
            multiprocessing.util.Finalize(None, _end, exitpriority=0)
        # Once more, since what is registered last is called first: before others end what we need.
        atexit.register(_end)


def _hook_exceptions() -> None:
    previous = sys.excepthook

    def post_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_called_by_hand():
            _tell(error)
        previous(kind, error, trace)

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


def _hook_exit() -> None:
    previous = sys.exit

    def note_and_exit(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _note_exit(status, sys.exception())
        previous(status)

    sys.exit = note_and_exit


def _note_exit(status: Any, error: BaseException | None) -> None:
    _State.leaving = "" if status in (None, 0) else f"sys.exit({status!r:.200})"
    if _State.leaving and error is not None:
        notice(error)


def notice(error: BaseException) -> None:
    """Remember an error that comes out of a step, in case the program ends because of it."""
    if isinstance(error, Exception) and not _is_child():
        _State.noticed = words_of(error, -1)


def forget() -> None:
    """A step has ended well: what was noticed before was handled."""
    if _State.noticed is not None or _State.leaving:
        _State.noticed, _State.leaving = None, ""


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
    error = _error_at_the_end()
    if error is not None:
        _tell(error)
    for finish in _unfinished:
        with contextlib.suppress(Exception):
            finish()
    for pulse in pulses.living_pulses():
        _State.has_ended = True
        with contextlib.suppress(Exception):
            is_amid = pulse.is_amid_a_window()
            if error is not None or is_amid or _State.noticed is not None or _State.leaving or has_abandoned():
                abandon_groups(at_the_end=True)
            pulse.end_with(_words_at_the_end(pulse, is_amid), _TELLING_SECONDS)
            pulse.stay_until_heard()
        pulse.line.close(_CLOSING_SECONDS)
    end_threads(_CLOSING_SECONDS)


def _error_at_the_end() -> BaseException | None:
    """The exception that ends this process; None for a planned end."""
    # Python sets this for an exception that nobody caught, and for no other: also for one before a model was wrapped.
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):
        return error if isinstance(error, BaseException) else None
    error = sys.exception()  # on its way out of a process of multiprocessing
    if isinstance(error, SystemExit):
        _note_exit(error.code, error.__cause__ or error.__context__)
        return None
    return error


def _words_at_the_end(pulse: pulses.Pulse, is_amid: bool) -> Words:
    """What a process says that came to its end without an exception that nobody caught."""
    place = pulse.doing() or "before it trained anything"
    by = f" by {_State.leaving}" if _State.leaving else ""
    noticed = _State.noticed
    if noticed is not None:
        text = f"{noticed.text}\n(Its program caught this error, and ended{by} {place}.)"
        return Words(pulse.rank, noticed.type, text, ranks=noticed.ranks)
    said = f"ended its program {place}{by}"
    if is_amid:
        said += (
            ", in the middle of a backward or of its reduction. So an error was raised there, and caught by the "
            "program before it ended: look at that rank's output."
        )
    elif by:
        said += ": look at that rank's output."
    else:
        said += (
            ".\nFix: give all ranks as many batches, or wrap the loop in model.join(). If the program has caught an "
            "error before it ended, that rank's output has it."
        )
    return Words(pulse.rank, "", said, ended=True)
