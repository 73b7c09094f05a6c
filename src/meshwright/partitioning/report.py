"""`explain(...)`: what a mesh means on its hardware; what a partitioning costs, array by array."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._html import Html, badge, cut_picture, fold, grid, join, tag
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, plural
from meshwright.errors import MeshError, near
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import explain_mesh
from meshwright.partitioning.by_shape import is_table, kind_of, weight_axes
from meshwright.partitioning.decide import MIN_SHARD_BYTES, PartitionOptions, resolve_specs
from meshwright.placement.placement import Placement
from meshwright.spec.mesh_spec import MeshSpec, SpecLike
from meshwright.trees.specs import (
    AnyMesh,
    entry_axes,
    mesh_axes,
    shard_count,
    shard_shape,
    specs_on_mesh,
)
from meshwright.trees.walk import Leaf, bits, is_key, shown_path, walk

REPORT_HEADING = ["path", "array", "bytes", "on a device", "copies"]
REPORT_RIGHT = [False, False, True, True, True]
MOST_ROWS = 200
_MOST_DRAWN = 6
_MOST_NOTES = 3
# How JAX abbreviates dtypes in the types of arrays; other names are written out.
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


@overload
def explain(
    what: Mesh | AbstractMesh | SpecLike | Placement,
    /,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
    speeds: str | os.PathLike[str] | Calibration | None = None,
) -> Placement: ...


@overload
def explain(
    what: Any, /, mesh: AnyMesh, specs: Any = None, **options: Unpack[PartitionOptions]
) -> PartitionReport: ...


def explain(
    what: Any,
    /,
    mesh: Any = ...,
    specs: Any = None,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    **options: Unpack[PartitionOptions],
) -> Any:
    """Show what a mesh means on its hardware, or how a tree of arrays is cut over a mesh.

    `explain(mesh)` returns a `Placement`. Per axis: the links it uses, their bandwidth, modelled
    times, what crosses DCN. It takes any `jax.sharding.Mesh`, and an `AbstractMesh` that `mesh`
    made for named hardware. A spec, or an `AbstractMesh` from elsewhere, has no devices: say `on`
    what hardware, and how many `slices` of it. `intensity` replaces how much traffic an axis is
    expected to have, by its name. `speeds`, a file of `meshwright calibrate` or what `calibrate`
    returned, replaces the table's speeds; the result says whose it went by.

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
    # Not by `None`: a tree with `None` for its mesh is a mistake, which `explain_tree` names.
    if mesh is not ...:
        for option, value in {"on": on, "intensity": intensity, "speeds": speeds}.items():
            if value is not None:
                raise MeshError(f"explain: {option} goes with a mesh alone.", option=option)
        if isinstance(what, (Mesh, AbstractMesh)):
            raise MeshError(
                "explain: the first of two arguments is a mesh, where a tree of arrays is meant. "
                "Write explain(tree, mesh), or explain(mesh) for the mesh alone."
            )
        return explain_tree(what, mesh, specs, **options)
    about_trees = specs is not None or not options.keys().isdisjoint(
        PartitionOptions.__annotations__
    )
    if about_trees or (on is None and not _may_be_mesh(what) and bool(walk(what).arrays)):
        raise MeshError("explain: to show how a tree is sharded, give a mesh: explain(tree, mesh).")
    for option in options:
        hint = near(option, ("on", "slices", "intensity", "speeds"))
        raise MeshError(f"explain has no option {option!r}.{hint}", option=option)
    return explain_mesh(what, on=on, slices=slices, intensity=intensity, speeds=speeds)


def _may_be_mesh(what: Any) -> bool:
    return isinstance(what, (str, Mesh, AbstractMesh, Placement, MeshSpec))


