"""The words and numbers that go with every drawing."""

from __future__ import annotations

import math

from meshwright.errors import listing
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.timeline import Timeline

HEADING = ("group", "stages", "tasks", "busy", "bubble", "held")
RIGHT = (True, False, True, True, True, True)
_MOST_LISTED = 16


def headline(timeline: Timeline) -> str:
    """What is drawn.

    >>> import meshwright as mw
    >>> headline(mw.simulate(mw.schedule("zb-v", groups=2, microbatches=4), latency=0.5))
    'zb-v: 2 groups, 4 stages, 4 microbatches; F=1, B=1, W=1 per group, latency 0.5'
    """
    schedule = timeline.schedule
    sizes = (
        f"{plural(schedule.groups, 'group')}, {plural(schedule.stages, 'stage')}, "
        f"{plural(schedule.microbatches, 'microbatch')}"
    )
    wait = f", latency {timeline.latency:g}" if timeline.latency else ""
    return f"{schedule.name}: {sizes}; {cost_text(timeline)}{wait}"


def summary(timeline: Timeline) -> str:
    """
    >>> import meshwright as mw
    >>> summary(mw.simulate(mw.schedule("1f1b", groups=4, microbatches=8)))
    'makespan 33, bubble 9, idle 27.3 %; microbatches held by each group: 4, 3, 2, 1'
    """
    held = ", ".join(f"{most:g}" for most in timeline.memory)
    if timeline.schedule.groups > _MOST_LISTED:
        held = f"{min(timeline.memory):g} to {max(timeline.memory):g}"
    return (
        f"makespan {tidy(timeline.makespan)}, bubble {tidy(timeline.bubble)}, "
        f"idle {100 * timeline.idle:.1f} %; microbatches held by each group: {held}"
    )


def tidy(value: float) -> str:
    """A time without the noise of its last bits.

    >>> tidy(0.1 + 0.2), tidy(1581.0), tidy(1e-16)
    ('0.3', '1581', '0')
    """
    return f"{round(value, 9):.6g}"


def plural(count: float, noun: str) -> str:
    """
    >>> plural(1, "group"), plural(4.5, "microbatch")
    ('1 group', '4.5 microbatches')
    """
    if count != 1:
        noun += "es" if noun.endswith("h") else "s"
    return f"{count:g} {noun}"


def rows(timeline: Timeline) -> list[list[str]]:
    """A line per group, under `HEADING`."""
    schedule = timeline.schedule
    return [
        [
            str(group),
            listing(schedule.stages_of[group]),
            f"{len(schedule.tasks[group]):,}",
            tidy(timeline.busy[group]),
            tidy(timeline.bubbles[group]),
            f"{timeline.memory[group]:g}",
        ]
        for group in range(schedule.groups)
    ]


def cost_text(timeline: Timeline) -> str:
    """What a microbatch costs in a group, if that is the same in all of them."""
    found = {
        _group_costs([timeline.costs[stage] for stage in own])
        for own in timeline.schedule.stages_of
    }
    return f"{found.pop()} per group" if len(found) == 1 else "costs differ between groups"


def _group_costs(costs: list[Costs]) -> str:
    sums = {kind: sum(getattr(c, kind) for c in costs) for kind in ("F", "B", "W", "BW", "FB")}
    told = {"BW": sums["B"] + sums["W"], "FB": sums["F"] + sums["BW"]}
    return ", ".join(
        f"{kind}={value:g}"
        for kind, value in sums.items()
        if kind not in told or not math.isclose(value, told[kind])
    )


def round_up(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten.

    >>> round_up(3.2), round_up(0.013)
    (5.0, 0.02)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))
