"""`explain(...)`: what a mesh means on its hardware; what a partitioning costs, leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._html import html_table
from meshwright._text import amount, table
from meshwright.errors import MeshError
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import explain_mesh
from meshwright.partitioning.decide import PartitionOptions, settle
from meshwright.placement.placement import Placement
from meshwright.spec.mesh_spec import SpecLike
from meshwright.trees.specs import AnyMesh, entry_axes, mesh_axes, plain_specs, shard_shape, ways
from meshwright.trees.walk import Leaf, bits, walk

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One array: where it stands, how it is cut, and what a device holds of it."""

    path: str
    text: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    spec: PartitionSpec
    bytes: int
    device_bytes: int
    copies: int

    @property
    def replicated(self) -> bool:
        """Whether every device of the mesh holds all of it."""
        return self.local == self.shape


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """A tree on a mesh. Prints itself as a table; HTML in a notebook; `to_json()` for scripts.

    `device_bytes` is what every device holds: pieces are equal, so no device holds more.
    """

    axes: dict[str, int]
    rows: tuple[LeafRow, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        return sum(row.device_bytes for row in self.rows)

    @property
    def replicated(self) -> tuple[LeafRow, ...]:
        """Arrays that every device holds whole, largest first."""
        whole = [row for row in self.rows if row.replicated]
        return tuple(sorted(whole, key=lambda row: (-row.bytes, row.path)))

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        return as_json(self)


@overload
def explain(
    what: Mesh | AbstractMesh | SpecLike | Placement,
    /,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
) -> Placement: ...


@overload
def explain(
    what: Any, /, mesh: AnyMesh, specs: Any = None, **options: Unpack[PartitionOptions]
) -> PartitionReport: ...


def explain(what: Any, /, mesh: Any = None, specs: Any = None, **options: Any) -> Any:
    """Show what a mesh means on its hardware, or how a tree of arrays is cut over a mesh.

    `explain(mesh)` returns a `Placement`. Per axis: the links it uses, their bandwidth, modelled
    times, what crosses the slow network. It takes any `jax.sharding.Mesh`, and an `AbstractMesh`
    that `mesh` made for named hardware. A spec, or an `AbstractMesh` from elsewhere, has no
    devices: say `on` what hardware, and how many `slices` of it. `intensity` replaces how much
    traffic an axis is expected to have, by its name.

    `explain(tree, mesh)` returns a `PartitionReport`: what the given `specs`, or
    `partition(tree, mesh, **options)`, make of the tree. With neither, arrays (and shapes) that
    are on this mesh already are shown as they are, the others as `partition` would cut them.

    Both print themselves, draw themselves in a notebook, and have `to_json()`.

    >>> import jax, meshwright as mw
    >>> print(mw.explain("fsdp:-1, tp:4", on="v5e:16x16").axes[1].cost.shape)
    ring
    >>> tree = {"w": jax.ShapeDtypeStruct((1024, 4096), "float32")}
    >>> print(mw.explain(tree, mw.mesh("fsdp:4, tp:2")))
    1 array on fsdp:4, tp:2 (8 devices): 16 MiB, 2 MiB on each device
    path  array                    bytes  on a device  copies
    w     f32[1024@fsdp,4096@tp]  16 MiB        2 MiB       1
    """
    if mesh is not None:
        return explain_tree(what, mesh, specs, **options)
    if specs is not None or not options.keys() <= {"on", "slices", "intensity"}:
        raise MeshError("explain: to show how a tree is cut, give its mesh: explain(tree, mesh).")
    return explain_mesh(what, **options)


def explain_tree(
    tree: Any, mesh: AnyMesh, specs: Any = None, **options: Unpack[PartitionOptions]
) -> PartitionReport:
    """What the given specs, or `partition(tree, mesh, **options)`, make of a tree.

    With neither specs nor options, arrays (and shapes) that lie on this mesh already are shown as
    they lie, and the others as `partition` would cut them.

    """
    found = walk(tree)
    sizes = mesh_axes(mesh)
    per_leaf = settle("explain", found, tree, mesh, plain_specs(specs, mesh), options)
    if specs is None and not options:
        per_leaf = [
            _lies(leaf, mesh, spec) for leaf, spec in zip(found.arrays, per_leaf, strict=True)
        ]
    return PartitionReport(
        sizes,
        tuple(_row(leaf, spec, sizes) for leaf, spec in zip(found.arrays, per_leaf, strict=True)),
    )


def _lies(leaf: Leaf, mesh: AnyMesh, otherwise: PartitionSpec) -> PartitionSpec:
    """How an array lies on the mesh; `otherwise` if it is not there."""
    sharding = getattr(leaf.value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _same_mesh(sharding.mesh, mesh):
        return otherwise
    return sharding.spec


@functools.lru_cache(maxsize=64)
def _same_mesh(one: AnyMesh, other: AnyMesh) -> bool:
    """The same axes, over the same devices where both have devices."""
    if tuple(one.shape.items()) != tuple(other.shape.items()):
        return False
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return bool((one.devices == other.devices).all())
    return True


def _row(leaf: Leaf, spec: PartitionSpec, sizes: dict[str, int]) -> LeafRow:
    local = shard_shape(leaf.shape, spec, sizes)
    held = math.ceil(math.prod(local) * bits(leaf.dtype) / 8)
    cuts = math.prod(ways(entry, sizes) for entry in spec)
    return LeafRow(
        leaf.path,
        typed(leaf.shape, leaf.dtype, spec),
        leaf.shape,
        local,
        spec,
        leaf.bytes,
        held,
        math.prod(sizes.values()) // cuts,
    )


def typed(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> str:
    """An array in JAX's own notation.

    >>> typed((8, 8), "float32", PartitionSpec("x"))
    'f32[8@x,8]'
    """
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    dims = []
    for side, entry in zip(shape, entries, strict=True):
        axes = entry_axes(entry)
        joined = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
        dims.append(f"{side}@{joined}" if axes else str(side))
    return f"{short_dtype(dtype)}[{','.join(dims)}]"


def short_dtype(dtype: Any) -> str:
    """
    >>> short_dtype("bfloat16"), short_dtype("uint8")
    ('bf16', 'u8')
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    name = str(np.dtype(dtype).name)
    head = name.rstrip("0123456789")
    return _SHORT[head] + name[len(head) :] if head in _SHORT else name


# A partitioning as text, HTML and JSON.


REPORT_HEADING = ["path", "array", "bytes", "on a device", "copies"]
REPORT_RIGHT = [False, False, True, True, True]
MOST_ROWS = 200
_DRAWN = 6


def as_text(report: PartitionReport) -> str:
    shown = report.rows[:MOST_ROWS]
    lines = [report_headline(report), table([REPORT_HEADING, *map(_cells, shown)], REPORT_RIGHT)]
    if len(shown) < len(report.rows):
        lines.append(f"... and {len(report.rows) - len(shown):,} more arrays")
    return "\n".join([*lines, *_whole(report)])


def report_headline(report: PartitionReport) -> str:
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
    rows = html_table([REPORT_HEADING, *map(_cells, shown)], REPORT_RIGHT)
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in _whole(report))
    return (
        '<div style="font-family:system-ui,sans-serif">'
        f"<b>{html.escape(report_headline(report))}</b>"
        f'<div style="overflow-x:auto">{rows}</div>{notes}'
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


# A drawing of how an array is cut: one panel per piece of its leading dims.


_LONGEST, _SHORTEST, _GAP = 128, 40, 8
_MOST_LINES, _MOST_PANELS = 16, 8


def drawing(shape: Sequence[int], local: Sequence[int]) -> str:
    """The array with its cuts as an SVG; the first device's piece is filled.

    The last two dims are a rectangle, the one before them a row of panels, the one before that a
    column of rows. At most 16 cuts a side and 8 panels are drawn; the line below has the numbers.
    """
    counts = [max(1, side // max(1, piece)) for side, piece in zip(shape, local, strict=True)]
    sides = [1] * (4 - len(shape)) + list(shape)[-4:]
    cuts = [1] * (4 - len(counts)) + counts[-4:]
    panels = [min(cut, _MOST_PANELS) for cut in cuts[:2]]
    lines = [min(cut, _MOST_LINES) for cut in cuts[2:]]
    height, width = _box(sides[2], sides[3])
    parts = [
        _panel(column * (width + _GAP) + 1, row * (height + _GAP) + 1, width, height, lines, not at)
        for at, (row, column) in enumerate(itertools.product(range(panels[0]), range(panels[1])))
    ]
    across, down = panels[1] * (width + _GAP), panels[0] * (height + _GAP)
    words = [
        f"{side} in {cut}" if cut > 1 else f"{side}"
        for side, cut in zip(shape, counts, strict=True)
    ]
    return (
        f'<svg viewBox="0 0 {across} {down}" width="{across}" style="max-width:100%" '
        f'xmlns="http://www.w3.org/2000/svg" role="img">{"".join(parts)}</svg>'
        f"<div>{' x '.join(words)}</div>"
    )


def _box(rows: int, columns: int) -> tuple[int, int]:
    """Sides that keep the array's proportions within reason."""
    longest = max(rows, columns, 1)
    return (
        max(_SHORTEST, round(_LONGEST * rows / longest)),
        max(_SHORTEST, round(_LONGEST * columns / longest)),
    )


def _panel(x: int, y: int, width: int, height: int, lines: Sequence[int], first: bool) -> str:
    rows, columns = lines
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#eef" stroke="#446"/>']
    if first:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width / columns:.1f}" height="{height / rows:.1f}" '
            'fill="#e8a33d"/>'
        )
    for line in range(1, columns):
        parts.append(f'<path d="M{x + width * line / columns:.1f} {y}v{height}" stroke="#446"/>')
    for line in range(1, rows):
        parts.append(f'<path d="M{x} {y + height * line / rows:.1f}h{width}" stroke="#446"/>')
    return "".join(parts)
