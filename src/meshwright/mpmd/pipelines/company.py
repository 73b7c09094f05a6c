"""The pipelines of this process among those of the others: one watch and one link for them all.

A program has several pipelines as often as not, one to train and one to evaluate. With one watch a
fault is told once, and steps are counted together, so that pipelines called in another order are
seen at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from meshwright.mpmd.transfers import connect
from meshwright.mpmd.watching import Watch


class Company:
    """What the pipelines share while at least one of them is open."""

    def __init__(self) -> None:
        self.link = connect()
        try:
            self.watch = Watch(name="pipeline").start()
        except BaseException:
            self.link.close()
            raise
        self._steps = 0
        self._pipelines = 0  # ever made; they are numbered alike in every process
        self._limits: dict[int, float] = {}  # of those that are open

    def enter(self, limit: float) -> int:
        """One more pipeline; returns its number."""
        number, self._pipelines = self._pipelines, self._pipelines + 1
        self._limits[number] = limit
        self.watch.limit = max(self._limits.values())
        return number

    def leave(self, number: int) -> None:
        """The last one waits until the others are done, too."""
        global _company
        del self._limits[number]
        if self._limits:
            return
        _company = None if _company is self else _company
        try:
            if not self.watch.closed:
                self.watch.close()
        finally:
            self.link.close()

    def begin(self, number: int, plan: str) -> None:
        """A step of a pipeline, whose limit holds until that of another one begins. Whatever
        becomes of it, the next one has another number."""
        self.watch.limit = self._limits[number]
        self.watch.enter(self._steps, plan)
        self._steps += 1

    @contextlib.contextmanager
    def patient(self, doing: str) -> Iterator[None]:
        """Tracing and compiling take what they take; others wait for us meanwhile."""
        before, self.watch.limit, self.watch.doing = self.watch.limit, math.inf, doing
        try:
            yield
        finally:
            self.watch.limit, self.watch.doing = before, ""


_company: Company | None = None


def company() -> Company:
    """That of this process; made for its first pipeline."""
    global _company
    if _company is None:
        _company = Company()
    return _company
