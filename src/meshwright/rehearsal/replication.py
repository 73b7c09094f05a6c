"""`Replication`: which devices hold equal values, for every instruction of a program.

All devices run one program. What differs between them comes from the shards of the arguments, from
a device's own number (`partition-id`) and from collectives; everything else is as different as what
it works on. So devices whose operands are equal do the same work, which is work done again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.hlo.instructions import Computation, Instruction, integers
from meshwright.hlo.program import Program
from meshwright.rehearsal.collectives.analyze import groups_text, read_groups, read_pairs
from meshwright.rehearsal.collectives.find import KINDS

_MOST_NUMBERS = 1 << 16  # of a value that is followed number by number: tables by device are small
_MOST_ROUNDS = 8  # of a loop until nothing it carries changes; each adds a device's differences
# Results that may differ on every device, whatever goes in.
_OWN = frozenset("recv recv-done infeed rng ragged-all-to-all".split())
_SHARDING = re.compile(r"\{devices=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)([^{}]*)")
_KINDS_AT_END = re.compile(r"last_tile_dims=\{([^}]*)\}")


# `same` names a partition of the devices: those of one class hold equal values, that of a tuple in
# all its `parts`. `numbers` are the values themselves, a row per device or one for all, where they
# are integers that are known. Equal values are one object: tuples of a TPU's program hold tuples
# that share parts, and written out they would be exponentially long.
@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    same: int
    numbers: np.ndarray | None = None
    parts: tuple[_Value, ...] | None = None


# In: a program for n devices. Out: per instruction, a class for each device; devices of one class
# compute the same. Invariant: where two devices have one class, their values are equal; where the
# text does not tell, all classes differ. Example, 4 devices: with x sharded over pairs, dot(x, w)
# has classes 0 0 1 1 if w is whole; after an all-gather of it over {0,2} {1,3}, 0 0 0 0.
class Replication:
    """Finds equal work in one program."""

    def __init__(self, program: Program, pieces: Mapping[str, np.ndarray] | None = None) -> None:
        """`pieces` says, by name, which piece of an argument each device holds.

        It is used where the text does not say so itself: from jax 0.12 on the CPU compiler's text
        has no shardings.
        """
        self.program = program
        self._pieces = pieces or {}
        self.devices = program.devices
        self._partitions: list[np.ndarray] = []
        self._names: dict[bytes, int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._exchanges: dict[tuple[str, str, int], int] = {}
        self._values: dict[Any, _Value] = {}
        self._joined_pairs: dict[tuple[_Value, _Value], _Value] = {}
        self._results: dict[Any, _Value] = {}
        self._of: dict[Instruction, int] = {}
        self._equal = self._named(np.zeros(self.devices, np.int64))
        self._different = self._named(np.arange(self.devices))
        entry = program.entry
        self._run(entry, [self._argument(entry.parameters[n]) for n in sorted(entry.parameters)])

    def classes(self, instruction: Instruction) -> np.ndarray:
        """Return a class for each device; those of one class compute the same."""
        return self._partitions[self._of.get(instruction, self._different)]

    def copies(self, instruction: Instruction) -> float:
        """Return how many devices compute the same, on average."""
        return self.devices / (1 + int(self.classes(instruction).max(initial=0)))

    # Partitions of the devices.

    def _named(self, classes: np.ndarray) -> int:
        """Number a partition; equal ones have one number."""
        _, first, inverse = np.unique(classes, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))[inverse.ravel()]
        name = self._names.setdefault(order.tobytes(), len(self._partitions))
        if name == len(self._partitions):
            self._partitions.append(order)
        return name

    def _join(self, one: int, other: int) -> int:
        """Devices are equal that are equal in both."""
        if one == other:
            return one
        pair = (min(one, other), max(one, other))
        if pair not in self._joined:
            a, b = (self._partitions[each] for each in pair)
            self._joined[pair] = self._named(a * (b.max() + 1) + b)
        return self._joined[pair]

    def _array(self, same: int, numbers: np.ndarray | None = None) -> _Value:
        key = (same, None if numbers is None else numbers.tobytes())
        return self._values.setdefault(key, _Value(same, numbers))

    def _tuple(self, parts: Sequence[_Value]) -> _Value:
        key = tuple(parts)
        if key not in self._values:
            same = functools.reduce(self._join, (part.same for part in parts), self._equal)
            self._values[key] = _Value(same, None, key)
        return self._values[key]

    def _joined_values(self, one: _Value, other: _Value) -> _Value:
        if one is other:
            return one
        pair = (one, other)
        if pair not in self._joined_pairs:
            ours, theirs = one.parts, other.parts
            if ours is not None and theirs is not None and len(ours) == len(theirs):
                both = self._tuple(list(map(self._joined_values, ours, theirs)))
            else:
                both = self._array(self._join(one.same, other.same))
            self._joined_pairs[pair] = both
        return self._joined_pairs[pair]

    def _known(self, numbers: np.ndarray) -> _Value:
        """A value of which the integers are known; a row for each device, or one for all."""
        if numbers.shape[0] == 1:
            return self._array(self._equal, numbers)
        _, classes = np.unique(numbers, axis=0, return_inverse=True)
        return self._array(self._named(classes.ravel()), numbers)

    def _argument(self, parameter: Instruction) -> _Value:
        """An argument by the sharding that the text gives it; different everywhere without one."""
        written = parameter.attribute("sharding") or ""
        if len(parameter.shape.leaves) > 1:
            return self._tuple([self._anything] * len(parameter.shape.leaves))
        tiles = sharded_tiles(written, self.devices) if written else None
        if tiles is None and not written:
            tiles = self._pieces.get(parameter.op_name)
        return self._array(self._different if tiles is None else self._named(tiles))

    # Running the program on partitions.

    def _run(self, computation: Computation, arguments: Sequence[_Value]) -> _Value:
        """Return the root's value, given those of the parameters."""
        key = (computation.name, *arguments)
        if key in self._results:
            return self._results[key]
        values: dict[str, _Value] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                number = int(instruction.operand_text)
                value = arguments[number] if number < len(arguments) else self._anything
            else:
                value = self._value(instruction, [values[name] for name in _read(instruction)])
            values[instruction.name] = value
            before = self._of.get(instruction, self._equal)
            self._of[instruction] = self._join(before, value.same)
        self._results[key] = values[computation.root.name]
        return self._results[key]

    @property
    def _anything(self) -> _Value:
        return self._array(self._different)

    def _value(self, instruction: Instruction, operands: list[_Value]) -> _Value:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            return self._collective(kind, instruction, operands)
        if opcode in _OWN or '"has_communication":true' in instruction.attributes:
            return self._anything
        if opcode == "tuple":
            return self._tuple(operands)
        if opcode == "get-tuple-element":
            (index,) = integers(instruction.attribute("index"))
            (given,) = operands
            parts = given.parts
            return given if parts is None or index >= len(parts) else parts[index]
        if opcode.endswith(("-done", "-update")) or opcode in ("optimization-barrier", "domain"):
            return operands[0]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode in ("fusion", "call") or instruction.only_calls:
            return self._run(self.program.computations[instruction.called[0][1]], operands)
        if opcode == "custom-call" and '"AsyncCollectiveDone"' in instruction.attributes:
            return self._ended(instruction, operands)
        return self._plain(instruction, operands)

    def _ended(self, instruction: Instruction, operands: list[_Value]) -> _Value:
        """What a TPU's fusion ends with: the last piece of the collective, not its operand."""
        where = self.program.computations[instruction.computation]
        pieces = zip(where.operands(instruction), operands, strict=True)
        return next((value for each, value in pieces if each.opcode in KINDS), self._anything)

    def _loop(self, instruction: Instruction, state: _Value) -> _Value:
        """What a loop leaves, or carries in any round."""
        body = self.program.computations[dict(instruction.called)["body"]]
        for _ in range(_MOST_ROUNDS):
            after = self._joined_values(state, self._run(body, [state]))
            if after is state:
                return state
            state = after
        return self._run(body, [self._anything])

    def _branches(self, instruction: Instruction, operands: list[_Value]) -> _Value:
        names = [name for _, name in instruction.called]
        results = [
            self._run(self.program.computations[name], [given])
            for name, given in zip(names, operands[1:], strict=False)
        ]
        return self._array(self._tuple([operands[0], *results]).same)

    def _collective(self, kind: str, instruction: Instruction, operands: list[_Value]) -> _Value:
        permutes = kind == "collective-permute"
        groups = instruction.attribute("source_target_pairs") if permutes else None
        exchange = functools.partial(self._exchanged, kind, groups or groups_text(instruction))
        if kind in ("all-to-all", "ragged-all-to-all") or len(operands) == 1:
            return self._array(exchange(self._tuple(operands).same))
        return self._tuple([self._array(exchange(operand.same)) for operand in operands])

    def _exchanged(self, kind: str, groups: str, same: int) -> int:
        """The partition of what a collective gives, by that of what it takes."""
        key = kind, groups, same  # programs repeat few collectives many times
        if key not in self._exchanges:
            self._exchanges[key] = self._new_exchange(kind, groups, self._partitions[same])
        return self._exchanges[key]

    def _new_exchange(self, kind: str, groups: str, before: np.ndarray) -> int:
        after = np.arange(self.devices) + before.max() + 1
        if kind == "collective-permute":
            pairs = read_pairs(groups)
            after[:] = before.max() + 1  # zeros where nothing arrives
            after[pairs[:, 1]] = before[pairs[:, 0]]
            return self._named(after)
        if kind == "ragged-all-to-all":
            return self._different
        seen: dict[Any, int] = {}
        for group in read_groups(groups, self.devices):
            together = before[group].tobytes()
            for place, device in enumerate(group):
                own = place if kind in ("reduce-scatter", "all-to-all") else 0
                after[device] = seen.setdefault((together, own), len(seen))
        return self._named(after)

    def _plain(self, instruction: Instruction, operands: list[_Value]) -> _Value:
        """Anything else is as different as its operands, but for numbers that are known."""
        opcode = instruction.opcode
        if opcode == "partition-id":
            return self._known(np.arange(self.devices)[:, None])
        if opcode == "constant":
            numbers = self._constant(instruction)
            return self._array(self._equal) if numbers is None else self._known(numbers)
        known = [each.numbers for each in operands if each.numbers is not None]
        if operands and len(known) == len(operands):
            numbers = _computed(instruction, known)
            if numbers is not None:
                return self._known(numbers)
        return self._array(self._tuple(operands).same)

    def _constant(self, instruction: Instruction) -> np.ndarray | None:
        leaf = instruction.shape.leaves[0]
        if leaf.dtype[0] not in "sup" or leaf.elements > _MOST_NUMBERS or len(leaf.dims) > 1:
            return None
        table = self.program.constants.get(instruction.name)
        if table is not None:
            return table.reshape(1, -1).astype(np.int64)
        words = instruction.operand_text.replace("true", "1").replace("false", "0")
        listed = integers(words)
        return np.array([listed], np.int64) if len(listed) == leaf.elements else None


