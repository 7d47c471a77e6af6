"""What each rank of ``lockstep run`` starts: install Lockstep, then become the user's program.

The program must not notice: ``sys.argv``, ``sys.path[0]``, ``__main__`` and tracebacks are what ``python
script.py`` or ``python -m module`` would give.
"""

from __future__ import annotations

import builtins
import gc
import importlib.machinery
import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from types import TracebackType

__all__ = ["run_program"]

PLAIN = "--plain"
NOT_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>")


def run_program(words: list[str]) -> None:
    """Install, unless ``--plain`` comes first; then run ``script args...`` or ``-m module args...`` as the program."""
    # Imported here: when this file is run, python has put its directory on sys.path.
    from lockstep import settings
    from lockstep.launch import inside

    inside.enter()
    if words[0] == PLAIN:
        words = words[1:]
    else:
        _install()
    if settings.inject():
        from lockstep.testing.faults import inject_from_environment

        inject_from_environment()
    _forget_own_main()
    if words[0] == "-m":
        _run_hiding_own_frames(_run_module, words[1:])
    else:
        _run_hiding_own_frames(_run_script, words)


def _install() -> None:
    """Install, and keep what that has loaded out of garbage collections: it stays anyhow, and to look through it takes
    a good part of the time in which a program starts and ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        from lockstep.install import install

        install()
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _begin() -> None:
    """Come to the first moment of a rank once more, for the faults that wait for it: they are there only now."""
    from lockstep import settings
    from lockstep.observe import moments

    if settings.inject():
        moments.reached(moments.StepMoment.STARTED)


def _forget_own_main() -> None:
    """Empty ``__main__``: the user's program gets this very module object, as python would give it."""
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=None,
        __spec__=None,
        __builtins__=builtins,
        __annotations__={},
    )


def _run_script(words: list[str]) -> None:
    script = words[0]
    sys.argv[:] = words
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        runpy.run_path(script, run_name="__main__")
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    namespace = sys.modules["__main__"].__dict__
    namespace.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    exec(code, namespace)


def _run_module(words: list[str]) -> None:
    sys.argv[:] = words
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    # The function behind `python -m`, so that packages, __spec__ and error messages are python's own.
    runpy._run_module_as_main(words[0], alter_argv=True)  # type: ignore[attr-defined]


def _run_hiding_own_frames(run: Callable[[list[str]], None], words: list[str]) -> None:
    """Let an exception end the interpreter in the usual way, but show only the program's own frames."""
    from lockstep.launch import inside

    try:
        _begin()
        run(words)
    except BaseException as failure:
        inside.note_error(failure, _without_leading_frames(failure.__traceback__))
        # Whatever hook is in place now was chosen by the program or by torch; it goes on being used.
        hook = sys.excepthook

        def show_program_frames(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            own = _without_leading_frames(traceback)
            hook(kind, error.with_traceback(own), own)

        sys.excepthook = show_program_frames
        raise


def _without_leading_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in NOT_THE_USERS:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file, which python put there
    # The import gives the functions a module of their own: __main__ is emptied for the program.
    from lockstep.cli.bootstrap import run_program as run_program_from_package

    run_program_from_package(sys.argv[1:])