@dataclasses.dataclass(frozen=True, repr=False)
class PartitionReport(Shown):
    """How a tree is cut over a mesh, array by array, and what a device holds of it.

    Prints itself as a table, draws itself in a notebook, and has `to_json()`. Shards are equal, so
    `device_bytes` is what every device holds.
    """

    axes: dict[str, int]
    rows: tuple[LeafRow, ...]

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.axes.values())

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of all arrays that one device holds."""
        return sum(row.device_bytes for row in self.rows)

    @property
    def replicated(self) -> tuple[LeafRow, ...]:
        """Replicated arrays, largest first."""
        whole = [row for row in self.rows if row.replicated]
        return tuple(sorted(whole, key=lambda row: (-row.bytes, row.path)))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values that `json.dumps` takes."""
        return {
            "mesh": self.axes,
            "devices": self.devices,
            "bytes": self.bytes,
            "device_bytes": self.device_bytes,
            "worst_device_bytes": self.device_bytes,
            "arrays": [row.to_json() for row in self.rows],
        }

    def _sheet(self) -> Sheet:
        rows = [row.cells for row in self.rows[:MOST_ROWS]]
        left = len(self.rows) - len(rows)
        left_out = f"... and {left:,} more arrays" if left else ""
        table = _TreeTable(REPORT_HEADING, rows, REPORT_RIGHT, left_out, self.rows[:MOST_ROWS])
        parts: list[str | Table | Html] = [table]
        if self.replicated and self.devices > 1:
            parts.append(_replicated_note(self.replicated))
        parts += [*_table_notes(self.rows), *_undivided_notes(self.rows, self.axes)]
        return Sheet(report_headline(self), [*parts, _drawings(self.rows)])


