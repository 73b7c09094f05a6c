"""`analyze(program, placement)`: every collective of a program, with axes, cost and cause.

Also here: replica groups in all the forms in which compilers write them, the mesh positions that
their device numbers mean, and the mesh axes that groups of positions run over.
"""

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
from meshwright.rehearsal.collectives.causes import NO_BATCH, Batch, Causes, operation_served
from meshwright.rehearsal.collectives.costs import (
    Cost,
    beside_back,
    grid_coords,
    group_cost,
    pairs_cost,
    plan_of,
)
from meshwright.rehearsal.collectives.find import IDS_PER_SLICE, HloCollective, find_collectives
from meshwright.rehearsal.collectives.types import (
    AxisPart,
    Collective,
    Collectives,
    ShardingConflict,
)


# In: a scheduled program and where its mesh lies. Out: one `Collective` for each that the program
# has, in program order. Invariant: bytes, axes and counts are read off the program, times are
# modelled, causes are guessed. Example: on "dp:2, tp:4" the line `all-reduce(%a: f32[512,512]),
# replica_groups={{0,1,2,3},{4,5,6,7}}` is an all-reduce of 1 MiB over tp.
def analyze(
    program: Program,
    placement: Placement,
    conflicts: Sequence[ShardingConflict] = (),
    batch: Batch = NO_BATCH,
) -> Collectives:
    """List what a program moves between devices.

    `placement` is that of the mesh the program was compiled for (`mw.explain(mesh)`), `conflicts`
    what `read_conflicts` finds in the compiler's standard error, `batch` which arguments are data.
    Raises `MeshwrightError` where
    the program is for another number of devices.
    """
    located = tuple(_with_source(conflict, program) for conflict in conflicts)
    analyzer = _Analyzer(program, placement, Causes(program, located, batch))
    return Collectives(tuple(map(analyzer.collective, find_collectives(program))), located)


def _with_source(conflict: ShardingConflict, program: Program) -> ShardingConflict:
    """A conflict with the source line of an operation of its name, if the program has one."""
    if conflict.source is not None or not conflict.op_name:
        return conflict
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.op_name == conflict.op_name:
                return dataclasses.replace(conflict, source=program.source(instruction))
    return conflict


@dataclasses.dataclass(frozen=True)
class _Participants:
    """The devices that a collective joins: `groups` groups of `sizes` members.

    `plan` is how groups lie on the hardware, `pairs` the senders and receivers of a permutation;
    one of the two is given. `beside_back` is that of the permutation.
    """

    axes: tuple[AxisPart, ...] | None
    sizes: tuple[int, ...]
    groups: int
    plan: AxisPlan | None
    pairs: np.ndarray | None = None
    beside_back: float = 0.0

    @functools.cached_property
    def senders(self) -> frozenset[tuple[int, int]]:
        """The pairs of a permutation as a set."""
        listed = () if self.pairs is None else self.pairs.tolist()
        return frozenset((sender, receiver) for sender, receiver in listed)


