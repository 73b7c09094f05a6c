"""A partitioning as text, HTML and JSON."""

from __future__ import annotations

import html
from typing import Any

from meshwright._tables import html_table, table
from meshwright.partitioning.cuts import drawing
from meshwright.partitioning.report import LeafRow, PartitionReport

HEADING = ["path", "array", "bytes", "on a device", "copies"]
RIGHT = [False, False, True, True, True]
MOST_ROWS = 200
_DRAWN = 6


def as_text(report: PartitionReport) -> str:
    shown = report.rows[:MOST_ROWS]
    lines = [headline(report), table([HEADING, *map(_cells, shown)], RIGHT)]
    if len(shown) < len(report.rows):
        lines.append(f"... and {len(report.rows) - len(shown):,} more arrays")
    return "\n".join([*lines, *_whole(report)])


def headline(report: PartitionReport) -> str:
    count = len(report.rows)
    mesh = ", ".join(f"{name}:{size}" for name, size in report.axes.items())
    return (
        f"{count:,} array{'' if count == 1 else 's'} on {mesh} ({report.devices:,} devices): "
        f"{amount(report.bytes)}, {amount(report.device_bytes)} on each device"
    )


def _whole(report: PartitionReport) -> list[str]:
    """The largest arrays that every device holds whole."""
    if not report.replicated or report.devices == 1:
        return []
    held = sum(row.bytes for row in report.replicated)
    largest = ", ".join(f"{row.path} {amount(row.bytes)}" for row in report.replicated[:3])
    more = f" and {len(report.replicated) - 3:,} more" if len(report.replicated) > 3 else ""
    return [f"whole on every device: {amount(held)}, the largest {largest}{more}"]


def _cells(row: LeafRow) -> list[str]:
    return [row.path, row.text, amount(row.bytes), amount(row.device_bytes), f"{row.copies:,}"]


def as_html(report: PartitionReport) -> str:
    """The table, and drawings of how the largest arrays are cut."""
    shown = report.rows[:MOST_ROWS]
    rows = html_table([HEADING, *map(_cells, shown)], RIGHT)
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in _whole(report))
    return (
        '<div style="font-family:system-ui,sans-serif">'
        f'<b>{html.escape(headline(report))}</b><div style="overflow-x:auto">{rows}</div>{notes}'
        f'<div style="display:flex;flex-wrap:wrap;gap:24px">{_drawings(report)}</div></div>'
    )


def _drawings(report: PartitionReport) -> str:
    distinct: dict[str, LeafRow] = {}
    for row in sorted(report.rows, key=lambda row: (-row.bytes, row.path)):
        if row.shape and row.text not in distinct and len(distinct) < _DRAWN:
            distinct[row.text] = row
    return "".join(
        f"<figure style='margin:0'><figcaption>{html.escape(row.path)}: "
        f"{html.escape(row.text)}</figcaption>{drawing(row.shape, row.local)}</figure>"
        for row in distinct.values()
    )


def as_json(report: PartitionReport) -> dict[str, Any]:
    return {
        "mesh": report.axes,
        "devices": report.devices,
        "bytes": report.bytes,
        "device_bytes": report.device_bytes,
        "worst_device_bytes": report.device_bytes,
        "arrays": [
            {
                "path": row.path,
                "array": row.text,
                "shape": list(row.shape),
                "shard_shape": list(row.local),
                "spec": [list(e) if isinstance(e, tuple) else e for e in row.spec],
                "bytes": row.bytes,
                "device_bytes": row.device_bytes,
                "copies": row.copies,
                "replicated": row.replicated,
            }
            for row in report.rows
        ],
    }


def amount(size: float) -> str:
    """
    >>> amount(16 * 2**20), amount(1536), amount(-12)
    ('16 MiB', '1.5 KiB', '-12 B')
    """
    if size < 0:
        return f"-{amount(-size)}"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
