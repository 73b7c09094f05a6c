"""Names for kinds of dims, for people: from where they stand in the arguments.

The rows of data are `batch`, what attention goes along, or else the next dim of tokens or of
vectors, `seq`. What a lookup goes along is `vocab`, what weights of several products are stacked
along `experts`, the width that most bytes of weights have `embed`. Others are called by a weight
that has them: `mlp/up dim 2`. Where `seq` is in an array twice, one of the two is `queries`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

from meshwright.planning.dim_groups import WHOLE, DimGroups
from meshwright.planning.traced_program import TracedProgram
from meshwright.planning.traced_step import TracedStep

EVERY = "all weights"  # the name of the dims of all weights together
_WORDS = 2  # of a path, from its end
_QUERIES = "queries"


def name_kinds(step: TracedStep, program: TracedProgram, groups: DimGroups) -> tuple[str, ...]:
    """Return a name for every kind, all different."""
    names: dict[int, str] = {}

    def give(kind: int, name: str) -> None:
        if kind > WHOLE and kind not in names and name not in names.values():
            names[kind] = name

    data = data_values(step, program)
    for kind in batch_kinds(program, groups, data):
        give(kind, "batch")
    attended = list(set(groups.queries.values()) - names.keys())
    if len(attended) == 1:
        give(attended[0], "seq")
    for value in data:
        after = 2 if (value, 0) in program.stacked else 1  # microbatches, rows, and then
        if len(groups.layout[value]) > after and _has_rows(program, value, after):
            give(groups.layout[value][after][0], "seq")
    arguments = set(program.arguments)
    for operation in program.operations:
        if operation.primitive == "gather" and operation.inputs[0] in arguments:
            for dim in operation.dims:
                if dim.kind == "sum" and dim.at and dim.at[0][0] == 0:
                    give(groups.layout[operation.inputs[0]][dim.at[0][1]][0], "vocab")
    for kind in _experts(program, groups, data):
        give(kind, "experts")
    if not groups.weights:  # else the weights have no width in common, and no other is the model's
        for kind in _widths(program, groups, data)[:1]:
            give(kind, "embed")
    give(groups.every, EVERY)
    places = _places(step, program, groups)
    for kind in sorted(set(range(groups.count)) - groups.queries.keys()):
        give(kind, places.get(kind, f"inner {_sizes(groups.sizes[kind])}"))
        number = 2
        while kind not in names:
            base = places.get(kind, f"inner {_sizes(groups.sizes[kind])}")
            give(kind, f"{base} #{number}")
            number += 1
    for kind, same in groups.queries.items():
        give(kind, _QUERIES if names[same] == "seq" else f"{_QUERIES} of {names[same]}")
    return tuple(names[kind] for kind in range(groups.count))


def is_queries(name: str) -> bool:
    """Whether a kind of this name is that of queries."""
    return name.split(" of ")[0] == _QUERIES


def _widths(program: TracedProgram, groups: DimGroups, data: Sequence[int]) -> list[int]:
    """The kinds that weights have, that of most bytes first: biases are many, and small."""
    held: collections.Counter[int] = collections.Counter()
    for value in program.arguments:
        if value not in data and len(groups.layout[value]) > 1:
            for kind in {kind for kind, _ in groups.layout[value] if kind > WHOLE}:
                held[kind] += program.bytes[value]
    # Of two widths that as much has, the hidden one is mostly the larger.
    return sorted(held, key=lambda kind: (-held[kind], groups.sizes[kind], kind))


def _experts(program: TracedProgram, groups: DimGroups, data: Sequence[int]) -> Iterator[int]:
    """Yield kinds along which products run side by side, each with weights of its own."""
    batch = set(batch_kinds(program, groups, data))
    weights = {
        kind
        for value in program.arguments
        if value not in data and len(groups.layout[value]) > 2
        for kind, _ in groups.layout[value]
    }
    for operation in program.operations:
        if operation.primitive != "dot_general":
            continue
        kinds = [{kind for kind, _ in groups.layout[value]} for value in operation.inputs]
        if sum(bool(here & batch) for here in kinds) != 1:  # one operand is of weights alone
            continue
        if all(dim.kind != "sum" for dim in operation.dims):  # a scale is no product
            continue
        for dim in operation.dims:
            if dim.kind == "free" and {0, 1} <= {operand for operand, _ in dim.at}:
                operand, at = dim.at[0]
                kind = groups.layout[operation.inputs[operand]][at][0]
                if kind in weights and kind not in batch:
                    yield kind


def data_values(step: TracedStep, program: TracedProgram) -> list[int]:
    """Return the arguments that are data: what is no state, unless there is nothing else.

    State are the first argument, donated ones, and what the step returns anew.
    """
    numbers = [n for n, part in enumerate(step.arguments) for _ in part.arrays]
    anew = set(step.carried.values())
    data = [
        value
        for position, (value, number) in enumerate(zip(program.arguments, numbers, strict=True))
        if number != 0 and number not in step.donate_argnums and position not in anew
    ]
    return data or list(program.arguments)


def batch_kinds(program: TracedProgram, groups: DimGroups, data: Sequence[int]) -> list[int]:
    """The kinds of the rows of data: of their first dim or, where a loop goes along that, of the
    one after it, as of microbatches."""
    made = {
        operation.inputs[0]: operation.outputs[0]
        for operation in program.operations
        if operation.primitive == "reshape"
    }
    kinds = []
    for value in data:
        stacks = [each for each in (value, made.get(value, value)) if (each, 0) in program.stacked]
        dims = groups.layout[stacks[0]][1:] if stacks else groups.layout[value]
        if dims and dims[0][0] > WHOLE:
            kinds.append(dims[0][0])
    return list(dict.fromkeys(kinds))


def _has_rows(program: TracedProgram, value: int, after: int) -> bool:
    """Whether such a dim of data goes along a row: of tokens or vectors, not features."""
    return "int" in program.dtypes[value] or len(program.shapes[value]) > after + 1


def _places(step: TracedStep, program: TracedProgram, groups: DimGroups) -> dict[int, str]:
    """The place of each kind in the arguments: the last words of the shortest path that has it."""
    found: dict[int, str] = {}
    data = set(data_values(step, program))
    entries = sorted(
        zip(step.paths, program.arguments, strict=True),
        key=lambda entry: (entry[1] in data, len(entry[0].split("/"))),
    )
    for path, value in entries:
        words = [word for word in path.split("/") if not re.fullmatch(r"\d+|value|kernel", word)]
        for dim, (kind, _) in enumerate(groups.layout[value]):
            found.setdefault(kind, f"{'/'.join(words[-_WORDS:])} dim {dim}")
    return found


def _sizes(sizes: Sequence[int]) -> str:
    return "/".join(map(str, sizes))
