"""`PlanMaker`: a `Plan` of what a search has found; which to compile, and which is the best."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright._progress import Pulse
from meshwright._text import duration
from meshwright.hardware.topology import Topology
from meshwright.placement.placement import Placement
from meshwright.planning.dim_groups import DimGroups
from meshwright.planning.group_names import batch_kinds, data_values
from meshwright.planning.plan_costs import PlanCosts
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.plan_search import Candidate, axis_names, named_intensity, speeds_on
from meshwright.planning.step_plan import UNASKED, Alternative, Plan, choices, mesh_text
from meshwright.planning.traced_step import TracedStep
from meshwright.rehearsal.collectives.types import IMPLICIT_RESHARDING
from meshwright.rehearsal.result import Rehearsal
from meshwright.spec.mesh_spec import MeshSpec

_SAME_SIZE = 2.0  # times: exchanges of about one size
_WORTH_A_NOTE = 0.02  # part of the time that a plan which was not compiled is predicted to save
_NEARLY = 1.3  # times the best plan's objective: worth rehearsing on another mesh


@dataclasses.dataclass(frozen=True)
class PlanMaker:
    """Makes a `Plan` of a candidate of the search; `placed`: the user's own mesh."""

    name: str
    hardware: Topology
    devices: Any
    step: TracedStep
    costs: PlanCosts
    groups: DimGroups
    kind_names: tuple[str, ...]
    scatters: bool
    fixed: MeshSpec | None
    limit: float
    placed: Placement | None = None

    def axis_names(self, candidate: Candidate) -> tuple[str, ...]:
        if self.fixed is not None:
            return tuple(self.fixed.names)
        data = data_values(self.step, self.costs.program)
        batch = frozenset(batch_kinds(self.costs.program, self.groups, data))
        experts = {n for n, name in enumerate(self.kind_names) if "expert" in name}
        # A table that is cut along its rows first does not make an axis another one.
        tables = {n for n, name in enumerate(self.kind_names) if name == "vocab"}
        lists = tuple(
            order[1:] if order and order[0] in tables and batch.intersection(order) else order
            for order in candidate.lists
        )
        return axis_names(lists, batch, frozenset(experts), self.groups.queries)

    def cuts_queries(self, candidate: Candidate) -> bool:
        """Whether it is context parallel: compilers do not keep to every such plan."""
        return any(kind in self.groups.queries for order in candidate.lists for kind in order)

    def make(self, candidate: Candidate) -> Plan:
        names = self.axis_names(candidate)
        costs = self.costs.copy().on(
            speeds_on(
                candidate.sizes, self.placed or self.hardware, candidate.intensity, self.scatters
            )
        )
        spec = MeshSpec.parse(list(zip(names, candidate.sizes, strict=True)) or [("dp", 1)])
        return Plan(
            name=self.name,
            topology=self.hardware,
            spec=spec,
            axes=choices(costs, candidate.lists, names, self.kind_names),
            predicted=candidate.totals,
            limit=self.limit,
            alternatives=(),
            rehearsal=None,
            unknown={},
            tried=0,
            seconds=0.0,
            groups=self.kind_names,
            step=self.step,
            layouts=Layouts(
                costs, candidate.lists, names, data_values(self.step, self.costs.program)
            ),
            intensity=named_intensity(names, candidate.sizes, candidate.intensity),
            devices=self.devices,
        )

    def alternatives(
        self, found: Sequence[Candidate], checked: Mapping[int, Checked], best: int
    ) -> tuple[Alternative, ...]:
        """All plans that the search kept, the best first; those that were rehearsed say so."""
        rows = []
        for number, candidate in enumerate(found):
            check = checked.get(number)
            rehearsal = check and check.rehearsal
            rows.append(
                Alternative(
                    mesh_text(candidate, self.axis_names(candidate)),
                    candidate.sizes,
                    candidate.lists,
                    candidate.totals,
                    rehearsal.fits if rehearsal else candidate.totals.bytes <= self.costs.limit,
                    rehearsal.time.total if rehearsal and rehearsal.time else None,
                    rehearsal.memory.peak if rehearsal else None,
                    number == best,
                    check.unasked if check else 0.0,
                )
            )
        return tuple(rows)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A plan's rehearsal; `unasked`: see `Alternative`, 0 where it does not matter."""

    rehearsal: Rehearsal
    unasked: float = 0.0


def rehearsed(
    maker: PlanMaker, found: Sequence[Candidate], check: int, compiler: str, pulse: Pulse
) -> dict[int, Checked]:
    """Compile the best plans that differ; by their place in `found`."""
    options: dict[str, Any] = {"compiler": compiler, "progress": False}
    if compiler == "vendor" and maker.hardware.chip.family == "tpu":
        options["codegen"] = False
    checked: dict[int, Checked] = {}
    for number, candidate in enumerate(worth_checking(maker, found, check)):
        pulse.now(f"rehearsing plan {number + 1} of {check}")
        plan = maker.make(candidate)
        rehearsal = plan.rehearse(**options)
        unasked = unasked_part(plan, rehearsal) if maker.cuts_queries(candidate) else 0.0
        checked[found.index(candidate)] = Checked(rehearsal, unasked)
    return checked


