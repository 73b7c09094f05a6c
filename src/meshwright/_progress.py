"""What is going on while something takes long, on stderr: a pulse and the time that has passed.

Nothing is said in the first two seconds. On a terminal it is one line, which goes away; elsewhere
the command line writes a line every 15 seconds, and the library none.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from types import TracebackType

from meshwright.errors import on_command_line

_QUIET, _BEAT, _LINES = 2.0, 0.2, 15.0  # seconds: before the first word, between frames, lines
_FRAMES = "\u280b\u2819\u2838\u2834\u2826\u2807"  # dots that go round
_PLAIN_FRAMES = "|/-\\"


class Pulse:
    """`with Pulse("llama3-8b on v5e:16x16") as pulse: pulse.now("compiling", usual=40.0)`."""

    def __init__(self, what: str):
        self.what, self.doing = what, ""
        self.usual: float | None = None
        self.began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self, doing: str, usual: float | None = None) -> None:
        """Say what is being done, and the seconds that it took the last time, where known."""
        self.doing, self.usual = doing, usual

    def line(self) -> str:
        """What is being done, for how long, and what to expect."""
        passed = _clock(time.monotonic() - self.began)
        expected = f"; the last like it took {_clock(self.usual)}" if self.usual else ""
        return f"{self.what}: {self.doing}, {passed}{expected}"

    def __enter__(self) -> Pulse:
        with contextlib.suppress(ValueError, OSError):  # a stderr that is closed
            show = self._beat if sys.stderr.isatty() else self._write_lines
            if sys.stderr.isatty() or on_command_line():
                self._thread = threading.Thread(target=show, daemon=True)
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

    def _beat(self) -> None:
        if self._ended.wait(_QUIET):
            return
        can_dot = (sys.stderr.encoding or "").lower().startswith("utf")
        frames, number = _FRAMES if can_dot else _PLAIN_FRAMES, 0
        with contextlib.suppress(ValueError, OSError):  # a terminal that went away
            while not self._ended.wait(_BEAT):
                columns = shutil.get_terminal_size().columns
                text = f"{frames[number % len(frames)]} {self.line()}"[: columns - 1]
                sys.stderr.write(f"\r{text}\x1b[K")
                sys.stderr.flush()
                number += 1
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _write_lines(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while not self._ended.wait(_LINES):
                print(self.line(), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """Write a time that a person waits for.

    >>> _clock(42.3), _clock(130)
    ('42 s', '2 min 10 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
