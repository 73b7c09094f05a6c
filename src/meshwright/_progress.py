"""A progress bar on stderr for long compiles; nothing is shown in the first two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

_QUIET_SECONDS = 2.0


class Bar:
    """`with Bar("llama3-8b on v5e:16x16") as bar: bar.now("compiling", 12.0, 900.0)`."""

    def __init__(self, what: str):
        self.what = what
        self.began = time.monotonic()
        self.shown: Any = None
        self.task: Any = None

    def now(self, doing: str, passed: float = 0.0, limit: float | None = None) -> None:
        """Say what is being done, and how far that is of its end, or of its deadline."""
        if time.monotonic() - self.began < _QUIET_SECONDS or not sys.stderr.isatty():
            return
        if self.shown is None:
            self._show()
        self.shown.update(
            self.task, description=f"{self.what}: {doing}", completed=passed, total=limit
        )

    def _show(self) -> None:
        # rich takes 50 ms to import, which a short compile should not pay.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.shown = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.shown.start()
        self.task = self.shown.add_task(self.what, total=None)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown is not None:
            with contextlib.suppress(Exception):  # a terminal that went away
                self.shown.stop()