# In: a plan and what its compiler made of it. Out: what part of the time is for exchanges that
# neither the step nor the plan asks for. An exchange is asked for if the plan implies one of its
# kind, over one of its axes and of about its size; as many of them as the plan implies. Example:
# labels that are gathered where the logits are cut by words.
def unasked_part(plan: Plan, rehearsal: Rehearsal) -> float:
    """Return the part of a compiled step's time for resharding that its plan does not predict."""
    implied: dict[tuple[str, str], list[tuple[float, int]]] = collections.defaultdict(list)
    for exchange, _, times in plan.exchanges():
        implied[exchange.kind, plan.axes[exchange.axis].name].append((exchange.bytes, times))
    seconds = 0.0
    for entry in rehearsal.collectives or ():
        if entry.cause != IMPLICIT_RESHARDING:
            continue
        left = entry.times.count
        for axis in entry.axes or ():
            rest = []
            for size, times in implied[entry.kind, axis.name]:
                alike = 1 / _SAME_SIZE <= entry.bytes / max(1.0, size) <= _SAME_SIZE
                used = min(left, times) if alike else 0
                left -= used
                rest.append((size, times - used))
            implied[entry.kind, axis.name] = rest
        seconds += entry.seconds * left
    return seconds / rehearsal.time.total if rehearsal.time else 0.0


def worth_checking(maker: PlanMaker, found: Sequence[Candidate], check: int) -> list[Candidate]:
    """The best plans that differ; with room for two, one of them cuts queries and one does not."""
    different = _different(maker, found)
    chosen = different[:check]
    if chosen and all(map(maker.cuts_queries, chosen)):
        others = [each for each in different[check:] if not maker.cuts_queries(each)]
        chosen[-1:] = others[:1] or chosen[-1:]
    elif len(chosen) > 1 and not any(map(maker.cuts_queries, chosen)):
        chosen[-1:] = [*filter(maker.cuts_queries, different[check:]), chosen[-1]][:1]
    return chosen


def _different(maker: PlanMaker, found: Sequence[Candidate]) -> list[Candidate]:
    """Drop candidates that are much like a better one: on its mesh, with the same last resorts.

    The end of a list says how arrays lie that have nothing else in it: `seq` is sequence
    parallelism, a width FSDP. Plans that agree in it are mostly the same, written otherwise. The
    second is on another mesh than the first, if one is nearly as good.
    """
    seen, result = set(), []
    for candidate in found:
        ends = tuple((order[:1], order[-1:]) for order in candidate.lists)
        key = (candidate.sizes, maker.cuts_queries(candidate), ends)
        if not any(candidate.lists):  # nothing is cut, whatever the mesh
            key = ((), False, ())
        if key not in seen and (candidate.sizes, candidate.totals) not in seen:
            seen |= {key, (candidate.sizes, candidate.totals)}
            result.append(candidate)
    for number, candidate in enumerate(result):
        near_best = candidate.objective < _NEARLY * result[0].objective
        if candidate.sizes != result[0].sizes and near_best:
            result.insert(1, result.pop(number))
            break
    return result


def best_plan(maker: PlanMaker, found: Sequence[Candidate], checked: Mapping[int, Checked]) -> int:
    """The number of the best candidate: of those rehearsed the fastest that fits.

    One that cuts queries only if it was rehearsed, and the compiler keeps to it; or if there is no
    other, since the user asked for it.
    """
    if not checked:
        plain = [n for n, each in enumerate(found) if not maker.cuts_queries(each)]
        usable = plain or list(range(len(found)))
        if all(found[number].totals.bytes > maker.costs.limit for number in usable):
            return min(usable, key=lambda number: found[number].totals.bytes)
        return usable[0]

    def rank(number: int) -> tuple[bool, bool, float]:
        check = checked[number]
        rehearsal, fits = check.rehearsal, check.rehearsal.fits
        seconds = rehearsal.time.total if rehearsal.time else 0.0
        return (
            check.unasked > UNASKED,
            not fits,
            seconds if fits else float(rehearsal.memory.peak),
        )

    return min(checked, key=rank)


def context_notes(
    maker: PlanMaker, found: Sequence[Candidate], checked: Mapping[int, Checked], best: int
) -> list[str]:
    """Say what a context parallel plan would bring, where none was compiled."""
    plans = [n for n, each in enumerate(found) if maker.cuts_queries(each)]
    if not plans or any(number in checked for number in plans):
        return []
    own, other = found[best], found[plans[0]]
    if best in plans:
        return ["Whether compilers keep to a context parallel plan shows a rehearsal: check=1."]
    less = 1 - other.totals.seconds / own.totals.seconds
    fits = own.totals.bytes > maker.costs.limit >= other.totals.bytes
    if less < _WORTH_A_NOTE and not fits:
        return []
    mesh = mesh_text(other, maker.axis_names(other))
    gain = f"{less:.0%} less" if less >= _WORTH_A_NOTE else "and to fit"
    return [
        f"A context parallel plan on {mesh} is predicted to take "
        f"{duration(other.totals.seconds)} a step, {gain}. Compilers do not keep to every such "
        "plan, so it is taken only once compiled: check=3 tries it."
    ]