def _read(instruction: Instruction) -> tuple[str, ...]:
    """The operands; the text of a constant may look like some."""
    return () if instruction.opcode == "constant" else instruction.operands


_ARITHMETIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "divide": lambda a, b: a // np.maximum(b, 1),  # of numbers that are not negative
    "remainder": lambda a, b: a % np.maximum(b, 1),
}
_COMPARED = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_KEPT = frozenset("bitcast convert copy copy-start reshape".split())


def _computed(instruction: Instruction, operands: list[np.ndarray]) -> np.ndarray | None:
    """The numbers of a result, by those of its operands; `None` where that is not done here."""
    opcode, first = instruction.opcode, operands[0]
    elements = instruction.shape.leaves[0].elements
    if opcode in _KEPT:
        return first
    if opcode == "dynamic-slice" and elements == 1 and len(operands) == 2:
        start = np.clip(operands[1][:, 0], 0, first.shape[1] - 1)
        rows = np.zeros_like(start) if first.shape[0] == 1 else np.arange(first.shape[0])
        looked_up: np.ndarray = first[rows, start][:, None]
        return looked_up
    if any(each.shape[1] != elements for each in operands):
        return None
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](first, operands[1])
    if opcode == "compare":
        how = _COMPARED.get(instruction.attribute("direction") or "")
        return None if how is None else how(first, operands[1]).astype(np.int64)
    if opcode == "select":
        return np.where(first != 0, operands[1], operands[2])
    return None


