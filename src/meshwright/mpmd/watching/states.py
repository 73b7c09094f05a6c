"""What a process tells of itself, and what is told of a fault: small JSON texts in a store."""

from __future__ import annotations

import dataclasses
import json

RUNNING, DONE, OVER, GONE = "running", "done", "over", "gone"
ABORTED, TOLD = "aborted (SIGABRT)", "was told to stop (SIGTERM)"
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class State:
    """What a process is doing, as it says itself.

    `beat` counts how often it said so, `moves` how often its main thread took up something.
    `plan` says what kind of step it is in, where all processes make the same.
    `phase`: running; done, waiting for the others; over, all are done; gone, it looks no more.
    """

    process: int
    beat: int = 0
    moves: int = 0
    doing: str = ""
    waiting: str = ""
    step: int | None = None
    limit: float = 60.0
    place: str = ""
    phase: str = RUNNING
    plan: str = ""

    @property
    def present(self) -> bool:
        """Whether it must still give signs of life."""
        return self.phase in (RUNNING, DONE)

    @property
    def busy(self) -> bool:
        """Whether it is in a task, or waits for somebody."""
        return self.phase == RUNNING and bool(self.doing or self.waiting)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Which process failed (none when all wait for one another), how, and what it was in."""

    process: int | None
    what: str
    doing: str = ""
    waiting: str = ""
    step: int | None = None


def fault_of(state: State, what: str) -> Fault:
    return Fault(state.process, what, state.doing, state.waiting, state.step)


def write(value: State | Fault) -> str:
    """As text, every part cut to a length that fits on a line."""
    return json.dumps(
        {
            name: short_line(part) if isinstance(part, str) else part
            for name, part in dataclasses.asdict(value).items()
        }
    )


def read_state(text: str) -> State:
    return State(**json.loads(text))


def read_fault(text: str) -> Fault:
    return Fault(**json.loads(text))


def short_line(text: str) -> str:
    """On one line, and not a long one.

    >>> short_line("one\\ntwo")
    'one two'
    """
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + " ..."
