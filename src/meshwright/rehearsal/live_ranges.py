"""How long each piece of memory of a computation is needed.

A piece lives from the instruction that makes it to the last one that reads it. Tuples, bitcasts,
loops and the ends of asynchronous pairs make nothing new: they hand on what they were given, and
so does what writes over an operand. A loop writes its next state where the last one was, and a
donated argument is overwritten by the result that takes its place, so these are not counted again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.program import Program

_HANDED_ON = ("bitcast", "optimization-barrier", "domain")
_NOTHING = ("constant", "after-all", "partition-id", "replica-id", "iota")
_ARRAY = re.compile(r"[a-z][a-z0-9]*\[[^\]]*\](?:\{[^{}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")  # a TPU's own scratch memory
_POINTS = ("tuple", "get-tuple-element", "bitcast")  # say where something is, and read nothing

Piece = tuple[str, int]  # an instruction and the number of one of its results


@dataclasses.dataclass(frozen=True)
class Lease:
    """What a computation may do with memory that its caller gave it."""

    counted: bool = False  # whether arguments count here, and not with the caller
    results: frozenset[int] = frozenset()  # those whose place is an argument's, or the caller's
    parameters: frozenset[int] = frozenset()  # those that may be written over


class Lives:
    """First and last instruction that each new piece of a computation's memory is needed at."""

    def __init__(self, program: Program, computation: Computation, lease: Lease):
        self.program = program
        self.computation = computation
        self.lease = lease
        self.end = len(computation.instructions) - 1
        self.position = {made.name: at for at, made in enumerate(computation.instructions)}
        self.holds: dict[str, list[frozenset[Piece]]] = {}
        self.lives: dict[Piece, list[int]] = {}
        self.updates: list[tuple[int, Piece, frozenset[Piece]]] = []

    def found(self) -> Mapping[Piece, tuple[int, int]]:
        begun: dict[str, tuple[str, ...]] = {}  # what asynchronous work reads until it is done
        for at, instruction in enumerate(self.computation.instructions):
            reads = () if instruction.opcode in _POINTS else instruction.operands
            if instruction.opcode.endswith("-start"):
                begun[instruction.name] = reads
            for operand in (*reads, *(name for each in reads for name in begun.get(each, ()))):
                self._read(at, operand)
            self._make(at, instruction)
        self._leave()
        self._update()
        return dict(self._counted())

    def _read(self, at: int, name: str) -> None:
        for pieces in self.holds.get(name, ()):
            for piece in pieces:
                self.lives[piece][1] = max(at, self.lives[piece][1])

    def _make(self, at: int, instruction: Instruction) -> None:
        """Note what an instruction holds: what it is handed and, for the rest, new pieces."""
        found = _handed_on(instruction, self.holds)
        if found is None:
            over = _written_over(self.computation, instruction, self.holds)
            found = [
                over.get(number) or self._new(at, instruction, number)
                for number in _made(self.computation, instruction)
            ]
            self._note_updates(at, instruction)
        self.holds[instruction.name] = found

    def _new(self, at: int, instruction: Instruction, number: int) -> frozenset[Piece]:
        if instruction.opcode in _NOTHING:
            return frozenset()
        self.lives[instruction.name, number] = [at, at]
        return frozenset({(instruction.name, number)})

    def _note_updates(self, at: int, instruction: Instruction) -> None:
        """What it may write over, and when it is done with that."""
        if says_all(instruction):
            return
        if instruction.opcode.endswith("-start"):
            users = self.computation.users.get(instruction.name, ())
            at = max((self.position[user.name] for user in users), default=at)
        for number, operand in updated(self.program.computations, instruction):
            self._note(at, (instruction.name, number), self._given(instruction, operand))
        for number, operand in by_element(self.program.computations, instruction):
            given = self._given(instruction, operand)
            if not any(map(self._is_parameter, given)):  # that place is for a result
                self._note(at, (instruction.name, number), given)

    def _note(self, at: int, new: Piece, given: frozenset[Piece]) -> None:
        if new in self.lives and given:
            self.updates.append((at, new, given))

    def _given(self, instruction: Instruction, operand: int) -> frozenset[Piece]:
        held = self.holds.get(instruction.operands[operand], [])
        return held[0] if len(held) == 1 else frozenset()

    def _leave(self) -> None:
        """What is returned lives to the end, unless its place is another's.

        A program's own results have their place from the start: whoever runs it sets it aside.
        """
        for number, pieces in enumerate(self.holds[self.computation.root.name]):
            for piece in pieces:
                if number in self.lease.results and not self._is_parameter(piece):
                    self.lives.pop(piece, None)
                elif piece in self.lives:
                    first = 0 if self.lease.counted else self.lives[piece][0]
                    self.lives[piece] = [first, self.end]

    def _update(self) -> None:
        """An update takes the place of what it updates where that is needed no more."""
        now: dict[Piece, Piece] = {}
        for at, new, given in self.updates:
            for old in (now.get(piece, piece) for piece in given):
                if new in self.lives and old in self.lives and self._may_go(at, old, new):
                    first, last = self.lives.pop(new)
                    self.lives[old] = [min(first, self.lives[old][0]), last]
                    now[new] = old

    def _may_go(self, at: int, old: Piece, new: Piece) -> bool:
        by_name = self.computation.by_name
        made = by_name[old[0]]
        if made.opcode == "parameter" and int(made.operand_text) not in self.lease.parameters:
            return False
        same = main_memory(made, old[1]) == main_memory(by_name[new[0]], new[1])
        return same and self.lives[old][1] == at

    def _counted(self) -> Iterator[tuple[Piece, tuple[int, int]]]:
        """Arguments stay for as long as the program runs; those of a caller are counted there."""
        for piece, (first, last) in self.lives.items():
            if not self._is_parameter(piece):
                yield piece, (first, last)
            elif self.lease.counted:
                yield piece, (0, self.end)

    def _is_parameter(self, piece: Piece) -> bool:
        return self.computation.by_name[piece[0]].opcode == "parameter"


