"""`PeakEstimate`: the peak a step would have if some of its buffers were smaller, or not there.

A change of a step (a smaller batch, another mesh, rematerialisation) scales some kinds of buffers.
The walk over the live ranges of the compiled program is done again with these sizes, so that the
peak may move to another moment; what it loses there, in proportion, the compiler's own peak is
taken to lose. Arguments are exact. Where the compiler refused, the program is that of the CPU
stand-in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from meshwright.axes import role
from meshwright.hlo.dataflow import trip_count
from meshwright.hlo.instructions import Instruction, Leaf, primitives
from meshwright.partitioning.report import LeafRow
from meshwright.rehearsal.live_ranges import bytes_in
from meshwright.rehearsal.memory import Buffer
from meshwright.rehearsal.peak import Peaks, origin

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal

# What a buffer is, by its shape: an argument of the step; "state" has the shape of a device's part
# of a parameter (gradients, updates, results), "gathered" that of a parameter or layer before it is
# cut; "scores" are what attention gives its softmax, and "activation" is all the rest.
Kind = Literal["argument", "state", "gathered", "scores", "activation"]
Scales = Mapping[Kind, float]
Dims = tuple[int, ...]
Place = tuple[str, str, int]  # of a buffer: computation, instruction, number of its result
_Value = tuple[Place, Leaf]

_SHORTEST = 32  # positions: fewer make no scores that are worth a kernel
_LEAST_SHARE = (
    1 / 16
)  # of the largest value of a layer: less is a statistic of a norm, not its input


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward pass finds in memory of `layers` alike: `bytes`, in the buffers `names`.

    `inputs` are the bytes of the layers' inputs among it, which rematerialisation keeps.
    """

    names: frozenset[Place]
    bytes: int
    layers: int
    inputs: int


