"""`ledger(program, placement)`: every collective of a program entered in the book."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.hlo.instructions import Instruction, Shape, integers
from meshwright.hlo.program import Program
from meshwright.placement.placement import AxisPlan, Placement
from meshwright.rehearsal.collectives.causes import Causes, named
from meshwright.rehearsal.collectives.costs import (
    Cost,
    grid_coords,
    group_cost,
    pairs_cost,
    plan_of,
)
from meshwright.rehearsal.collectives.find import Found, find
from meshwright.rehearsal.collectives.types import (
    AxisPart,
    Collective,
    Collectives,
    ShardingConflict,
    axes_crossed,
    axes_of,
)


def ledger(
    program: Program, placement: Placement, clashes: Sequence[ShardingConflict] = ()
) -> Collectives:
    """What a program moves between devices.

    `placement` is that of the mesh the program was compiled for (`mw.explain(mesh)`), `clashes`
    what `read_clashes` found in the compiler's standard error.
    """
    located = tuple(_located(clash, program) for clash in clashes)
    book = _Book(program, placement, Causes(program, located))
    return Collectives(tuple(book.entry(found) for found in find(program)), located)


def _located(clash: ShardingConflict, program: Program) -> ShardingConflict:
    """A clash with the source that the program gives for an operation of the same name."""
    if clash.source is not None or not clash.op_name:
        return clash
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.op_name == clash.op_name:
                return dataclasses.replace(clash, source=program.source(instruction))
    return clash


@dataclasses.dataclass(frozen=True)
class _Span:
    """Whom a collective joins."""

    axes: tuple[AxisPart, ...] | None
    sizes: tuple[int, ...]
    groups: int
    plan: AxisPlan | None
    pairs: np.ndarray | None = None


class _Book:
    def __init__(self, program: Program, placement: Placement, causes: Causes) -> None:
        self.program, self.placement, self.causes = program, placement, causes
        self.positions = Positions(placement, program.devices)
        self.names, self.sizes = placement.spec.names, placement.spec.sizes
        self.spans: dict[str, _Span] = {}

    def entry(self, found: Found) -> Collective:
        span = self.span(found)
        payload = (found.results,) if _counts_result(found.kind) else found.operands
        size = sum(shape.bytes for shape in payload)
        op_name, source = named(self.program, found)
        cost = self.cost(found.kind, size, span)
        cause = self.causes.of(found, op_name, span.axes, max(span.sizes))
        return Collective(
            found.kind,
            "+".join(dict.fromkeys(leaf.dtype for shape in payload for leaf in shape.leaves)),
            _written(payload),
            size,
            _moved(found.kind, size, span),
            span.axes,
            span.sizes,
            span.groups,
            cost.links,
            cost.seconds,
            self.program.run_count(found.instruction.computation),
            found.asynchronous,
            found.meanwhile,
            op_name,
            source,
            cause.name,
            cause.why,
            found.parts,
            cause.clash,
        )

    def cost(self, kind: str, size: int, span: _Span) -> Cost:
        if span.plan is not None:
            return group_cost(kind, size, span.plan, self.placement.topology)
        pairs = span.pairs if span.pairs is not None else np.empty((0, 2), np.int64)
        return pairs_cost(size, pairs, self.placement)

    def span(self, found: Found) -> _Span:
        """Whom it joins; collectives that say so in the same words join the same."""
        if found.transfer is not None:
            words = found.transfer.target
        elif found.kind == "collective-permute":
            words = found.instruction.attribute("source_target_pairs") or ""
        else:
            words = written_groups(found.instruction)
        if words not in self.spans:
            self.spans[words] = self.spanned(found, words)
        return self.spans[words]

    def spanned(self, found: Found, words: str) -> _Span:
        transfer, positions = found.transfer, self.positions
        if transfer is not None and transfer.between_slices:
            if found.kind == "collective-permute":
                return self.by_pairs(positions.of_device_ids(transfer.pairs))
            return self.by_groups([positions.of_device_ids(group) for group in transfer.groups])
        if found.kind == "collective-permute":
            return self.by_pairs(np.concatenate(positions.of(read_pairs(words))))
        groups = read_groups(words, self.program.devices)
        return self.by_groups([there for group in groups for there in positions.of(group)])

    def by_groups(self, groups: Sequence[np.ndarray]) -> _Span:
        axes = axes_of(groups, self.names, self.sizes)
        sizes = tuple(sorted({group.size for group in groups}))
        return _Span(axes, sizes, len(groups), plan_of(self.placement, groups, axes))

    def by_pairs(self, pairs: np.ndarray) -> _Span:
        axes = axes_crossed(pairs, self.names, self.sizes)
        size = int(np.prod([part.size for part in axes], dtype=np.int64))
        return _Span(axes, (size,), self.placement.positions.size // size, None, pairs)


def _counts_result(kind: str) -> bool:
    return kind in ("all-gather", "collective-broadcast")


def _moved(kind: str, size: int, span: _Span) -> int:
    """Bytes a device sends, the group at work as a ring."""
    members = max(span.sizes)
    if members == 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    once = size * (members - 1) // members
    return 2 * once if kind == "all-reduce" else once


def _written(payload: Sequence[Shape]) -> str:
    """The arrays in a few letters: `f32[8,8]`, `2 x f32[8,8]`, `f32[8,8] + 3 more`."""
    leaves = [str(leaf) for shape in payload for leaf in shape.leaves]
    if len(leaves) == 1:
        return leaves[0]
    if len(set(leaves)) == 1:
        return f"{len(leaves)} x {leaves[0]}"
    return f"{leaves[0]} + {len(leaves) - 1} more"


# Who talks to whom: every way in which compilers write groups of devices.
#
# - listed: `{{0,1},{2,3}}`; `{}` is everybody;
# - counted: `[4,2]<=[2,2,2]T(0,2,1)`: the numbers 0, 1, 2, ... shaped, transposed, cut in rows;
# - by mesh: `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`: axes of a mesh of the compiler's
#   own making, a part of one written `'a':(2)4` (4 members, 2 blocks before them), devices in order
#   unless a counted or listed order is given.


_INNER = re.compile(r"\{([\d,\s-]*)\}")
_COUNTED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"['\"]([^'\"]+)['\"]=(\d+)")
_AXIS_REF = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")

Groups = tuple[np.ndarray, ...]


def written_groups(instruction: Instruction) -> str:
    """The groups of a collective as its text has them; without a word, everybody is one."""
    plain = instruction.attribute("replica_groups") or "{}"
    if not plain.startswith("mesh"):
        return plain
    by_mesh = _MESH.search(instruction.attributes)  # its value has commas of its own
    return by_mesh[0] if by_mesh else plain


@functools.lru_cache(maxsize=1024)
def read_groups(text: str, devices: int) -> Groups:
    """One array of device numbers per group.

    >>> [group.tolist() for group in read_groups("[2,2]<=[2,2]T(1,0)", 4)]
    [[0, 2], [1, 3]]
    """
    if text.startswith("mesh["):
        return tuple(_by_mesh(text, devices))
    if text.startswith("["):
        return tuple(_counted(text))
    if text.startswith("{"):
        listed = [np.array(integers(inner)) for inner in _INNER.findall(text)]
        return tuple(group for group in listed if group.size) or (np.arange(devices),)
    raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")


def read_pairs(text: str) -> np.ndarray:
    """Senders and receivers, one pair a row."""
    return np.array(integers(text), np.int64).reshape(-1, 2)


def _counted(text: str) -> np.ndarray:
    found = _COUNTED.match(text)
    if found is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    shape, before, order = (integers(part) for part in found.groups())
    ids = np.arange(math.prod(before or shape)).reshape(before or shape)
    return ids.transpose(order or range(ids.ndim)).reshape(shape if before else (-1,))


def _by_mesh(text: str, devices: int) -> np.ndarray:
    found = _MESH.match(text)
    if found is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(found[1])}
    ids = np.arange(devices) if not found[2] else _device_order(found[2])
    sizes, chosen = _split(axes, _AXIS_REF.findall(found[3]))
    grid = ids.reshape(sizes)
    members = math.prod(sizes[dim] for dim in chosen)
    return np.moveaxis(grid, chosen, range(-len(chosen), 0)).reshape(-1, members)


def _device_order(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)`, or numbers in a row."""
    if not text.startswith("["):
        return np.array(integers(text))
    return _counted(text).ravel()