def _written_over(
    computation: Computation, instruction: Instruction, holds: Mapping[str, list[frozenset[Piece]]]
) -> dict[int, frozenset[Piece]]:
    """The pieces that an instruction says it leaves its results in."""
    found = {}
    for number, (operand, leaf) in written_over(computation, instruction).items():
        held = holds.get(instruction.operands[operand], [])
        if leaf < len(held):
            found[number] = held[leaf]
    return found


def _handed_on(
    instruction: Instruction, holds: Mapping[str, list[frozenset[Piece]]]
) -> list[frozenset[Piece]] | None:
    """What an instruction passes on of its operands, or `None` where it makes something."""
    opcode = instruction.opcode
    given = [holds.get(name, []) for name in instruction.operands]
    if opcode == "tuple":
        return [pieces for each in given for pieces in each]
    if opcode == "get-tuple-element":
        return [_element(instruction, given[0])]
    if opcode == "while" or opcode in _HANDED_ON or opcode.endswith(("-done", "-update")):
        return given[0] if given else []
    return None


def _element(instruction: Instruction, whole: list[frozenset[Piece]]) -> frozenset[Piece]:
    number = int(instruction.attribute("index") or 0)
    return whole[number] if number < len(whole) else frozenset()


def _made(computation: Computation, instruction: Instruction) -> Iterable[int]:
    """Which of its leaves are new. What begins asynchronous work lists what it reads as well."""
    leaves = instruction.shape.leaves
    if instruction.opcode == "copy-start":
        return (0,)
    if instruction.opcode.endswith("-start"):
        reads = tuple(
            leaf for operand in computation.operands(instruction) for leaf in operand.shape.leaves
        )
        if len(leaves) > len(reads) and leaves[: len(reads)] == reads:
            return range(len(reads), len(leaves))
    return range(max(1, len(leaves)))


def main_memory(instruction: Instruction, number: int) -> int:
    """What a piece takes of the device's main memory."""
    leaves = instruction.shape.leaves
    if number >= len(leaves) or _ON_CHIP.search(_layouts(instruction.shape.text)[number]):
        return 0
    return leaves[number].bytes


@functools.lru_cache(maxsize=4096)
def _layouts(text: str) -> list[str]:
    return _ARRAY.findall(text)


# Which of its results an instruction says it writes over its operands.
#
# Fusions and custom calls may have to: `output_to_operand_aliasing`. A TPU's compiler says of each
# instruction what it came to share: `aliasing_operands` numbers operands and then results.


_MUST = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
_SHARED = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{"indices":\[[^\]]*\]\},?)*)\]')
_GROUP = re.compile(r"\[([^\]]*)\]")

Place = tuple[int, int]  # the number of an operand and of one of its arrays


def says_all(instruction: Instruction) -> bool:
    """Whether the text tells of everything that the instruction writes over."""
    return _SHARED.search(instruction.attributes) is not None


def written_over(computation: Computation, instruction: Instruction) -> dict[int, Place]:
    """Per result that is an operand's memory, which; only where both have the same size."""
    results = instruction.shape.leaves
    operands = [operand.shape.leaves for operand in computation.operands(instruction)]
    found: dict[int, Place] = {}
    for result, (operand, leaf) in (*_must(instruction), *_shared(instruction)):
        if result < len(results) and operand < len(operands) and leaf < len(operands[operand]):
            if results[result].bytes == operands[operand][leaf].bytes:
                found.setdefault(result, (operand, leaf))
    return found