@dataclasses.dataclass(frozen=True, repr=False)
class LeafRow:
    """One array of a `PartitionReport`: how it is cut, and what a device holds of it.

    `text` is the array in JAX's notation, `local` the shape of a device's shard, and `copies` how
    many devices hold the same shard.
    """

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

    @property
    def marked(self) -> bool:
        """Whether it is marked as replicated: on several devices, and not a single number."""
        return self.replicated and self.copies > 1 and bool(self.shape)

    @property
    def cells(self) -> list[str]:
        """The row of the printed table."""
        held = amount(self.device_bytes)
        return [self.path, self.text, amount(self.bytes), held, f"{self.copies:,}"]

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data; sizes in bytes."""
        return {
            "path": self.path,
            "array": self.text,
            "shape": list(self.shape),
            "shard_shape": list(self.local),
            "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in self.spec],
            "bytes": self.bytes,
            "device_bytes": self.device_bytes,
            "copies": self.copies,
            "replicated": self.replicated,
        }

    def __repr__(self) -> str:
        return short_repr(self, f"{shown_path(self.path)}: {self.text}")


def explain_tree(
    tree: Any, mesh: AnyMesh, specs: Any = None, **options: Unpack[PartitionOptions]
) -> PartitionReport:
    """Report what the given specs, or `partition(tree, mesh, **options)`, make of a tree.

    With neither specs nor options, arrays (and shapes) that are on this mesh already are shown as
    they are, and the others as `partition` would cut them.
    """
    walked = walk(tree)
    sizes = mesh_axes(mesh)
    per_leaf = resolve_specs("explain", walked, tree, mesh, specs_on_mesh(specs, mesh), options)
    if specs is None and not options:
        per_leaf = [
            _spec_on_mesh(leaf, mesh, default=spec)
            for leaf, spec in zip(walked.arrays, per_leaf, strict=True)
        ]
    return PartitionReport(
        sizes,
        tuple(_row(leaf, spec, sizes) for leaf, spec in zip(walked.arrays, per_leaf, strict=True)),
    )


def _spec_on_mesh(leaf: Leaf, mesh: AnyMesh, default: PartitionSpec) -> PartitionSpec:
    """Return the spec of an array that is on the mesh already; otherwise `default`."""
    sharding = getattr(leaf.value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _same_mesh(sharding.mesh, mesh):
        return default
    return sharding.spec


# Cached, since comparing the devices of two meshes is asked for every array of a tree.
@functools.lru_cache(maxsize=64)
def _same_mesh(first: AnyMesh, second: AnyMesh) -> bool:
    """Whether two meshes have the same axes, over the same devices where both have devices."""
    if tuple(first.shape.items()) != tuple(second.shape.items()):
        return False
    if isinstance(first, Mesh) and isinstance(second, Mesh):
        return bool((first.devices == second.devices).all())
    return True


def _row(leaf: Leaf, spec: PartitionSpec, sizes: dict[str, int]) -> LeafRow:
    local = shard_shape(leaf.shape, spec, sizes)
    return LeafRow(
        leaf.path,
        array_type(leaf.shape, leaf.dtype, spec),
        leaf.shape,
        local,
        spec,
        leaf.bytes,
        math.ceil(math.prod(local) * bits(leaf.dtype) / 8),
        math.prod(sizes.values()) // math.prod(shard_count(entry, sizes) for entry in spec),
    )


def array_type(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> str:
    """Write the type of an array as JAX does, `jax.typeof` of explicit sharding: axes after `@`.

    >>> array_type((8, 8), "float32", PartitionSpec("x"))
    'f32[8@x,8]'
    """
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    dims = []
    for size, entry in zip(shape, entries, strict=True):
        axes = entry_axes(entry)
        joined = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
        dims.append(f"{size}@{joined}" if axes else str(size))
    return f"{short_dtype(dtype)}[{','.join(dims)}]"


def short_dtype(dtype: Any) -> str:
    """Abbreviate a dtype as JAX does.

    >>> short_dtype("bfloat16"), short_dtype("uint8")
    ('bf16', 'u8')
    """
    if is_key(dtype):
        return str(dtype)
    name = str(np.dtype(dtype).name)
    # Only names of letters and then digits: `float8_e4m3fn` keeps its name.
    head = name.rstrip("0123456789")
    return _SHORT[head] + name[len(head) :] if head in _SHORT else name


# The parts of a printed report.


def report_headline(report: PartitionReport) -> str:
    """Return mesh, number of devices and bytes in one line."""
    mesh = ", ".join(f"{name}:{size}" for name, size in report.axes.items())
    return (
        f"{plural(len(report.rows), 'array')} on {mesh} ({report.devices:,} devices): "
        f"{amount(report.bytes)}, {amount(report.device_bytes)} on each device"
    )


def _replicated_note(rows: Sequence[LeafRow]) -> str:
    """Return a line about the largest replicated arrays."""
    total = amount(sum(row.bytes for row in rows))
    largest = ", ".join(f"{row.path} {amount(row.bytes)}" for row in rows[:3])
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    return f"replicated: {total}, the largest {largest}{more}"


def _table_notes(rows: Sequence[LeafRow]) -> list[str]:
    """Say where the rows of a table of embeddings cannot be sharded: most of the speed is lost."""
    notes: dict[tuple[int, ...], str] = {}
    # Its moments have the same shape and longer paths: they are not named again.
    for row in sorted(rows, key=lambda row: len(row.path)):
        if is_table(row.shape, kind_of(row.path)) and row.local[0] == row.shape[0]:
            pieces = max(1, row.shape[1]) // max(1, row.local[1])
            if row.shape[0] % pieces:
                padded = -(-row.shape[0] // pieces) * pieces
                note = (
                    f"{row.path}: its {row.shape[0]:,} rows are not divisible, so its columns are "
                    f"sharded, and activations are exchanged. Pad it to {padded:,} rows."
                )
                notes.setdefault(row.shape, note)
    return list(notes.values())


def _undivided_notes(rows: Sequence[LeafRow], sizes: dict[str, int]) -> list[str]:
    """Say which large arrays are whole because no axis divides them, and what padding changes."""
    axes = {name: size for name, size, _ in weight_axes(sizes)}
    pieces = math.prod(axes.values())
    notes: dict[tuple[int, ...], str] = {}
    for row in sorted(rows, key=lambda row: (-row.bytes, len(row.path))):
        if not row.replicated or row.bytes < MIN_SHARD_BYTES or pieces == 1:
            continue
        # Of three dims or more the first may count layers, and is then whole whatever its size.
        dims = range(len(row.shape) > 2, len(row.shape))
        divided = {n for n, side in enumerate(row.shape) for s in axes.values() if not side % s}
        if not divided.isdisjoint(dims):
            continue
        dim = min(dims, key=lambda n: -row.shape[n] % pieces / row.shape[n])
        padded = row.shape[dim] + -row.shape[dim] % pieces
        which = f"{row.shape} but the first" if divided else f"{row.shape}"
        note = (
            f"{row.path}: {', '.join(f'{name}:{size}' for name, size in axes.items())} divide no "
            f"dim of {which}, so every device holds all of it. Pad dim {dim} to {padded:,} to cut "
            f"it in {pieces:,}."
        )
        notes.setdefault(row.shape, note)
    left = len(notes) - _MOST_NOTES
    more = [f"... and arrays of {plural(left, 'more shape')} that no axis divides"]
    return [*list(notes.values())[:_MOST_NOTES], *(more if left > 0 else [])]


@dataclasses.dataclass(frozen=True)
class _TreeTable(Table):
    """The table of a tree: a large one is folded by its branches in HTML, not as text."""

    arrays: Sequence[LeafRow] = ()

    def html(self) -> Html:
        more = tag("p", self.left_out, class_="note") if self.left_out else ""
        return join([folded_rows(self.arrays), more])


_MOST_UNFOLDED = 30  # arrays of a table; a larger one is folded by branches


def folded_rows(rows: Sequence[LeafRow]) -> Html:
    """The arrays as a table, or as one of each branch of the tree; replicated ones are marked."""
    branches = _branches(rows)
    if len(rows) <= _MOST_UNFOLDED or len(branches) < 2:
        return _rows_table("Arrays", rows)
    return join(
        fold(
            tag(
                "span",
                f"{branch}: {plural(len(inside), 'array')}, {amount(sum(r.bytes for r in inside))}"
                f", {amount(sum(r.device_bytes for r in inside))} on a device",
            ),
            _rows_table(branch, inside),
        )
        for branch, inside in branches.items()
    )


def _branches(rows: Sequence[LeafRow]) -> dict[str, list[LeafRow]]:
    """The arrays by the start of their paths, which is as short as tells several apart."""
    for depth in range(1, 6):
        branches: dict[str, list[LeafRow]] = {}
        for row in rows:
            branches.setdefault("/".join(row.path.split("/")[:depth]), []).append(row)
        if len(branches) > 2:
            break
    return branches


def _rows_table(label: str, rows: Iterable[LeafRow]) -> Html:
    cells = [
        [
            tag("code", shown_path(row.path), title=row.path),
            join([tag("code", row.text), *([" ", badge("replicated")] if row.marked else [])]),
            *row.cells[2:],
        ]
        for row in rows
    ]
    return grid(label, REPORT_HEADING, cells, REPORT_RIGHT, ["", "", "less", "", "less"])


def _drawings(rows: Sequence[LeafRow]) -> Html:
    """Draw the largest arrays; those of one type and spec look alike and are drawn once."""
    distinct: dict[str, LeafRow] = {}
    for row in sorted(rows, key=lambda row: (-row.bytes, row.path)):
        if row.shape and row.text not in distinct and len(distinct) < _MOST_DRAWN:
            distinct[row.text] = row
    figures = (
        tag(
            "figure",
            tag("figcaption", f"{row.path}: {row.text}"),
            cut_picture(row.shape, row.local),
        )
        for row in distinct.values()
    )
    return tag("div", *figures, class_="figures arrays")
