"""A route as text, HTML and JSON."""

from __future__ import annotations

import collections
import html
from typing import Any

from jax.sharding import PartitionSpec

from meshwright._tables import html_table, table
from meshwright.mpmd.transfers.items import Device, Item
from meshwright.mpmd.transfers.routes import Route
from meshwright.partitioning.moving.boxes import Box, box_shape
from meshwright.partitioning.report import typed
from meshwright.partitioning.show import amount

HEADING = ["path", "array", "from", "to", "pieces"]
RIGHT = [False, False, True, True, True]
MOST_ROWS = 50
_MOST_PAIRS = 8
_WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]


def as_text(route: Route) -> str:
    shown = _rows(route)
    left = len(route.items) - (len(shown) - 1)
    more = [f"... and {left:,} more arrays"] if left else []
    return "\n".join([headline(route), table(shown, RIGHT), *more, *_pairs(route)])


def headline(route: Route) -> str:
    """One line: how much, from and to how many devices."""
    count, pieces = len(route.items), len(route.plan.send)
    ends = [
        len({device for item in route.items for device in getattr(item, end)})
        for end in ("held", "wanted")
    ]
    processes = sorted(route.senders | route.receivers)
    inside = f", inside process {processes[0]}" if len(processes) == 1 else ""
    joined = ", joined on arrival" if route.joins_on_arrival else ""
    return (
        f"{count:,} array{'' if count == 1 else 's'}, {amount(route.bytes)}: {ends[0]:,} "
        f"device{'' if ends[0] == 1 else 's'} to {ends[1]:,}, "
        f"{pieces:,} piece{'' if pieces == 1 else 's'}{inside}{joined}"
    )


def _rows(route: Route) -> list[list[str]]:
    count = _pieces(route)
    rows = [
        [item.where, _typed(item), _end(item.held), _end(item.wanted), f"{count[number]:,}"]
        for number, item in enumerate(route.items[:MOST_ROWS])
    ]
    return [HEADING, *rows]


def _pieces(route: Route) -> collections.Counter[int]:
    """How many pieces of each array are sent from device to device."""
    lots = route.plan.lots
    return collections.Counter(lots[step.made].item for step in route.plan.send)


def _typed(item: Item) -> str:
    return typed(item.shape, item.dtype, _WHOLE)


def _end(where: dict[Device, Box]) -> str:
    box = next(iter(where.values()))
    return f"{len(where):,} of [{','.join(map(str, box_shape(box)))}]"


def _pairs(route: Route) -> list[str]:
    """Who sends how much to whom, where more than one process takes part."""
    across = {pair: size for pair, size in route.traffic.items() if pair[0] != pair[1]}
    heavy = sorted(across, key=lambda pair: (-across[pair], pair))
    lines = [
        f"process {sender} to {receiver}: {amount(across[sender, receiver])}"
        for sender, receiver in heavy[:_MOST_PAIRS]
    ]
    left = len(heavy) - len(lines)
    return [*lines, f"... and {left:,} more pairs of processes"] if left else lines


def as_html(route: Route) -> str:
    notes = "".join(f"<br>{html.escape(line)}" for line in _pairs(route))
    return (
        f'<div style="font-family:system-ui,sans-serif"><b>{html.escape(headline(route))}</b>'
        f'<div style="overflow-x:auto">{html_table(_rows(route), RIGHT)}</div>{notes}</div>'
    )


def as_json(route: Route) -> dict[str, Any]:
    count = _pieces(route)
    return {
        "name": route.name,
        "bytes": route.bytes,
        "pieces": len(route.plan.send),
        "copies": len(route.plan.gather) + len(route.plan.copy),
        "joins_on_arrival": route.joins_on_arrival,
        "senders": sorted(route.senders),
        "receivers": sorted(route.receivers),
        "traffic": [
            {"from": sender, "to": receiver, "bytes": size}
            for (sender, receiver), size in sorted(route.traffic.items())
        ],
        "arrays": [
            {
                "path": item.where,
                "shape": list(item.shape),
                "dtype": item.dtype.name,
                "bytes": item.bytes,
                "from_devices": [device.id for device in item.held],
                "to_devices": [device.id for device in item.wanted],
                "pieces": count[number],
            }
            for number, item in enumerate(route.items)
        ],
    }
