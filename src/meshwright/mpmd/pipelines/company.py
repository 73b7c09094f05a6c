"""The pipelines of this process among those of the others: one watch and one link for them all.

A program has several pipelines as often as not, one to train and one to evaluate. With one watch a
fault is told once, and steps are counted together, so that pipelines called in another order are
seen at once.
"""

from __future__ import annotations

from meshwright.mpmd.transfers import connect
from meshwright.mpmd.watching import Watch


class Company:
    """What the pipelines share while at least one of them is open."""

    def __init__(self) -> None:
        self.link = connect()
        self.watch = Watch(name="pipeline").start()
        self.steps = 0
        self.pipelines = 0  # ever made; they are numbered alike in every process
        self._open = 0

    def enter(self) -> int:
        """One more pipeline; returns its number."""
        self._open += 1
        self.pipelines += 1
        return self.pipelines - 1

    def leave(self) -> None:
        """The last one waits until the others are done, too."""
        global _company
        self._open -= 1
        if self._open:
            return
        _company = None if _company is self else _company
        if not self.watch.closed:
            self.watch.close()
        self.link.close()


_company: Company | None = None


def company() -> Company:
    """That of this process; made for its first pipeline."""
    global _company
    if _company is None:
        _company = Company()
    return _company