class PeakEstimate:
    """The buffers of a rehearsed step by kind, and what its peak would be with others."""

    def __init__(self, result: Rehearsal):
        self.result = result
        compiled = result.estimate if result.program is None else result
        self.program = None if compiled is None else compiled.program
        self.peaks = None if self.program is None else Peaks(self.program)
        self._kinds: dict[Leaf, Kind] = {}
        # The stand-in has no flash kernels: scores that it writes out are not in the real program.
        self.hidden: Scales = {"scores": 0.0} if _has_kernel(result) else {}

    def argument_bytes(self, numbers: Iterable[int]) -> int:
        """Return the bytes of these arguments on one device."""
        names = self.result.request.argument_names
        wanted = {names[number] for number in numbers}
        rows = self.result.arguments.rows
        return sum(row.device_bytes for row in rows if row.path.partition("/")[0] in wanted)

    @functools.cached_property
    def state_rows(self) -> tuple[LeafRow, ...]:
        """The rows of the table of arguments that are no data."""
        request = self.result.request
        names = request.argument_names
        data = {names[number] for number in request.data}
        rows = self.result.arguments.rows
        return tuple(row for row in rows if row.path.partition("/")[0] not in data)

    @functools.cached_property
    def _shapes(self) -> tuple[frozenset[Dims], frozenset[Dims]]:
        """The shapes that count as state, and as gathered; dims sorted, since both are turned."""
        local = {_sorted(row.local) for row in self.state_rows if len(row.shape) > 1}
        gathered: set[Dims] = set()
        for shape, part in {(row.shape, row.local) for row in self.state_rows}:
            for first in (0, 1):  # 1: a layer of a stack
                pairs = zip(shape[first:], part[first:], strict=True)
                gathered.update(_sorted(dims) for dims in itertools.product(*pairs))
        return frozenset(local), frozenset(dims for dims in gathered - local if len(dims) > 1)

    @functools.cached_property
    def score_shapes(self) -> frozenset[Dims]:
        """The shape of each softmax over scores, (..., queries, keys): an `exp` after a max."""
        if self.program is None:
            return frozenset()
        spec = self.result.placement.spec
        shards = math.prod(
            size
            for name, size in zip(spec.names, spec.sizes, strict=True)
            if role(name).name in ("sequence", "context")
        )
        exponentials: set[Dims] = set()
        maxima: set[int] = set()  # elements of what softmax subtracts: one for each row of scores
        for computation in self.program.computations.values():
            for each in computation.instructions:
                if each.opcode == "exponential":
                    exponentials.add(each.shape.leaves[0].dims)
                elif each.opcode == "reduce" and "reduce_max" in primitives(each.op_name):
                    maxima.add(each.shape.leaves[0].elements)
        return frozenset(
            dims
            for dims in exponentials
            if len(dims) > 2
            and dims[-1] >= _SHORTEST
            and dims[-2] in (dims[-1], dims[-1] // shards)
            and math.prod(dims[:-1]) in maxima
        )

    def kind(self, instruction: Instruction, leaf: Leaf) -> Kind:
        """Say what a buffer is."""
        entry = self.program is not None and instruction.computation == self.program.entry.name
        if instruction.opcode == "parameter" and entry:
            return "argument"
        return self._kind_of_shape(leaf)

    # Cached: every walk asks for every buffer, and a large program has few shapes.
    def _kind_of_shape(self, leaf: Leaf) -> Kind:
        if leaf not in self._kinds:
            self._kinds[leaf] = self._find_kind(leaf)
        return self._kinds[leaf]

    def _find_kind(self, leaf: Leaf) -> Kind:
        local, gathered = self._shapes
        dims = _sorted(leaf.dims)
        if dims in local:
            return "state"
        if dims in gathered:
            return "gathered"
        return "scores" if self._is_scores(leaf) else "activation"

    def _is_scores(self, leaf: Leaf) -> bool:
        # Heads may be split in two dims, and layers stacked: the number of elements tells. Queries
        # and keys alone do not, where an activation is as wide as the sequence is long.
        return len(leaf.dims) > 2 and any(
            _has_both(leaf.dims, (dims[-2], dims[-1])) and not leaf.elements % math.prod(dims)
            for dims in self.score_shapes
        )

    @functools.cached_property
    def alive(self) -> tuple[tuple[Instruction, int, Leaf, Kind], ...]:
        """The buffers at the peak, each with its kind."""
        if self.program is None or self.peaks is None:
            return ()
        buffers = []
        for where, (name, number) in self.peaks.entry().buffers:
            maker = self.program.computations[where].by_name[name]
            leaf = maker.shape.leaves[number]
            buffers.append((maker, number, leaf, self.kind(maker, leaf)))
        return tuple(buffers)

    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers at the peak, largest first, but for scores that a kernel never writes."""
        hidden = {
            maker.name for maker, _, _, kind in self.alive if self.hidden.get(kind, 1.0) == 0.0
        }
        compiled = self.result.estimate or self.result
        return tuple(each for each in compiled.memory.buffers if each.name not in hidden)

    def bytes_of(self, *kinds: Kind) -> int:
        """Bytes at the peak of these kinds, as the compiler would have them."""
        if any(kind in self.hidden for kind in kinds):
            return 0
        walked = sum(leaf.bytes for _, _, leaf, kind in self.alive if kind in kinds)
        return int(walked * self._packing)

    @functools.cached_property
    def _walked(self) -> int:
        return self._walk(self.hidden)

    @property
    def _packing(self) -> float:
        """What the compiler allocates beside arguments, as a multiple of what is alive."""
        beside = self.result.memory.peak - self.result.memory.arguments
        return beside / self._walked if self._walked else 1.0

    def _walk(self, scales: Scales, without: Iterable[Place] = ()) -> int:
        if self.peaks is None:
            return 0
        dropped = frozenset(without)

        def size(instruction: Instruction, number: int) -> int:
            bytes_ = bytes_in(instruction, number)
            if not bytes_:
                return 0
            if dropped and (instruction.computation, instruction.name, number) in dropped:
                return 0
            kind = self.kind(instruction, instruction.shape.leaves[number])
            return 0 if kind == "argument" else int(bytes_ * scales.get(kind, 1.0))

        return self.peaks.resized(size).entry().bytes

    def peak(
        self,
        scales: Scales,
        *,
        arguments: int | None = None,
        without: Iterable[Place] = (),
        more: int = 0,
    ) -> int:
        """Return the peak with kinds of buffers scaled, some left out, and some bytes `more`.

        `arguments` are their bytes after the change, if it changes them.
        """
        memory = self.result.memory
        arguments = memory.arguments if arguments is None else arguments
        beside = memory.peak - memory.arguments
        if not self._walked:  # nothing is known but that these are no arguments
            return arguments + int(beside * scales.get("activation", 1.0)) + more
        walked = self._walk({**scales, **self.hidden}, without) + more
        return arguments + int(walked * self._packing)

    @functools.cached_property
    def saved(self) -> Saved | None:
        """Find what layers leave for the backward pass; `None` where no layers are to be seen."""
        stacked, repeated = self._stacked(), self._repeated()
        if stacked is None or repeated is None:
            return stacked or repeated
        # Stacks are sure. But a program may have a scan beside layers that are written out.
        return stacked if stacked.bytes > repeated.bytes / 4 else repeated

    def _values(self) -> list[_Value]:
        """The values of layers at the peak, by where they are."""
        return [
            ((maker.computation, maker.name, number), leaf)
            for maker, number, leaf, kind in self.alive
            if kind in ("activation", "scores") and kind not in self.hidden and leaf.bytes > 0
        ]

    def _stacked(self) -> Saved | None:
        """What a scan over layers stacks: a buffer's first dim is the loop's number of steps."""
        if self.program is None:
            return None
        loops: dict[int, list[Instruction]] = {}
        for computation in self.program.computations.values():
            for each in computation.instructions:
                trips = trip_count(each, self.program.dataflow) if each.opcode == "while" else None
                if trips is not None and trips > 1:
                    loops.setdefault(trips, []).append(each)
        by_layers: dict[int, list[_Value]] = {}
        for place, leaf in self._values():
            if len(leaf.dims) > 1 and leaf.dims[0] in loops:
                by_layers.setdefault(leaf.dims[0], []).append((place, leaf))
        if not by_layers:
            return None
        layers, stacks = max(by_layers.items(), key=lambda item: _total(item[1]))
        return Saved(
            frozenset(place for place, _ in stacks),
            _total(stacks),
            layers,
            layers * self._carried(loops[layers], {leaf.dims[1:] for _, leaf in stacks}),
        )

    def _carried(self, loops: Iterable[Instruction], stacked: Container[Dims]) -> int:
        """Bytes of the largest value that loops hand from layer to layer: a layer's input."""
        carried = (
            leaf.bytes
            for loop in loops
            for leaf in loop.shape.leaves
            if leaf.dims in stacked and self.kind(loop, leaf) == "activation"
        )
        return max(carried, default=0)

    def _repeated(self) -> Saved | None:
        """What layers that are written out leave: several buffers of a shape."""
        groups: dict[Leaf, list[_Value]] = {}
        for place, leaf in self._values():
            if len(leaf.dims) > 1 and self._is_forward(place):
                groups.setdefault(leaf, []).append((place, leaf))
        alike = {leaf: group for leaf, group in groups.items() if len(group) > 1}
        # Scores are larger than all else in a layer, and no layer's input.
        wide = [leaf for leaf in alike if not self._is_scores(leaf)]
        if not wide:
            return None
        least = _LEAST_SHARE * max(leaf.bytes for leaf in wide)
        inputs = min((leaf for leaf in wide if leaf.bytes >= least), key=lambda leaf: leaf.bytes)
        values = [value for group in alike.values() for value in group]
        # A layer leaves several values of the shape of its input, and one or a few of others.
        layers = min(len(alike[leaf]) for leaf in wide if leaf.bytes >= least)
        return Saved(
            frozenset(place for place, _ in values), _total(values), layers, layers * inputs.bytes
        )

    def _is_forward(self, place: Place) -> bool:
        """Whether a buffer was made in the forward pass; at the peak it waits for the backward."""
        if self.program is None:
            return False
        maker = self.program.computations[place[0]].by_name[place[1]]
        named = origin(self.program, maker) or maker
        return "transpose(" not in named.op_name


def _total(values: Iterable[_Value]) -> int:
    return sum(leaf.bytes for _, leaf in values)


def _has_kernel(result: Rehearsal) -> bool:
    """Whether the refused program of a model has a flash kernel that its estimate has not."""
    config = getattr(result.request.model, "config", None)
    return result.estimate is not None and getattr(config, "attention", "dot") != "dot"


def _sorted(dims: Iterable[int]) -> Dims:
    return tuple(sorted(dim for dim in dims if dim > 1))


def _has_both(dims: Dims, pair: tuple[int, int]) -> bool:
    left = list(dims)
    for length in pair:
        if length not in left:
            return False
        left.remove(length)
    return True
