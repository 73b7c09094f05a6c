"""Groups as text, HTML and plain data."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from meshwright._tables import html_table, table
from meshwright.errors import listing
from meshwright.mpmd.groups.base import Groups
from meshwright.mpmd.groups.checks import axes_text

MOST_ROWS = 16
_HEADING = ["group", "mesh", "devices", "process"]
_RIGHT = [True, False, False, False]


def as_text(groups: Groups) -> str:
    return "\n".join([_headline(groups), table(_rows(groups), _RIGHT), *_more(groups)])


def as_html(groups: Groups) -> str:
    more = "".join(f"<p>{line}</p>" for line in _more(groups))
    return (
        f'<div style="font-family:system-ui,sans-serif"><b>{html.escape(_headline(groups))}</b>'
        f"{html_table(_rows(groups), _RIGHT)}{more}</div>"
    )


def as_json(groups: Groups) -> dict[str, Any]:
    axis = getattr(groups, "mpmd_axis_name", None)
    return {
        "mpmd_axis": None if axis is None else str(axis),
        "groups": [
            {
                "axes": {str(name): size for name, size in mesh.shape.items()},
                "devices": [int(device.id) for device in mesh.devices.flat],
                "processes": [] if groups.compile_only else _processes(mesh),
            }
            for mesh in groups.meshes
        ],
    }


def ranges(numbers: Iterable[int]) -> str:
    """
    >>> ranges([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10-11'
    """
    ordered = sorted(numbers)
    found = []
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        inside = [number for _, number in run]
        found.append(f"{inside[0]}-{inside[-1]}" if len(inside) > 1 else f"{inside[0]}")
    return listing(found, 6)


def _headline(groups: Groups) -> str:
    count = f"{groups.mpmd_dim} group{'s' if groups.mpmd_dim > 1 else ''}"
    whole = getattr(groups, "jax_mesh", None)
    if whole is None:
        return f"{count}, {len(groups.device_mpmd_idx):,} devices"
    axis = getattr(groups, "mpmd_axis_name", None)
    return f"{count} of {groups.meshes[0].size:,} devices, {axes_text(whole)} cut along {axis}"


def _rows(groups: Groups) -> list[list[str]]:
    rows = [
        [
            str(group),
            axes_text(mesh),
            ranges(device.id for device in mesh.devices.flat),
            "compile-only" if groups.compile_only else ranges(_processes(mesh)),
        ]
        for group, mesh in enumerate(groups.meshes[:MOST_ROWS])
    ]
    return [_HEADING, *rows]


def _more(groups: Groups) -> list[str]:
    left = groups.mpmd_dim - MOST_ROWS
    return [f"and {left} more groups"] if left > 0 else []


def _processes(mesh: Mesh) -> list[int]:
    return sorted({int(device.process_index) for device in mesh.devices.flat})
