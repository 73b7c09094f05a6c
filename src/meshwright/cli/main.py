"""`meshwright ...` as a process: its exit code, and what Ctrl-C does. `dispatch` runs the command.

Exit codes: 0, 2 for a mistake in the words or in what they ask for, 3 where a rehearsed step does
not fit, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Without `arguments` the process is the command's own: it takes the words it was started with,
    and ends here.
    """
    if arguments is not None:
        return _guarded(list(arguments))
    try:
        _end_in_one_line()
        _leave(_guarded(sys.argv[1:]))
    except KeyboardInterrupt:
        _Interrupt.tell()
        os._exit(INTERRUPTED)


def _guarded(words: list[str]) -> int:
    _Interrupt.seen = _Interrupt.told = False
    try:
        # In the function: what comes before `main` runs cannot be interrupted in one line.
        from meshwright.cli.dispatch import run

        return run(words)
    except KeyboardInterrupt:
        pass
    except BaseException:
        if not _Interrupt.seen:  # else it is what became of the interrupt on its way
            raise
    _Interrupt.tell()
    return INTERRUPTED


# Ctrl-C. The first one unwinds what runs, so that files and processes are tidied, and `_guarded`
# says so. A second one, and one that Python would lose (in a destructor, or a callback of a library
# in C), ends the process at once; its compiling process notices, and ends too.


class _Interrupt:
    seen = told = False

    @classmethod
    def tell(cls) -> None:
        if not cls.told:
            cls.told = True
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # of a line of progress
            print(f"{clear}meshwright: interrupted", file=sys.stderr, flush=True)


def _end_in_one_line() -> None:
    import signal

    def interrupt(*_: object) -> None:
        if _Interrupt.seen:
            end()
        _Interrupt.seen = True
        raise KeyboardInterrupt

    def lost(what: Any, usual: Any = sys.unraisablehook) -> None:
        end() if _Interrupt.seen else usual(what)

    def end() -> NoReturn:
        _Interrupt.tell()
        os._exit(INTERRUPTED)

    # Where the signal is ignored (`nohup`, a job in the background of a script) it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = lost


def _leave(code: int) -> NoReturn:
    """End the process without the seconds and the messages of libraries that unload."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        code = code or 1
    os._exit(code)
