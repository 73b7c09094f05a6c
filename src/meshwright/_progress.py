"""What is going on while something takes long: what is done, and the time that has passed.

Nothing is said in the first two seconds. On a terminal it is one line on stderr, which goes away
with the work, with a bar where it is known how much of that is done; in a notebook a line of output
that goes away, too; elsewhere, as in a job's log, a line every 15 seconds. `progress=False` of the
functions that take long switches it off.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

# Seconds: before the first word; between frames of a terminal, of a notebook; between lines.
_QUIET, _BEAT, _NOTEBOOK_BEAT, _LINES = 2.0, 0.2, 1.0, 15.0
_FRAMES = "\u280b\u2819\u2838\u2834\u2826\u2807"  # dots that go round
_PLAIN_FRAMES = "|/-\\"

_SHOWN = contextvars.ContextVar("progress shown", default=True)


@contextlib.contextmanager
def showing(progress: bool) -> Iterator[None]:
    """Show the pulses of the block, unless `progress` is False, here or in a block around it."""
    token = _SHOWN.set(_SHOWN.get() and progress)
    try:
        yield
    finally:
        _SHOWN.reset(token)


class Pulse:
    """`with Pulse("llama3-8b on v5e:16x16") as pulse: pulse.now("compiling", usual=40.0)`."""

    def __init__(self, what: str):
        self.what, self.doing = what, ""
        self.usual: float | None = None
        self.done: float | None = None
        self.began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self, doing: str, usual: float | None = None, done: float | None = None) -> None:
        """Say what is being done, and the seconds that it took the last time, where known.

        `done` is the part of all the work that is behind it, from 0 to 1, where that is known.
        """
        self.doing, self.usual, self.done = doing, usual, done

    def line(self) -> str:
        """What is being done, for how long, and what to expect."""
        passed = _clock(time.monotonic() - self.began)
        expected = f"; the last like it took {_clock(self.usual)}" if self.usual else ""
        much = "" if self.done is None else f", {self.done:.0%} done"
        return f"{self.what}: {self.doing}, {passed}{expected}{much}"

    def __enter__(self) -> Pulse:
        if _SHOWN.get():
            # In this context: a notebook's kernel tells from it which cell is running.
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._way(),), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _way(self) -> Callable[[], None]:
        if _in_notebook():
            return self._update_output
        with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr closed, or none
            if sys.stderr.isatty():
                return self._beat
        return self._write_lines

    def _beat(self) -> None:
        if self._ended.wait(_QUIET):
            return
        can_dot = (sys.stderr.encoding or "").lower().startswith("utf")
        frames, number = _FRAMES if can_dot else _PLAIN_FRAMES, 0
        with contextlib.suppress(ValueError, OSError):  # a terminal that went away
            while not self._ended.wait(_BEAT):
                columns = shutil.get_terminal_size().columns
                bar = "" if self.done is None else f"{_bar(self.done, can_dot)} "
                text = f"{frames[number % len(frames)]} {bar}{self.line()}"[: columns - 1]
                sys.stderr.write(f"\r{text}\x1b[K")
                sys.stderr.flush()
                number += 1
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _update_output(self) -> None:
        if self._ended.wait(_QUIET):
            return
        display: Any = importlib.import_module("IPython.display").display
        shown = display({"text/plain": self.line()}, raw=True, display_id=True)
        while not self._ended.wait(_NOTEBOOK_BEAT):
            shown.update({"text/plain": self.line()}, raw=True)
        shown.update({"text/plain": ""}, raw=True)

    def _write_lines(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while not self._ended.wait(_LINES):
                print(self.line(), file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this, whose output can be replaced."""
    ipython: Any = sys.modules.get("IPython")  # which is there if its kernel runs
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _bar(done: float, can_block: bool, width: int = 20) -> str:
    """Draw a part of a whole.

    >>> _bar(0.25, can_block=False, width=8)
    '[##......]'
    """
    full = round(min(max(done, 0.0), 1.0) * width)
    if can_block:
        return "\u2588" * full + "\u2591" * (width - full)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _clock(seconds: float) -> str:
    """Write a time that a person waits for.

    >>> _clock(42.3), _clock(130)
    ('42 s', '2 min 10 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
