"""Arrays that need no cutting: whose shards travel as they are, in an order that JAX keeps."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from meshwright.mpmd.transfers.items import Device, Item, process_of
from meshwright.mpmd.transfers.planning import by_process
from meshwright.mpmd.transfers.routes import Route

Pairs = list[tuple[Device, Device]]  # giver, taker


def whole_here(route: Route) -> frozenset[int]:
    """Those that `jax.device_put` copies on the devices, in one call.

    Between equal sets of devices it would run a program over all of them.
    """
    return frozenset(
        number
        for number, item, pairs in _untouched(route)
        if item.held.keys() != item.wanted.keys()
        and _in_order(pairs, tuple(item.held), tuple(item.wanted))
    )


def whole_pulled(route: Route) -> frozenset[int]:
    """Those of which each process gets, shard for shard, all that one other process holds."""
    return frozenset(
        number for number, item, pairs in _untouched(route) if _process_by_process(item, pairs)
    )


def whole_put(route: Route) -> frozenset[int]:
    """Those that `jax.device_put` takes across processes: one split, on devices of others."""
    return frozenset(
        number
        for number, item, pairs in _untouched(route)
        if not {*map(process_of, item.held)} & {*map(process_of, item.wanted)}
        and _in_order(pairs, tuple(item.held), tuple(item.wanted))
        and item.splits_alike
    )


def _untouched(route: Route) -> Iterator[tuple[int, Item, Pairs]]:
    """Arrays that are only sent, and from which device to which their shards go."""
    plan = route.plan
    busy = (*plan.cut, *plan.gather, *plan.pack, *plan.join, *plan.copy)
    touched = {plan.lots[step.made].item for step in busy}
    found: dict[int, Pairs] = collections.defaultdict(list)
    for step in plan.send:
        giver, taker = plan.lots[step.of[0]], plan.lots[step.made]
        if taker.item not in touched:
            found[taker.item].append((giver.device, taker.device))
    for number, pairs in found.items():
        yield number, route.items[number], pairs


def _process_by_process(item: Item, pairs: Pairs) -> bool:
    between: dict[tuple[int, int], Pairs] = collections.defaultdict(list)
    for giver, taker in pairs:
        between[process_of(giver), process_of(taker)].append((giver, taker))
    held, wanted = by_process(item.held), by_process(item.wanted)
    return sorted(receiver for _, receiver in between) == sorted(wanted) and all(
        sender != receiver and _in_order(some, held[sender], wanted[receiver])
        for (sender, receiver), some in between.items()
    )


def _in_order(pairs: Pairs, givers: Sequence[Device], takers: Sequence[Device]) -> bool:
    """Whether device i of the givers gives to device i of the takers, all of them."""
    return len(pairs) == len(givers) == len(takers) and {
        taker: giver for giver, taker in pairs
    } == dict(zip(takers, givers, strict=True))
