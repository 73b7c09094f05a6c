"""A task: one kind of work on one microbatch at one stage."""

from __future__ import annotations

from typing import NamedTuple

# F: forward. B: the gradient of the stage's input. W: the gradient of its weights.
# BW: the whole backward, both gradients in one task.
KINDS = ("F", "B", "W", "BW")


class Task(NamedTuple):
    """`kind` of work on `microbatch` at `stage`; prints as `2F5`: stage 2, forward, microbatch 5.

    >>> Task("BW", 2, 5), str(Task("BW", 2, 5))
    (Task(kind='BW', stage=2, microbatch=5), '2BW5')
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# A task as the plain tuple it equals: quicker to make, for the loops over all tasks.
Key = tuple[str, int, int]


def needs(task: Key, stages: int) -> tuple[Key, ...]:
    """What must be done before a task. A `B` in the answer stands for `BW` as well.

    >>> needs(Task("BW", 1, 0), stages=4)
    (('F', 1, 0), ('B', 2, 0))
    """
    kind, stage, microbatch = task
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("B", stage, microbatch),)
    own = ("F", stage, microbatch)
    return (own, ("B", stage + 1, microbatch)) if stage + 1 < stages else (own,)


def gives(task: Key) -> Key:
    """What others wait for when they wait for this task."""
    return ("B", task[1], task[2]) if task[0] == "BW" else task