def _must(instruction: Instruction) -> Iterator[tuple[int, Place]]:
    """Results and operands in tuples within tuples are left out."""
    text = instruction.attribute("output_to_operand_aliasing") or ""
    for result, operand, leaf in _MUST.findall(text):
        yield int(result or 0), (int(operand), int(leaf or 0))


def _shared(instruction: Instruction) -> Iterator[tuple[int, Place]]:
    said = _SHARED.search(instruction.attributes)
    count = len(instruction.operands)
    for group in _GROUP.findall(said[1]) if said else ():
        numbers = sorted(int(number) for number in re.findall(r"\d+", group))
        for number in numbers:
            if numbers[0] < count <= number:
                yield number - count, (numbers[0], 0)


# Which results may take the place of an operand, where the text does not say.
#
# Some instructions replace a few elements of an array, some read each element just before they
# write the one in its place, and fusions do either. The compiler lets them write over the array
# where nobody needs the old one any more.


_UPDATES = ("dynamic-update-slice", "scatter")
_SAME_BYTES = ("bitcast", "reshape")
_REDUCED = ("all-reduce", "all-reduce-start")  # over devices, each element by itself
_BY_ELEMENT = frozenset(
    "abs add and bitcast ceil clamp compare convert cosine divide exponential"
    " exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum multiply"
    " negate not or power remainder round-nearest-afz round-nearest-even rsqrt select"
    " shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tanh"
    " xor".split()
)


def by_element(
    computations: Mapping[str, Computation], instruction: Instruction
) -> Iterator[tuple[int, int]]:
    """Results that need an operand's elements only in their own place, with its number."""
    numbers = range(len(instruction.operands))
    if instruction.opcode in _REDUCED:
        yield from zip(numbers, numbers, strict=True)
    elif instruction.opcode in _BY_ELEMENT:
        yield from ((0, number) for number in numbers)
    elif instruction.opcode == "fusion":
        yield from _by_element(_fused(computations, instruction))


def updated(
    computations: Mapping[str, Computation], instruction: Instruction
) -> Iterator[tuple[int, int]]:
    """Results that are an operand with some elements replaced, each with the operand's number."""
    if instruction.opcode in _UPDATES:
        for number in range(max(1, len(instruction.shape.leaves))):
            yield number, number
    elif instruction.opcode == "fusion":
        fused = _fused(computations, instruction)
        for number, result in enumerate(_results(fused)):
            parameter = _updated_parameter(computations, fused, result)
            if parameter is not None:
                yield number, parameter


def _fused(computations: Mapping[str, Computation], fusion: Instruction) -> Computation:
    return next(computations[name] for how, name in fusion.called if how == "calls")


def _results(fused: Computation) -> tuple[Instruction, ...]:
    return fused.operands(fused.root) if fused.root.opcode == "tuple" else (fused.root,)


def _updated_parameter(
    computations: Mapping[str, Computation], fused: Computation, result: Instruction
) -> int | None:
    """Which parameter of a fusion a result is an update of, if it is one."""
    number, updates = 0, 0
    while result.opcode != "parameter":
        if result.opcode == "get-tuple-element":
            number, operand = int(result.attribute("index") or 0), 0
        elif result.opcode in _SAME_BYTES:
            operand = 0
        else:
            found = dict(updated(computations, result)).get(number)
            if found is None:
                return None
            number, operand, updates = 0, found, updates + 1
        result = fused.by_name[result.operands[operand]]
    return int(result.operand_text) if updates else None


def _by_element(fused: Computation) -> Iterator[tuple[int, int]]:
    """Results of a fusion that need no element of a parameter but the one in their place."""
    results = _results(fused)
    for number, parameter in fused.parameters.items():
        reached = _reached(fused, parameter)
        for place, result in enumerate(results):
            if result is not parameter and result.name in reached:
                yield place, number


def _reached(fused: Computation, parameter: Instruction) -> set[str]:
    """What is made of a parameter element by element; nothing, if it is read otherwise too."""
    found, waiting = {parameter.name}, [parameter]
    while waiting:
        for user in fused.users.get(waiting.pop().name, ()):
            if user.opcode in _BY_ELEMENT and user.name not in found:
                found.add(user.name)
                waiting.append(user)
            elif user.opcode not in (*_BY_ELEMENT, "tuple", "reduce"):
                return set()
    return found
