"""Which steps of a route one process does, and with which programs. Planned once per route."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshwright.mpmd.transfers.items import Device, process_of
from meshwright.mpmd.transfers.programs import Program, cutter, joiner
from meshwright.mpmd.transfers.routes import Route
from meshwright.mpmd.transfers.steps import Plan, Step
from meshwright.mpmd.transfers.work import Copies, Run, Work
from meshwright.partitioning.moving.boxes import Box

Maker = Callable[[Plan, Sequence[Step], Mapping[int, int]], Program]


def work(route: Route, process: int, whole: frozenset[int]) -> Work:
    """What `process` does; the items in `whole` are left to JAX."""
    plan = _part(route.plan, process, whole)
    lots = plan.lots
    inside = [step for step in plan.send if plan.pair(step) == (process, process)]
    arrays = {
        number: tuple(
            route.lot(number, device) for device in item.wanted if process_of(device) == process
        )
        for number, item in enumerate(route.items)
        if number not in whole and item.bytes
    }
    arrays = {number: some for number, some in arrays.items() if some}
    came = {step.made for step in (*plan.send, *plan.join, *plan.copy)}
    used = {lot for step in (*plan.join, *plan.copy) for lot in step.of}
    used |= {lot for some in arrays.values() for lot in some}
    stay = tuple(sorted(used - came))
    early = (*plan.cut, *plan.gather, *plan.pack)
    given = {step.of[0] for step in plan.send if process_of(lots[step.of[0]].device) == process}
    needed = {lot for step in early for lot in step.of} | given | set(stay)
    return Work(
        route,
        _shards(route, process, sorted(needed - {step.made for step in early})),
        _runs(plan, plan.cut, _cutter),
        _copies(plan, plan.gather),
        _runs(plan, plan.pack, _joiner),
        _copies(plan, inside),
        stay,
        _runs(plan, plan.join, _joiner),
        _copies(plan, plan.copy),
        arrays,
    )


def _part(plan: Plan, process: int, whole: frozenset[int]) -> Plan:
    """The steps in which a process takes part."""

    def some(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            step
            for step in steps
            if process in plan.pair(step) and plan.lots[step.made].item not in whole
        )

    return Plan(
        plan.lots,
        some(plan.cut),
        some(plan.gather),
        some(plan.pack),
        some(plan.send),
        some(plan.join),
        some(plan.copy),
    )


def _shards(
    route: Route, process: int, lots: Sequence[int]
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for number in lots:
        lot = route.plan.lots[number]
        near = [device for device in route.items[lot.item].held if process_of(device) == process]
        found.setdefault(lot.item, []).append((near.index(lot.device), number))
    return {item: tuple(places) for item, places in found.items()}


def _runs(plan: Plan, steps: Sequence[Step], make: Maker) -> tuple[Run, ...]:
    """A program per device, for all steps on it."""
    found: dict[Device, list[Step]] = {}
    for step in steps:
        found.setdefault(plan.lots[step.made].device, []).append(step)
    runs = []
    for some in found.values():
        takes = tuple(dict.fromkeys(lot for step in some for lot in step.of))
        slots = {lot: slot for slot, lot in enumerate(takes)}
        runs.append(Run(takes, tuple(step.made for step in some), make(plan, some, slots)))
    return tuple(runs)


def _cutter(plan: Plan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    lots = plan.lots
    cuts = [
        (slots[step.of[0]], _within(lots[step.made].box, lots[step.of[0]].box)) for step in steps
    ]
    return cutter(lots[steps[0].made].device, tuple(cuts))


def _joiner(plan: Plan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    lots = plan.lots
    joins = [tuple((slots[lot], lots[lot].box) for lot in step.of) for step in steps]
    return joiner(lots[steps[0].made].device, tuple(joins))


def _within(part: Box, outer: Box) -> Box:
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(part, outer, strict=True)
    )


def _copies(plan: Plan, steps: Sequence[Step]) -> Copies:
    return Copies(
        tuple(step.of[0] for step in steps),
        tuple(step.made for step in steps),
        tuple(plan.lots[step.made].device for step in steps),
    )
