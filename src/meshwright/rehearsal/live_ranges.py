"""`LiveRanges`: from which instruction to which each buffer of a computation is needed.

A buffer is live from the instruction that makes it to the last one that reads it. Tuples, bitcasts,
loops and the ends of asynchronous pairs make nothing new: they pass on what they were given, and
so does what writes over an operand. A loop writes its next state where the last one was, and a
donated argument is overwritten by the result that takes its place, so these are not counted again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.program import Program

_PASSED_ON = ("bitcast", "optimization-barrier", "domain")
_NO_BUFFER = ("constant", "after-all", "partition-id", "replica-id", "iota")
_REFERENCES = ("tuple", "get-tuple-element", "bitcast")  # say where something is, read nothing

BufferId = tuple[str, int]  # the instruction that makes it, and the number of its result
_Buffers = frozenset[BufferId]  # more than one where a value may be in either


@dataclasses.dataclass(frozen=True)
class CallerBuffers:
    """What a computation may do with memory that its caller gave it.

    `counted`: whether arguments count here, and not with the caller; true of the entry alone.
    `results` are those written to the caller's memory or over an argument, `parameters` those
    that may be written over.
    """

    counted: bool = False
    results: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()


# In: a scheduled computation. Out: `{(instruction, result): (first, last)}`, positions in the
# schedule at which the buffer must exist, for every buffer that is new here. Invariant: two values
# in one buffer have one range. Example: for `%a = add(%p, %p); %b = negate(%a); ROOT %c = dot(%b,
# %b)` in an entry, p and c live from 0 to 3, and a from 1 to 3: b is in its place, since `negate`
# reads each element just before it writes it.
class LiveRanges:
    """First and last instruction at which each new buffer of a computation is needed."""

    def __init__(self, program: Program, computation: Computation, caller: CallerBuffers):
        self.program = program
        self.computation = computation
        self.caller = caller
        self.end = len(computation.instructions) - 1
        self.position = {each.name: at for at, each in enumerate(computation.instructions)}
        self.holds: dict[str, list[_Buffers]] = {}  # per instruction, per leaf of its shape
        self.ranges: dict[BufferId, list[int]] = {}
        self.updates: list[tuple[int, BufferId, _Buffers]] = []  # when, what, perhaps over what

    def compute(self) -> Mapping[BufferId, tuple[int, int]]:
        """Walk the schedule once, then join what shares memory."""
        started: dict[str, tuple[str, ...]] = {}  # what asynchronous work reads until it is done
        for at, instruction in enumerate(self.computation.instructions):
            reads = () if instruction.opcode in _REFERENCES else instruction.operands
            if instruction.opcode.endswith("-start"):
                started[instruction.name] = reads
            for operand in (*reads, *(name for each in reads for name in started.get(each, ()))):
                self._read(at, operand)
            self._define(at, instruction)
        self._extend_results()
        self._join_updates()
        return dict(self._counted())

    def _read(self, at: int, name: str) -> None:
        for buffers in self.holds.get(name, ()):
            for buffer in buffers:
                self.ranges[buffer][1] = max(at, self.ranges[buffer][1])

    def _define(self, at: int, instruction: Instruction) -> None:
        """Note what an instruction holds: buffers passed on to it and, for the rest, new ones."""
        held = _passed_on(instruction, self.holds)
        if held is None:
            over = _buffers_written_over(self.computation, instruction, self.holds)
            held = [
                over.get(number) or self._new(at, instruction, number)
                for number in _new_leaves(self.computation, instruction)
            ]
            self._note_updates(at, instruction)
        self.holds[instruction.name] = held

    def _new(self, at: int, instruction: Instruction, number: int) -> _Buffers:
        if instruction.opcode in _NO_BUFFER:
            return frozenset()
        self.ranges[instruction.name, number] = [at, at]
        return frozenset({(instruction.name, number)})

    def _note_updates(self, at: int, instruction: Instruction) -> None:
        """Note what an instruction may write over, and when it is done with that."""
        if lists_all_aliases(instruction):
            return
        if instruction.opcode.endswith("-start"):
            users = self.computation.users.get(instruction.name, ())
            at = max((self.position[user.name] for user in users), default=at)
        for number, operand in updated(self.program.computations, instruction):
            self._note(at, (instruction.name, number), self._operand(instruction, operand))
        for number, operand in elementwise(self.program.computations, instruction):
            old = self._operand(instruction, operand)
            # The place of an argument, even a donated one, is for a result.
            if not any(map(self._is_parameter, old)):
                self._note(at, (instruction.name, number), old)

    def _note(self, at: int, new: BufferId, old: _Buffers) -> None:
        if new in self.ranges and old:
            self.updates.append((at, new, old))

    def _operand(self, instruction: Instruction, operand: int) -> _Buffers:
        held = self.holds.get(instruction.operands[operand], [])
        return held[0] if len(held) == 1 else frozenset()

    def _extend_results(self) -> None:
        """Keep what is returned to the end, unless it is in memory that is counted elsewhere.

        The results of the whole program are allocated by its caller, before it starts.
        """
        for number, buffers in enumerate(self.holds[self.computation.root.name]):
            for buffer in buffers:
                if number in self.caller.results and not self._is_parameter(buffer):
                    self.ranges.pop(buffer, None)
                elif buffer in self.ranges:
                    first = 0 if self.caller.counted else self.ranges[buffer][0]
                    self.ranges[buffer] = [first, self.end]

    def _join_updates(self) -> None:
        """Give an update the place of what it updates where that is needed no more."""
        joined: dict[BufferId, BufferId] = {}  # chains of updates share their first buffer
        for at, new, candidates in self.updates:
            for old in (joined.get(buffer, buffer) for buffer in candidates):
                if new in self.ranges and old in self.ranges and self._may_replace(at, old, new):
                    first, last = self.ranges.pop(new)
                    self.ranges[old] = [min(first, self.ranges[old][0]), last]
                    joined[new] = old

    def _may_replace(self, at: int, old: BufferId, new: BufferId) -> bool:
        by_name = self.computation.by_name
        maker = by_name[old[0]]
        if maker.opcode == "parameter" and int(maker.operand_text) not in self.caller.parameters:
            return False
        same_size = _place(maker, old[1]) == _place(by_name[new[0]], new[1])
        return same_size and self.ranges[old][1] == at

    def _counted(self) -> Iterator[tuple[BufferId, tuple[int, int]]]:
        """Yield what counts here: arguments for the whole run, those of a caller not at all."""
        for buffer, (first, last) in self.ranges.items():
            if not self._is_parameter(buffer):
                yield buffer, (first, last)
            elif self.caller.counted:
                yield buffer, (0, self.end)

    def _is_parameter(self, buffer: BufferId) -> bool:
        return self.computation.by_name[buffer[0]].opcode == "parameter"


def _buffers_written_over(
    computation: Computation, instruction: Instruction, holds: Mapping[str, list[_Buffers]]
) -> dict[int, _Buffers]:
    """Return the buffers that an instruction says it leaves its results in, by result."""
    buffers = {}
    for number, (operand, leaf) in written_over(computation, instruction).items():
        held = holds.get(instruction.operands[operand], [])
        if leaf < len(held):
            buffers[number] = held[leaf]
    return buffers


def _passed_on(
    instruction: Instruction, holds: Mapping[str, list[_Buffers]]
) -> list[_Buffers] | None:
    """Return buffers of operands that an instruction passes on; `None` if it makes new ones."""
    opcode = instruction.opcode
    operands = [holds.get(name, []) for name in instruction.operands]
    if opcode == "tuple":
        return [buffers for each in operands for buffers in each]
    if opcode == "get-tuple-element":
        return [_element(instruction, operands[0])]
    if opcode == "while" or opcode in _PASSED_ON or opcode.endswith(("-done", "-update")):
        return operands[0] if operands else []
    return None


def _element(instruction: Instruction, held: list[_Buffers]) -> _Buffers:
    number = int(instruction.attribute("index") or 0)
    return held[number] if number < len(held) else frozenset()


def _new_leaves(computation: Computation, instruction: Instruction) -> Iterable[int]:
    """Return which leaves are new: a `-start` lists its operands before its results."""
    leaves = instruction.shape.leaves
    if instruction.opcode == "copy-start":  # (copy, source, context)
        return (0,)
    if instruction.opcode.endswith("-start"):
        reads = tuple(
            leaf for operand in computation.operands(instruction) for leaf in operand.shape.leaves
        )
        if len(leaves) > len(reads) and leaves[: len(reads)] == reads:
            return range(len(reads), len(leaves))
    return range(max(1, len(leaves)))


def bytes_in(instruction: Instruction, number: int, space: int = 0) -> int:
    """Bytes that a result takes of a memory space: by default, of the device's main memory.

    With what a TPU's tiles add. Other spaces are the host's memory (`HOST_SPACE`) and a TPU's own
    scratch memory.
    """
    at, size = _place(instruction, number)
    return size if at == space else 0


def _place(instruction: Instruction, number: int) -> tuple[int, int]:
    """Return the memory space of a result, and its bytes."""
    shape = instruction.shape
    if number >= len(shape.leaves):
        return 0, 0
    return shape.spaces[number], shape.stored[number]


# Which results of an instruction the text says are written over its operands. Fusions and custom
# calls may have to: `output_to_operand_aliasing={{0}: (1, {})}` puts result 0 into operand 1. A
# TPU's compiler lists for each instruction what shares memory: `"aliasing_operands":{"lists":
# [{"indices":["0","2"]}]}` numbers operands and then results, so for two operands that is result 0
# in operand 0.

_MUST_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
_LISTED_ALIASES = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{"indices":\[[^\]]*\]\},?)*)\]')
_INDICES = re.compile(r"\[([^\]]*)\]")

OperandLeaf = tuple[int, int]  # the number of an operand and of one of its arrays


def lists_all_aliases(instruction: Instruction) -> bool:
    """Whether the text lists all operands that the instruction writes over, as TPU compilers do."""
    return _LISTED_ALIASES.search(instruction.attributes) is not None


def written_over(computation: Computation, instruction: Instruction) -> dict[int, OperandLeaf]:
    """Return which operand each result is written over, where both have the same size."""
    results = instruction.shape.leaves
    operands = [operand.shape.leaves for operand in computation.operands(instruction)]
    aliases: dict[int, OperandLeaf] = {}
    for result, (operand, leaf) in (*_must_alias(instruction), *_listed_aliases(instruction)):
        if result < len(results) and operand < len(operands) and leaf < len(operands[operand]):
            if results[result].bytes == operands[operand][leaf].bytes:
                aliases.setdefault(result, (operand, leaf))
    return aliases


def _must_alias(instruction: Instruction) -> Iterator[tuple[int, OperandLeaf]]:
    """Yield `output_to_operand_aliasing`; results and operands in nested tuples are left out."""
    text = instruction.attribute("output_to_operand_aliasing") or ""
    for result, operand, leaf in _MUST_ALIAS.findall(text):
        yield int(result or 0), (int(operand), int(leaf or 0))


def _listed_aliases(instruction: Instruction) -> Iterator[tuple[int, OperandLeaf]]:
    lists = _LISTED_ALIASES.search(instruction.attributes)
    operands = len(instruction.operands)
    for indices in _INDICES.findall(lists[1]) if lists else ():
        numbers = sorted(int(number) for number in re.findall(r"\d+", indices))
        for number in numbers:
            if numbers[0] < operands <= number:
                yield number - operands, (numbers[0], 0)


# Which results may take the place of an operand, where the text does not say. Some instructions
# replace a few elements of an array, some read each element just before they write the one in its
# place, and fusions do either. XLA lets them write over the array where the old one is needed no
# more. Example: a fusion whose root is dynamic-update-slice(bitcast(param 1), ...) updates operand
# 1; one of add(multiply(param 0, c), param 1) may write over either operand, element by element.

_UPDATES = ("dynamic-update-slice", "scatter")
_SAME_BYTES = ("bitcast", "reshape")
_REDUCED = ("all-reduce", "all-reduce-start")  # over devices, each element by itself
_ELEMENTWISE = frozenset(
    "abs add and bitcast ceil clamp compare convert cosine divide exponential"
    " exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum multiply"
    " negate not or power remainder round-nearest-afz round-nearest-even rsqrt select"
    " shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tanh"
    " xor".split()
)


def elementwise(
    computations: Mapping[str, Computation], instruction: Instruction
) -> Iterator[tuple[int, int]]:
    """Yield elementwise results of an operand: their number, and that of the operand."""
    numbers = range(len(instruction.operands))
    if instruction.opcode in _REDUCED:
        yield from zip(numbers, numbers, strict=True)
    elif instruction.opcode in _ELEMENTWISE:
        yield from ((0, number) for number in numbers)
    elif instruction.opcode == "fusion":
        yield from _elementwise_in_fusion(_fused(computations, instruction))


def updated(
    computations: Mapping[str, Computation], instruction: Instruction
) -> Iterator[tuple[int, int]]:
    """Yield results that are an operand with some elements replaced, and its number."""
    if instruction.opcode in _UPDATES:
        for number in range(max(1, len(instruction.shape.leaves))):
            yield number, number
    elif instruction.opcode == "dynamic-update-slice-start":
        yield len(instruction.operands), 0  # ((operands), result, context)
    elif instruction.opcode == "fusion-start":
        fused = _fused(computations, instruction)
        parameter = _updated_parameter(computations, fused, fused.root)
        if parameter is not None:
            yield len(instruction.operands), parameter
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
    """Return the parameter of a fusion that a result is an update of, if it is one."""
    # Back from the result, through updates of updates, to a parameter or anything else.
    number, updates = 0, 0
    while result.opcode != "parameter":
        if result.opcode == "get-tuple-element":
            number, operand = int(result.attribute("index") or 0), 0
        elif result.opcode in _SAME_BYTES:
            operand = 0
        else:
            base = dict(updated(computations, result)).get(number)
            if base is None:
                return None
            number, operand, updates = 0, base, updates + 1
        result = fused.by_name[result.operands[operand]]
    return int(result.operand_text) if updates else None


def _elementwise_in_fusion(fused: Computation) -> Iterator[tuple[int, int]]:
    """Yield elementwise results of a fusion, each with the number of the parameter."""
    results = _results(fused)
    for number, parameter in fused.parameters.items():
        reached = _reached_elementwise(fused, parameter)
        for place, result in enumerate(results):
            if result is not parameter and result.name in reached:
                yield place, number


def _reached_elementwise(fused: Computation, parameter: Instruction) -> set[str]:
    """Return what is elementwise in a parameter; nothing, if it is read otherwise too."""
    reached, waiting = {parameter.name}, [parameter]
    while waiting:
        for user in fused.users.get(waiting.pop().name, ()):
            if user.opcode in _ELEMENTWISE and user.name not in reached:
                reached.add(user.name)
                waiting.append(user)
            elif user.opcode not in (*_ELEMENTWISE, "tuple", "reduce"):
                return set()
    return reached
