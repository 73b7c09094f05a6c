"""The one line: which process, in which task, and what the others waited for."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import listing
from meshwright.mpmd.watching.states import Fault, State, short_line

_NAMED = 6


def line(fault: Fault, states: Mapping[int, State]) -> str:
    """The fault as all processes print it.

    >>> states = {0: State(0, waiting="1B5 of process 1"), 1: State(1, doing="1F6")}
    >>> line(Fault(1, "died", "1F6", step=17), states)
    'meshwright: process 1 died in 1F6 (step 17); process 0 waited for 1B5 of process 1. All end.'
    """
    who = "all processes" if fault.process is None else f"process {fault.process}"
    others = [
        f"process {process} waited for {state.waiting}"
        for process, state in sorted(states.items())
        if process != fault.process and state.waiting
    ]
    waited = listing(others, _NAMED) or "no other process waited"
    return short_lines(f"meshwright: {who} {fault.what}{_where(fault)}; {waited}. All end.")


def raised(error: BaseException) -> str:
    """What a process did that raised.

    >>> raised(ValueError("no\\nluck")), raised(KeyboardInterrupt())
    ('raised ValueError: no luck', 'was interrupted')
    """
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    try:
        text = str(error)
    except Exception as worse:  # a hostile __str__ must not hide the fault
        text = f"<whose text raised {type(worse).__name__}>"
    return short_line(f"raised {type(error).__name__}{': ' if text else ''}{text.rstrip('.')}")


def short_lines(text: str) -> str:
    return " ".join(text.split())


def _where(fault: Fault) -> str:
    if fault.process is None:
        return ""
    task = f" in {fault.doing}" if fault.doing else ""
    if fault.waiting:
        task += f"{',' if task else ''} waiting for {fault.waiting}"
    step = "" if fault.step is None else f" (step {fault.step})"
    return (task or " outside of a task") + step