def _split(
    axes: dict[str, int], references: list[tuple[str, str, str]]
) -> tuple[list[int], list[int]]:
    """The mesh's sizes with axes cut where only a part is meant, and the dims that are meant."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for order, (name, before, members) in enumerate(references):
        first, count = (int(before), int(members)) if members else (1, axes[name])
        parts.setdefault(name, []).append((first, count, order))
    sizes: list[int] = []
    dims: dict[int, int] = {}
    for name, size in axes.items():
        done = 1
        for first, count, order in sorted(parts.get(name, [])):
            sizes.append(first // done)
            dims[order] = len(sizes)
            sizes.append(count)
            done = first * count
        sizes.append(size // done)
    return sizes, [dims[order] for order in range(len(references))]


# Device numbers in a text, turned into positions of the mesh.
#
# Number `i` is position `i` of the mesh, counted in row order. A program for several TPU slices is
# written for one of them: its numbers count the positions of any one slice. What goes between
# slices names devices by their own numbers instead.


_PER_SLICE = 100_000


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Where the numbers of one program point to."""

    placement: Placement
    devices: int

    def __post_init__(self) -> None:
        total, slices = self.placement.positions.size, self.placement.topology.num_slices
        if self.devices not in (total, total // slices):
            raise MeshwrightError(
                f"the program is for {self.devices:,} devices, the mesh has {total:,}. "
                "Pass the placement of the mesh it was compiled for."
            )

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """For each copy of the program, the positions its numbers mean."""
        total = self.placement.positions.size
        if self.devices == total:
            return np.arange(total)[None]
        return np.argsort(self._slices, kind="stable").reshape(-1, self.devices)

    def of(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Positions of a group or of pairs, in every copy of the program."""
        return [row[numbers] for row in self.rows]

    def of_device_ids(self, ids: np.ndarray) -> np.ndarray:
        """Positions of devices that go by their own numbers."""
        order = np.argsort(self._ids)
        found: np.ndarray = order[np.searchsorted(self._ids[order], ids)]
        return found

    @functools.cached_property
    def _slices(self) -> np.ndarray:
        topology = self.placement.topology
        network = [dim for dim, axis in enumerate(topology.axes) if axis.kind == "network"]
        numbers: np.ndarray = grid_coords(self.placement)[:, network].sum(axis=1)
        return numbers

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """A TPU's own number: its slice, then its chip, the first direction counting fastest."""
        topology = self.placement.topology
        inside = [dim for dim, axis in enumerate(topology.axes) if axis.kind != "network"]
        number, step = np.zeros(self.placement.positions.size, np.int64), 1
        cores = [dim for dim in inside if topology.axes[dim].kind == "core"]
        for dim in [*cores, *(dim for dim in inside if dim not in cores)]:
            number += step * grid_coords(self.placement)[:, dim]
            step *= topology.axes[dim].size
        number += _PER_SLICE * (1 + self._slices)
        return number
