"""The compiler's answer to a job: kept from before, or asked for now and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RehearsalError
from meshwright.rehearsal.compiler import store
from meshwright.rehearsal.compiler.jobs import Job, Outcome
from meshwright.rehearsal.compiler.running import Compiler

_LINES = 12  # of a compiler's own error


def answer(
    job: Job,
    folder: Path | None,
    deadline: float,
    tick: Callable[[float], None],
    ready: Compiler | None = None,
) -> tuple[Outcome, bool]:
    """What the compiler says, or said before; whether it is from the folder.

    `ready` is a compiler that was started before for this hardware; else one is started.
    """
    kept = None if folder is None else store.load(folder, job)
    if kept is not None:
        return kept, True
    with ready or Compiler(job.site) as compiler:
        outcome = compiler.run(job, deadline, tick)
    if outcome.verdict == "failed":
        lines = [line[:160] for line in outcome.reason.splitlines()[:_LINES]]
        raise RehearsalError("\n  ".join([f"{job.name}: the compiler refused it.", *lines]))
    if folder is not None:
        store.save(folder, job, outcome)
    return outcome, False