class _Analyzer:
    """Makes the `Collective`s of one program: participants, cost and cause of each."""

    def __init__(self, program: Program, placement: Placement, causes: Causes) -> None:
        self.program, self.placement, self.causes = program, placement, causes
        self.positions = Positions(placement, program.devices)
        self.names, self.sizes = placement.spec.names, placement.spec.sizes
        # A program repeats few sets of groups many times, and each costs a placement to measure.
        self.participants_of: dict[str, _Participants] = {}

    def collective(self, op: HloCollective) -> Collective:
        participants = self.participants(op)
        payload = (op.results,) if _counts_result(op.kind) else op.operands
        size = sum(shape.bytes for shape in payload)
        op_name, source = operation_served(self.program, op)
        cost = self.cost(op.kind, size, participants)
        cause = self.causes.of(op, op_name, participants.axes, max(participants.sizes))
        return Collective(
            op.kind,
            "+".join(dict.fromkeys(leaf.dtype for shape in payload for leaf in shape.leaves)),
            _shape_text(payload),
            size,
            _bytes_sent(op.kind, size, max(participants.sizes)),
            participants.axes,
            participants.sizes,
            participants.groups,
            cost.links,
            cost.seconds,
            self.program.run_count(op.instruction.computation),
            op.asynchronous,
            op.meanwhile,
            op_name,
            source,
            cause.name,
            cause.why,
            op.parts,
            cause.conflict,
            _dim(op),
            participants.senders,
            participants.beside_back,
        )

    def cost(self, kind: str, size: int, participants: _Participants) -> Cost:
        if participants.plan is not None:
            return group_cost(kind, size, participants.plan, self.placement.topology)
        pairs = participants.pairs
        if pairs is None:
            pairs = np.empty((0, 2), np.int64)
        return pairs_cost(size, pairs, self.placement)

    def participants(self, op: HloCollective) -> _Participants:
        if op.transfer is not None:
            text = op.transfer.target
        elif op.kind == "collective-permute":
            text = op.instruction.attribute("source_target_pairs") or ""
        else:
            text = groups_text(op.instruction)
        if text not in self.participants_of:
            self.participants_of[text] = self.read_participants(op, text)
        return self.participants_of[text]

    def read_participants(self, op: HloCollective, text: str) -> _Participants:
        transfer, positions = op.transfer, self.positions
        if transfer is not None and transfer.between_slices:
            if op.kind == "collective-permute":
                return self.by_pairs(positions.of_device_ids(transfer.pairs))
            return self.by_groups([positions.of_device_ids(group) for group in transfer.groups])
        if op.kind == "collective-permute":
            return self.by_pairs(np.concatenate(positions.of(read_pairs(text))))
        groups = read_groups(text, self.program.devices)
        return self.by_groups([there for group in groups for there in positions.of(group)])

    def by_groups(self, groups: Sequence[np.ndarray]) -> _Participants:
        axes = axes_of(groups, self.names, self.sizes)
        sizes = tuple(sorted({group.size for group in groups}))
        return _Participants(axes, sizes, len(groups), plan_of(self.placement, groups, axes))

    def by_pairs(self, pairs: np.ndarray) -> _Participants:
        axes = axes_crossed(pairs, self.names, self.sizes)
        size = int(np.prod([part.size for part in axes], dtype=np.int64))
        groups = self.placement.positions.size // size
        together = beside_back(pairs, self.placement)
        return _Participants(axes, (size,), groups, None, pairs, together)


def _dim(op: HloCollective) -> int | None:
    """The dim along which an all-gather joins the pieces; `None` of other kinds."""
    listed = integers(op.instruction.attribute("dimensions"))
    return listed[0] if op.kind == "all-gather" and listed else None


def _counts_result(kind: str) -> bool:
    """Whether the result is the larger side."""
    return kind in ("all-gather", "collective-broadcast")


def _bytes_sent(kind: str, size: int, members: int) -> int:
    """Bytes a device sends when the group works as a ring."""
    if members == 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    # A ring passes every byte on but the device's own part; an all-reduce goes round twice.
    once = size * (members - 1) // members
    return 2 * once if kind == "all-reduce" else once


def _shape_text(payload: Sequence[Shape]) -> str:
    """Return the arrays in a few letters: `f32[8,8]`, `2 x f32[8,8]`, `f32[8,8] + 3 more`.

    Of arrays that differ the largest is named.
    """
    leaves = [leaf for shape in payload for leaf in shape.leaves]
    largest = max(leaves, key=lambda leaf: leaf.bytes)
    if len(leaves) == 1:
        return str(largest)
    if len(set(leaves)) == 1:
        return f"{len(leaves)} x {largest}"
    return f"{largest} + {len(leaves) - 1} more"


# In: groups of mesh positions, counted in row order. Out: the mesh axes, or parts of them, whose
# combinations every group consists of; `None` when the groups differ in size, or one of them is no
# full set of combinations. Example on dp:2, tp:4: {0,4} {1,5} {2,6} {3,7} run over dp, {0,1} {2,3}
# {4,5} {6,7} over tp:2/4, {0,5} over no axes.
def axes_of(
    groups: Sequence[np.ndarray], names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...] | None:
    """Find the axes that groups run over.

    >>> [str(part) for part in axes_of([np.array([0, 2]), np.array([1, 3])], ["dp", "tp"], [2, 2])]
    ['dp']
    """
    members = groups[0].size
    if any(group.size != members for group in groups):
        return None
    coords = np.stack(np.unravel_index(np.stack(groups), tuple(sizes)), axis=-1)
    ordered = np.sort(coords, axis=1)
    # Per group and axis, how many different coordinates there are.
    different = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    if (different != different[0]).any() or math.prod(different[0].tolist()) != members:
        return None
    return tuple(
        AxisPart(name, int(count), size)
        for name, count, size in zip(names, different[0], sizes, strict=True)
        if count > 1
    )