def sharded_tiles(written: str, devices: int) -> np.ndarray | None:
    """Read a sharding: for every device, the number of the piece it holds; `None` if unknown.

    >>> sharded_tiles("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 4).tolist()
    [0, 0, 1, 1]
    >>> sharded_tiles("{replicated}", 2).tolist()
    [0, 0]
    """
    if written.startswith("{replicated"):
        return np.zeros(devices, np.int64)
    match = _SHARDING.match(written)
    if match is None:
        return None
    dims = integers(match[1])
    order = match[2]
    numbers = (
        read_groups(f"[1,{math.prod(dims)}]{order}", devices)[0]
        if order.startswith("<=")
        else np.array(integers(order))
    )
    if numbers.size != devices or math.prod(dims) != devices:
        return None
    # The last dims of the tiles may be of devices that hold the same.
    ends = _KINDS_AT_END.search(written)
    kinds = ends[1].replace(" ", "").split(",") if ends else []
    if "last_tile_dim_replicate" in written:
        kinds = ["replicated"]
    if any(kind != "replicated" for kind in kinds):
        return None
    copies = math.prod(dims[len(dims) - len(kinds) :]) if kinds else 1
    tiles = np.empty(devices, np.int64)
    tiles[numbers] = np.arange(devices) // copies
    return tiles
