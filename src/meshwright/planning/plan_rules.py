"""`PlanRules`: a plan as plain rules and constraints, for those who write it down themselves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright._compat_lowering import kernel_name
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import plural
from meshwright.errors import PlanningError, short
from meshwright.planning.dim_groups import WHOLE
from meshwright.planning.plan_layouts import SMALLEST, Layouts
from meshwright.planning.plan_text import short_name
from meshwright.planning.traced_step import TracedStep
from meshwright.rehearsal.callbacks import source_of

_MOST_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class ConstraintLine:
    """A `with_sharding_constraint` that a plan writes: the line it belongs to, on what, the spec.

    `array` says which array of the line: a result or an operand of its operation, with the groups
    of its dims. `kernel`: it is one of a Pallas kernel, which takes a `shard_map` with the spec.
    """

    source: str
    array: str
    spec: PartitionSpec
    kernel: bool = False

    def code(self) -> str:
        """The call, as it would be written."""
        spec = spec_text(self.spec)
        if not self.kernel:
            return f"jax.lax.with_sharding_constraint(..., {spec})"
        side = "in_specs" if self.array.startswith("operand") else "out_specs"
        return f"jax.shard_map(..., {side}=(..., {spec}, ...))"


@dataclasses.dataclass(frozen=True, repr=False)
class PlanRules(Shown):
    """A plan in words that work without it: rules for an argument, constraints for the step.

    `rules` are pairs of a regular expression and a `PartitionSpec`, as `partition(..., rules=)`
    takes them. `constraints` are in the order of the step. Prints itself; `to_json()`.
    """

    mesh: str
    argument: str
    rules: tuple[tuple[str, PartitionSpec], ...]
    constraints: tuple[ConstraintLine, ...]

    def __repr__(self) -> str:
        return short_repr(self, self._headline())

    def _headline(self) -> str:
        count = plural(len(self.constraints), "constraint")
        return f"{plural(len(self.rules), 'rule')} for {self.argument} and {count} on {self.mesh}"

    def _sheet(self) -> Sheet:
        written = "\n".join(f"    ({pattern!r}, {spec_text(s)})," for pattern, s in self.rules)
        code = f"rules = [\n{written}\n]" if self.rules else "rules = []"
        rest = len(self.constraints) - _MOST_SHOWN
        lines = Table(
            ["line", "array", "spec"],
            [
                [each.source, each.array, spec_text(each.spec)]
                for each in self.constraints[:_MOST_SHOWN]
            ],
            [False, False, False],
            f"... and {plural(rest, 'constraint')} more; to_json() has all" if rest > 0 else "",
        )
        if not self.constraints:
            return Sheet(self._headline(), [code])
        head = "\njax.lax.with_sharding_constraint(array, spec), where the step has these lines"
        if any(each.kernel for each in self.constraints):
            head += ";\njax.shard_map with these specs around kernels"
        return Sheet(self._headline(), [code, head, lines])

    def to_json(self) -> dict[str, Any]:
        """Return rules and constraints as plain data; specs are lists of entries."""
        return {
            "mesh": self.mesh,
            "argument": self.argument,
            "rules": [[pattern, list(spec)] for pattern, spec in self.rules],
            "constraints": [
                {
                    "source": each.source,
                    "array": each.array,
                    "spec": list(each.spec),
                    "kernel": each.kernel,
                }
                for each in self.constraints
            ],
        }


def spec_text(spec: PartitionSpec) -> str:
    """Write a spec as code.

    >>> spec_text(PartitionSpec(("dp", "fsdp"), None, "tp"))
    "P(('dp', 'fsdp'), None, 'tp')"
    """
    return f"P({', '.join(map(repr, spec))})"


def make_rules(
    step: TracedStep,
    layouts: Layouts,
    specs: Any,
    groups: Sequence[str],
    mesh: str,
    argument: int,
) -> PlanRules:
    """Write a plan as rules for one argument, whose specs are `specs`, and constraints."""
    if isinstance(argument, bool) or argument not in range(len(step.arguments)):
        raise PlanningError(
            f"argument: the step has no argument {short(argument)}; it has "
            f"{plural(len(step.arguments), 'argument')}, the first is 0.",
            option="argument",
        )
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    found = [leaf for leaf in leaves if isinstance(leaf, PartitionSpec)]
    paths = step.arguments[argument].paths
    name = step.names[argument] or f"argument {argument}"
    return PlanRules(
        mesh, name, suffix_rules(paths, found), tuple(constraint_lines(layouts, groups))
    )


# The shortest end of a path that all leaves with that end share a spec for. No rule is reached in
# vain: if the end of one leaf were inside that of another, the other's would have been as short.
def suffix_rules(
    paths: Sequence[str], specs: Sequence[PartitionSpec]
) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return rules that give every path its spec; those that are replicated are the last rule.

    >>> P = PartitionSpec
    >>> rules = suffix_rules(["a/w", "b/w", "b/bias"], [P("tp"), P("tp"), P()])
    >>> [(pattern, spec_text(spec)) for pattern, spec in rules]
    [('(^|/)w$', "P('tp')"), ('.*', 'P()')]
    """
    by_end: dict[str, set[PartitionSpec]] = {}
    for path, spec in zip(paths, specs, strict=True):
        for end in _ends(path):
            by_end.setdefault(end, set()).add(spec)
    rules: dict[str, PartitionSpec] = {}
    for path, spec in zip(paths, specs, strict=True):
        if any(spec):
            pattern = next(each for each in _ends(path) if len(by_end[each]) == 1)
            rules[pattern] = spec
    result = list(rules.items())
    if any(not any(spec) for spec in specs):
        result.append((".*", PartitionSpec()))  # type: ignore[no-untyped-call]
    return tuple(result)


