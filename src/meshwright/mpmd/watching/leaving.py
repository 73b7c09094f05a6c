"""The end of a process that cannot go on: what there is to say, and out.

JAX's own exit waits for the other processes, up to 300 s, so this does not pass through it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from meshwright.mpmd.watching.states import ABORTED, TOLD

AT_FAULT, OTHERS_FAULT = 81, 82
SIGNALS = {ABORTED: 134, TOLD: 143}  # as shells report them
_LATEST = 1.0


def leave_by(seconds: float, code: int) -> None:
    """End the process after a time, whatever else it waits for then."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="meshwright end", daemon=True).start()


def say(line: str, error: BaseException | None) -> None:
    """The error as Python shows it, if there is one, then the line, on stderr."""
    if error is not None:
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(line + "\n")


def leave(code: int) -> None:
    """End now, with what was printed."""
    leave_by(_LATEST, code)  # a full pipe must not hold it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def code_of(error: BaseException | None) -> int:
    """The exit status of a process that raised: its own where it asked for one."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return AT_FAULT
