"""`schedule(name, ...)`: the named schedules, and the sizes each is defined for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshwright.errors import ScheduleError, near, short
from meshwright.mpmd.schedules.named.linear import eager_1f1b, forward, gpipe, one_f_one_b
from meshwright.mpmd.schedules.named.looped import interleaved_1f1b, looped_bfs
from meshwright.mpmd.schedules.named.v_shaped import dualpipe_v, zb_v
from meshwright.mpmd.schedules.named.zero_bubble import zb_h1, zb_h2
from meshwright.mpmd.schedules.schedule import Schedule, count


@dataclasses.dataclass(frozen=True)
class Named:
    """How a named schedule is built, and for how many stages per group and microbatches."""

    build: Callable[..., Schedule]
    chunks: int | None = 1
    """Stages per group; None for any number from one."""
    default_chunks: int = 1
    least_per_group: int = 0
    """Microbatches it needs for each group."""
    training: bool = True


NAMED = {
    "gpipe": Named(gpipe),
    "1f1b": Named(one_f_one_b),
    "eager-1f1b": Named(eager_1f1b),
    "interleaved-1f1b": Named(interleaved_1f1b, None, 2),
    "looped-bfs": Named(looped_bfs, None, 2),
    "zb-h1": Named(zb_h1),
    "zb-h2": Named(zb_h2),
    "zb-v": Named(zb_v, 2, 2),
    "dualpipe-v": Named(dualpipe_v, 2, 2, least_per_group=2),
    "forward": Named(forward, training=False),
}


MOST = 10_000_000  # forwards of a schedule; more is a slip


def schedule(name: str, *, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
    """A named schedule for so many groups and microbatches.

    `stages` counts those of the whole model. One per group for `gpipe`, `1f1b`, `eager-1f1b`,
    `zb-h1`, `zb-h2` and `forward` (no backward: inference); two per group for `zb-v` and
    `dualpipe-v`; any whole number per group, by default two, for `interleaved-1f1b` and
    `looped-bfs`.

    >>> import meshwright as mw
    >>> mw.schedule("interleaved-1f1b", groups=4, microbatches=8, stages=12)
    Schedule('interleaved-1f1b', groups=4, stages=12, microbatches=8, tasks=192)
    >>> mw.schedule("zbh1", groups=4, microbatches=8)
    Traceback (most recent call last):
    ...
    meshwright.errors.ScheduleError: no schedule is called 'zbh1'. Did you mean 'zb-h1'? There...
    """
    name = check_name(name)
    named = NAMED[name]
    groups, microbatches = count(groups, "groups", name), count(microbatches, "microbatches", name)
    stages = groups * named.default_chunks if stages is None else count(stages, "stages", name)
    _check_stages(name, named, groups, stages)
    if stages * microbatches > MOST:
        raise ScheduleError(
            f"{name}: {stages} stages and {microbatches} microbatches make more than "
            f"{MOST:,} forwards. Take fewer."
        )
    if microbatches < named.least_per_group * groups:
        raise ScheduleError(
            f"{name} is defined from {named.least_per_group} microbatches per group: {groups} "
            f"groups need {named.least_per_group * groups}, not {microbatches}. Take more "
            "microbatches, or zb-v, which has no such limit."
        )
    if named.chunks is None:
        return named.build(groups, microbatches, stages)
    return named.build(groups, microbatches)


def check_name(name: Any) -> str:
    """The name as it is listed, or an error that lists them all."""
    plain = name.lower().strip() if isinstance(name, str) else ""
    if plain not in NAMED:
        auto = " For the best one found use Auto(...)." if plain == "auto" else ""
        raise ScheduleError(
            f"no schedule is called {short(name)}.{near(str(name).lower(), NAMED)} There are "
            f"{', '.join(NAMED)}.{auto}"
        )
    return plain


def fits(name: str, groups: int, microbatches: int, stages: int | None) -> bool:
    """Whether a named schedule is defined for these sizes."""
    named = NAMED[name]
    whole = stages is None or stages % groups == 0
    right = stages is None or named.chunks in (None, stages // groups)
    return whole and right and microbatches >= named.least_per_group * groups


def _check_stages(name: str, named: Named, groups: int, stages: int) -> None:
    if named.chunks is not None and stages != named.chunks * groups:
        others = [other for other in NAMED if fits(other, groups, 10**9, stages)]
        hint = f" For {stages} stages: {', '.join(others)}." if others else ""
        raise ScheduleError(
            f"{name} has {named.chunks} stage(s) per group: {groups} groups make "
            f"{named.chunks * groups} stages, not {stages}.{hint}"
        )
    if stages % groups:
        raise ScheduleError(
            f"{name}: {stages} stages cannot be dealt out evenly to {groups} groups. Take "
            f"{stages // groups * groups or groups} or {(stages // groups + 1) * groups} stages."
        )