def _ends(path: str) -> list[str]:
    """Patterns for the ends of a path, the shortest first, and for this path alone."""
    words = path.split("/")
    ends = ["/".join(words[-count:]) for count in range(1, len(words) + 1)]
    return [*(f"(^|/){re.escape(end)}$" for end in ends), f"^{re.escape(path)}$"]


def constraint_lines(layouts: Layouts, groups: Sequence[str]) -> list[ConstraintLine]:
    """List the constraints that a plan writes around operations, each once.

    An operand that lies as it is needed, and a result that is kept as it is made, are said once;
    that an operand of a product is gathered is left to the partitioner. Of kernels all operands
    are listed.
    """
    program, layout = layouts.costs.program, layouts.costs.groups.layout
    found: dict[ConstraintLine, None] = {}

    def add(source: str, what: str, value: int, spec: PartitionSpec, kernel: bool) -> None:
        if program.bytes[value] >= SMALLEST:
            dims = ", ".join(
                str(size) if kind <= WHOLE else short_name(groups[kind], 14)
                for kind, size in layout[value]
            )
            found[ConstraintLine(source, f"{what} [{dims}]", spec, kernel)] = None

    for number, operation in enumerate(program.operations):
        around = layouts.around(number)
        if around is None:
            continue
        line = source_of([operation.eqn])
        source = f"{line.file.rpartition('/')[2]}:{line.line}" if line else "(no line)"
        needed, made, in_full = around
        kernel = operation.primitive == "pallas_call"
        name = kernel_name(operation.eqn) if kernel else operation.primitive
        for at, (value, spec) in enumerate(zip(operation.inputs, needed, strict=True)):
            if kernel:
                add(source, f"operand {at} of {name}", value, spec, kernel)
            elif spec != layouts.of_value(value):
                *before, last = layouts.of_operand(operation, at, spec, in_full) or (None,)
                for lies in before:
                    add(source, f"operand {at} of {name}, before that", value, lies, False)
                if last is not None:
                    add(source, f"operand {at} of {name}", value, last, False)
        for value, spec in zip(operation.outputs, made, strict=True):
            kept = layouts.of_value(value)
            add(source, f"result of {name}", value, spec, kernel)
            if kept != spec:
                add(source, f"result of {name}, from then on", value, kept, False)
    return list(found)