def axes_crossed(
    pairs: np.ndarray, names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...]:
    """Find the axes along which some pair of sender and receiver differs."""
    coords = np.stack(np.unravel_index(pairs, tuple(sizes)), axis=-1)
    differs = (coords[:, 0] != coords[:, 1]).any(axis=0)
    return tuple(
        AxisPart(name, size, size)
        for name, size, crossed in zip(names, sizes, differs, strict=True)
        if crossed
    )


# Replica groups, in every form in which compilers write them:
#
# - listed: `{{0,1},{2,3}}`; `{}` is all devices;
# - iota: `[4,2]<=[2,2,2]T(0,2,1)`: the numbers 0, 1, 2, ... shaped, transposed, cut in rows;
# - by mesh: `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`: axes of a mesh of the compiler's
#   own making, a part of one written `'a':(2)4` (4 members, 2 blocks before them), devices in order
#   unless an iota or a list of them is given.

_INNER = re.compile(r"\{([\d,\s-]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"['\"]([^'\"]+)['\"]=(\d+)")
_AXIS_REF = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")

Groups = tuple[np.ndarray, ...]


def groups_text(instruction: Instruction) -> str:
    """The replica groups of a collective as written; `{}`, all in one group, where it has none."""
    plain = instruction.attribute("replica_groups") or "{}"
    if not plain.startswith("mesh"):
        return plain
    by_mesh = _MESH.search(instruction.attributes)  # its value has commas of its own
    return by_mesh[0] if by_mesh else plain


@functools.lru_cache(maxsize=1024)
def read_groups(text: str, devices: int) -> Groups:
    """Read replica groups: one array of device numbers per group.

    >>> [group.tolist() for group in read_groups("[2,2]<=[2,2]T(1,0)", 4)]
    [[0, 2], [1, 3]]
    """
    if text.startswith("mesh["):
        return tuple(_by_mesh(text, devices))
    if text.startswith("["):
        return tuple(_iota(text))
    if text.startswith("{"):
        listed = [np.array(integers(inner)) for inner in _INNER.findall(text)]
        return tuple(group for group in listed if group.size) or (np.arange(devices),)
    raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")


def read_pairs(text: str) -> np.ndarray:
    """Read senders and receivers, one pair a row.

    >>> read_pairs("{{0,1},{1,0}}").tolist()
    [[0, 1], [1, 0]]
    """
    return np.array(integers(text), np.int64).reshape(-1, 2)


def _iota(text: str) -> np.ndarray:
    parts = _IOTA.match(text)
    if parts is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    shape, before, order = (integers(part) for part in parts.groups())
    ids = np.arange(math.prod(before or shape)).reshape(before or shape)
    return ids.transpose(order or range(ids.ndim)).reshape(shape if before else (-1,))


def _by_mesh(text: str, devices: int) -> np.ndarray:
    parts = _MESH.match(text)
    if parts is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(parts[1])}
    ids = np.arange(devices) if not parts[2] else _device_order(parts[2])
    sizes, chosen = _split_axes(axes, _AXIS_REF.findall(parts[3]))
    grid = ids.reshape(sizes)
    members = math.prod(sizes[dim] for dim in chosen)
    return np.moveaxis(grid, chosen, range(-len(chosen), 0)).reshape(-1, members)


def _device_order(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)`, or numbers in a row."""
    if not text.startswith("["):
        return np.array(integers(text))
    return _iota(text).ravel()


def _split_axes(
    axes: dict[str, int], references: list[tuple[str, str, str]]
) -> tuple[list[int], list[int]]:
    """Split axes of which only a part is meant; return all sizes, and the dims that are meant.

    >>> _split_axes({"a": 8, "b": 2}, [("a", "2", "4")])
    ([2, 4, 1, 2], [1])
    """
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


# In: device numbers of the program's text. Out: mesh positions, counted in row order. Number `i` is
# position `i`. A program for several TPU slices is written for one of them: its numbers count the
# positions of any one slice, so each group stands for one in every slice. What goes between slices
# names devices by libtpu's own ids instead. Example, dp:2 over two slices of tp:4: {0,1} means the
# positions {0,1} and {4,5}, the ids 100000 and 200000 mean the positions 0 and 4.
@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Where the device numbers of one program are in the mesh."""

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
        """Positions of devices that go by libtpu's ids."""
        order = np.argsort(self._ids)
        positions: np.ndarray = order[np.searchsorted(self._ids[order], ids)]
        return positions

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
        number += IDS_PER_SLICE * (1 + self._slices)
        return number
