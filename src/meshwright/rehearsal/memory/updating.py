"""Which results may take the place of an operand, where the text does not say.

Some instructions replace a few elements of an array, some read each element just before they
write the one in its place, and fusions do either. The compiler lets them write over the array
where nobody needs the old one any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.rehearsal.programs.instructions import Computation, Instruction

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
    return int(result.inside) if updates else None


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
