"""What tasks cost, in any unit of time: the same for all stages, or stage by stage."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import ScheduleError, near, short
from meshwright.mpmd.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of one microbatch through one group's share of the model.

    `F` is the forward, `B` the gradient of the input, `W` the gradient of the weights; the whole
    backward (`BW`) costs both unless it is given, and a forward overlapped with a whole backward
    (`FB`) costs the sum of the two.

    >>> Costs.parse("F=1, B=1.5, W=0.5").BW
    2.0
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    BW: float = None  # type: ignore[assignment]  # filled in below
    FB: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for field in ("F", "B", "W", "BW", "FB"):
            if getattr(self, field) is None:
                default = self.B + self.W if field == "BW" else self.F + self.BW
                object.__setattr__(self, field, default)
            object.__setattr__(self, field, time(getattr(self, field), f"cost {field}"))
        if self.F <= 0 or self.BW <= 0:
            raise ScheduleError(
                f"cost F={self.F:g}, BW={self.BW:g}: a forward and a whole backward take time."
            )

    @classmethod
    def parse(cls, costs: Any) -> Costs:
        """From `"F=1,B=1,W=1"` or a mapping; what is not said costs 1."""
        if isinstance(costs, Costs):
            return costs
        if isinstance(costs, str):
            pairs = [_pair(part) for part in costs.split(",") if part.strip()]
            if twice := [kind for kind, n in Counter(k for k, _ in pairs).items() if n > 1]:
                raise ScheduleError(f"costs: {twice[0]} is given twice in {short(costs)}.")
            costs = dict(pairs)
        if not isinstance(costs, Mapping):
            raise ScheduleError(f"costs are 'F=1,B=1,W=1', a mapping or Costs, not {short(costs)}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for kind in costs:
            if kind not in known:
                raise ScheduleError(
                    f"costs: {short(kind)} is not one of {known}.{near(str(kind), known)}"
                )
        return cls(**costs)

    def divided(self, parts: int) -> Costs:
        """The cost of one of `parts` equal parts."""
        return Costs(*(getattr(self, f.name) / parts for f in dataclasses.fields(self)))


AnyCosts = Costs | str | Mapping[str, float] | Sequence[Any]


def per_stage(costs: AnyCosts, schedule: Schedule) -> tuple[Costs, ...]:
    """The costs of every stage: as given, or each group's share cut evenly over its stages."""
    if isinstance(costs, (Costs, str, Mapping)):
        one = Costs.parse(costs)
        return tuple(one.divided(len(schedule.stages_of[g])) for g in schedule.group_of)
    if not isinstance(costs, Sequence):
        raise ScheduleError(f"costs are Costs, or a list with one per stage, not {short(costs)}.")
    if len(costs) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name}: {len(costs)} costs for {schedule.stages} stages. Give one per "
            "stage, or one for all."
        )
    return tuple(Costs.parse(one) for one in costs)


def time(value: Any, what: str) -> float:
    """A finite, non-negative number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        number = math.nan
    else:
        number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ScheduleError(f"{what}: a time is a number from 0, not {short(value)}.")
    return number


def _pair(part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ScheduleError(
            f"costs: {short(part.strip())} is not kind=time. Write e.g. 'F=1,B=1,W=1'."
        ) from None
