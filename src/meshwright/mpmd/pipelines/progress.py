"""One line that says how far a longer work is, on a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_PATIENCE = 2.0  # seconds before anything is shown


class Progress:
    """`with Progress("compiling", 12) as progress: progress.one("F0")`."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done = what, total, 0
        self.began = time.monotonic()
        self.shown = False

    def one(self, name: str) -> None:
        self.done += 1
        if time.monotonic() - self.began > _PATIENCE and sys.stderr.isatty():
            self.shown = True
            text = f"{self.what} {self.done} of {self.total}: {name}"
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
