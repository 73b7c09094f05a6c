"""`AvoidableCost`: what a step spends that another sharding would save, the largest first.

- **batch gathered**: an activation with all rows of the batch is gathered over a data axis.
- **activation all-reduced**: one is summed over a data axis, as if each device had every row.
- **repeated work**: products that several devices compute alike (`repeated_work`).
- **implicit resharding**: arrays moved between shardings that no line asks for.

Each comes with the constraint or the rule to write. Where it can be put into the program from here
(`inserted_constraints`, or another spec for an argument), a second compile says what it brings.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import duration, plural, text_width
from meshwright.axes import role
from meshwright.hlo.instructions import Shape, Source, primitives
from meshwright.partitioning.report import LeafRow
from meshwright.rehearsal.collectives.causes import BY_HAND
from meshwright.rehearsal.collectives.types import (
    GRADIENT_SUMS,
    IMPLICIT_RESHARDING,
    PARAMETER_GATHERS,
    Collective,
)
from meshwright.rehearsal.inserted_constraints import RowConstraint, with_constraints
from meshwright.rehearsal.repeated_work import RepeatedWork
from meshwright.rehearsal.request import Request
from meshwright.rehearsal.step_arguments import argument_path
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import path_text

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal

Kind = Literal[
    "batch gathered", "activation all-reduced", "repeated work", "implicit resharding", "together"
]
_LEAST = 0.01  # part of a step from which a cost is listed
_MOST, _MOST_TRIED = 8, 3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AvoidableCost:
    """One cost: what it is, what to write against it, and its modelled seconds in a step.

    `what` is the largest array concerned, or how often work is done. `request` is the changed
    request, where the change can be made here; `tried` is its rehearsal, or `failed` why there is
    none, after `costs(check=True)`.
    """

    kind: Kind
    what: str
    over: str
    seconds: float
    source: Source | None
    operation: str
    write: str
    request: Request | None = None
    constraint: RowConstraint | None = None
    tried: Rehearsal | None = None
    failed: str = ""

    @property
    def where(self) -> str:
        """The line, or else the operation."""
        return str(self.source or self.operation or "an operation without a name")

    def __str__(self) -> str:
        what = f" ({self.what})" if self.what else ""
        over = f" over {self.over}" if self.over else ""
        return f"{self.kind}{over} at {self.where}{what}: {duration(self.seconds)}. {self.write}"

    def __repr__(self) -> str:
        return short_repr(self, f"{self.kind} at {self.where}, {duration(self.seconds)}")

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; times in seconds."""
        tried = None if self.tried is None or self.tried.time is None else self.tried.time.total
        return {
            "kind": self.kind,
            "what": self.what,
            "over": self.over,
            "seconds": self.seconds,
            "source": None if self.source is None else dataclasses.asdict(self.source),
            "operation": self.operation,
            "write": self.write,
            "can_be_tried": self.request is not None,
            "step_seconds_tried": tried,
            "failed": self.failed,
        }


_HEADING = ("avoidable cost", "what", "over", "time", "of the step", "at", "a step if changed")
_RIGHT = (False, False, False, True, True, False, True)


@dataclasses.dataclass(frozen=True, repr=False)
class AvoidableCosts(Shown):
    """The costs of a step of `step` seconds. Prints itself; HTML in a notebook; `to_json()`."""

    entries: tuple[AvoidableCost, ...]
    step: float

    def __iter__(self) -> Iterator[AvoidableCost]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> AvoidableCost:
        return self.entries[number]

    def _sheet(self) -> Sheet:
        if not self.entries:
            return Sheet("no avoidable costs found")
        shown = self.entries[:_MOST]
        left = len(self.entries) - len(shown)
        tried = any(cost.tried or cost.failed for cost in shown)
        columns = len(_HEADING) if tried else len(_HEADING) - 1
        rows = [self._cells(cost)[:columns] for cost in shown]
        table = Table(
            _HEADING[:columns], rows, _RIGHT[:columns], f"... and {left} more" if left else ""
        )
        # Lines of one change are drawn together: many lines want the same constraint.
        changes: dict[str, list[str]] = {}
        for cost in shown:
            if cost.write:
                changes.setdefault(cost.write, []).append(cost.where)
        steps = [f"at {', '.join(dict.fromkeys(at))}: {what}" for what, at in changes.items()]
        failed = [f"at {cost.where}: not tried, {cost.failed}" for cost in shown if cost.failed]
        lines = [
            textwrap.fill(line, text_width(), initial_indent="- ", subsequent_indent="  ")
            for line in (*steps, *failed)
        ]
        headline = f"{plural(len(self.entries), 'avoidable cost')} of a step of "
        return Sheet(f"{headline}{duration(self.step)}, the largest first", [table, *lines])

    def _cells(self, cost: AvoidableCost) -> list[str]:
        at = " ".join(filter(None, (str(cost.source or ""), cost.operation)))
        part = f"{cost.seconds / self.step:.0%}" if self.step else ""
        time = None if cost.tried is None else cost.tried.time
        after = "-" if time is None else duration(time.total)
        return [cost.kind, cost.what, cost.over, duration(cost.seconds), part, at, after]

    def to_json(self) -> list[dict[str, Any]]:
        """Return every cost as plain data, the largest first."""
        return [cost.to_json() for cost in self.entries]


def find_costs(result: Rehearsal, *, check: bool) -> AvoidableCosts:
    """List what could be saved; with `check`, compile the largest that can be changed here."""
    step = 0.0 if result.time is None else result.time.total
    least = _LEAST * step
    exchanges = [cost for cost in _exchanges(result) if cost.seconds > least]
    costs = [*exchanges, *_repeated(result, least)]
    costs.sort(key=lambda cost: -cost.seconds)
    if check:
        costs = _tried(result, costs)
    return AvoidableCosts(tuple(costs), step)


# Collectives. In: those of a program. Out: a cost for each line whose collectives carry all rows of
# the batch over a data axis, or are of implicit resharding. Example: on fsdp:4, tp:4 an all-reduce
# of f32[64,256,8000] over fsdp, of a batch of 64 rows, is an activation all-reduced.


def _exchanges(result: Rehearsal) -> Iterator[AvoidableCost]:
    lines: dict[Any, list[tuple[Kind, Collective]]] = {}
    for entry in result.collectives:
        kind = _kind(result, entry)
        if kind is not None:
            # A line may have collectives of both; what it does to the batch is one matter.
            key = entry.source or entry.op_name, kind == "implicit resharding"
            lines.setdefault(key, []).append((kind, entry))
    for group in lines.values():
        kind, worst = max(group, key=lambda each: each[1].total_seconds)
        write, constraint = _constraint(result, worst)
        yield AvoidableCost(
            kind,
            worst.shape,
            worst.over,
            sum(entry.total_seconds for _, entry in group),
            worst.source,
            ", ".join(primitives(worst.op_name)),
            write,
            None if constraint is None else _constrained(result.request, [constraint]),
            constraint,
        )


def _kind(result: Rehearsal, entry: Collective) -> Kind | None:
    """What is avoidable about a collective; `None` if nothing is known to be."""
    by_hand = not BY_HAND.isdisjoint(primitives(entry.op_name))
    if entry.cause == PARAMETER_GATHERS or by_hand:
        return None
    data = any(role(part.name).moves == "weights" for part in entry.axes or ())
    if data and _rows(result, entry) is not None and entry.cause != GRADIENT_SUMS:
        if entry.kind in ("all-reduce", "reduce-scatter"):
            return "activation all-reduced"
        return "batch gathered" if entry.kind == "all-gather" else "implicit resharding"
    return "implicit resharding" if entry.cause == IMPLICIT_RESHARDING else None


def _rows(result: Rehearsal, entry: Collective) -> int | None:
    """The dim of its largest array that holds all rows of the batch."""
    return result.request.batch.dim(_dims(entry))


def _dims(entry: Collective) -> tuple[int, ...]:
    return next((leaf.dims for leaf in Shape(entry.shape).leaves), ())


def _constraint(result: Rehearsal, entry: Collective) -> tuple[str, RowConstraint | None]:
    """What to write, and the same as data."""
    dims = _dims(entry)
    at, axes = _rows(result, entry), _data_axes(result)
    if at is not None and axes:
        written = _written_spec(len(dims), at, axes)
        constraint = None
        if entry.source is not None:
            constraint = RowConstraint(entry.source, result.request.batch, axes)
        return (
            "keep the rows of the batch sharded: x = jax.lax.with_sharding_constraint(x, "
            f"{written}) on what goes into the operation and comes out of it.",
            constraint,
        )
    if entry.dim is not None and entry.axes:
        written = _written_spec(len(dims), entry.dim, tuple(part.name for part in entry.axes))
        return f"keep it as it is sharded: jax.lax.with_sharding_constraint(x, {written}).", None
    conflict = entry.conflict
    moved = f" (it goes from {conflict.before} to {conflict.after})" if conflict else ""
    return (
        "constrain what it works on to one sharding, with jax.lax.with_sharding_constraint"
        f"{moved}.",
        None,
    )


def _written_spec(rank: int, at: int, axes: Sequence[str]) -> str:
    """A spec as it is written, the other dims left open.

    >>> _written_spec(3, 0, ["fsdp"])
    'P("fsdp", *[P.UNCONSTRAINED] * 2)'
    """
    named = ", ".join(f'"{axis}"' for axis in axes)
    entries = [f"({named})" if len(axes) > 1 else named]
    if at:
        entries.insert(0, f"*[P.UNCONSTRAINED] * {at}" if at > 1 else "P.UNCONSTRAINED")
    after = rank - at - 1
    if after:
        entries.append(f"*[P.UNCONSTRAINED] * {after}" if after > 1 else "P.UNCONSTRAINED")
    return f"P({', '.join(entries)})"


def _data_axes(result: Rehearsal) -> tuple[str, ...]:
    """The axes that the rows of the data are cut over; those for data if they are not cut."""
    names = result.request.batch.names
    for row in result.arguments.rows:
        if row.path.partition("/")[0] in names and row.spec and row.spec[0] is not None:
            first = row.spec[0]
            return tuple(first) if isinstance(first, tuple) else (first,)
    spec = result.placement.spec
    sizes = zip(spec.names, spec.sizes, strict=True)
    return tuple(name for name, size in sizes if size > 1 and role(name).moves == "weights")


def _constrained(request: Request, constraints: Sequence[RowConstraint]) -> Request:
    return dataclasses.replace(request, function=with_constraints(request.function, constraints))


# Repeated work. In: products that devices compute alike. Out: a cost for each line, with a rule for
# the parameter that is replicated over these axes, or a constraint of the rows.


def _repeated(result: Rehearsal, least: float) -> Iterator[AvoidableCost]:
    for work in () if result.time is None else result.time.repeated:
        if work.seconds <= least:
            continue
        write, request, constraint = _against(result, work)
        yield AvoidableCost(
            "repeated work",
            f"{work.copies:g} times",
            work.over,
            work.seconds,
            work.source,
            work.operation,
            write,
            request,
            constraint,
        )


def _against(
    result: Rehearsal, work: RepeatedWork
) -> tuple[str, Request | None, RowConstraint | None]:
    axes = tuple(part.name for part in work.axes or ())
    by_rows = bool(axes) and all(role(axis).moves == "weights" for axis in axes)
    if by_rows and set(axes) <= set(_data_axes(result)) and work.source is not None:
        constraint = RowConstraint(work.source, result.request.batch, _data_axes(result))
        written = _written_spec(2, 0, _data_axes(result)).replace("P.UNCONSTRAINED", "...")
        text = f"shard the rows of its operands: jax.lax.with_sharding_constraint(x, {written})."
        return text, _constrained(result.request, [constraint]), constraint
    for row in _parameters(result, work):
        at = _free_dim(row, work)
        if at is not None:
            entries = [row.spec[n] if n < len(row.spec) else None for n in range(len(row.shape))]
            entries[at] = axes if len(axes) > 1 else axes[0]
            rule = ", ".join(repr(entry).replace("'", '"') for entry in entries)
            text = f"shard {row.path} over {work.over}, too: P({rule}), by a rule or in_shardings."
            return text, _with_spec(result, row, entries), None
    if not axes:
        return "no axis of the mesh divides it: shard its operands over all devices.", None, None
    return (
        f"shard another dim of its operands over {work.over} (heads, columns): in the in_specs of "
        "their shard_map, or with jax.lax.with_sharding_constraint.",
        None,
        None,
    )


def _parameters(result: Rehearsal, work: RepeatedWork) -> Iterator[LeafRow]:
    """The arguments that the products read, as the table of shardings has them."""
    rows = {row.path: row for row in result.arguments.rows}
    for name in work.arguments:
        path = argument_path(name)
        if path in rows and path.partition("/")[0] not in result.request.batch.names:
            yield rows[path]


def _free_dim(row: LeafRow, work: RepeatedWork) -> int | None:
    """A dim that the axes divide and nothing cuts: the last one, as products make their columns."""
    whole = work.axes is not None and all(part.whole for part in work.axes)
    free = [
        n for n, size in enumerate(row.local) if size == row.shape[n] and size % work.copies == 0
    ]
    return free[-1] if free and whole else None


def _with_spec(result: Rehearsal, row: LeafRow, entries: Sequence[Any]) -> Request | None:
    """The request with another spec for one argument."""
    request = result.request
    if request.layout is not None:
        return None  # its specs are a model's, for any mesh
    specs, _ = request.specs(request.abstract(result.placement, "cpu"))
    name, _, inside = row.path.partition("/")
    if name not in request.argument_names:
        return None
    number = request.argument_names.index(name)

    def change(path: Any, spec: Any) -> Any:
        return make_spec(entries) if path_text(path) == inside else spec

    specs[number] = jax.tree_util.tree_map_with_path(
        change, specs[number], is_leaf=lambda value: isinstance(value, jax.sharding.PartitionSpec)
    )
    return dataclasses.replace(request, in_shardings=specs, options={})


# Trying: the largest costs that can be changed here one by one, then the constraints together,
# since a constraint at one line may only move the cost to the next.


def _tried(result: Rehearsal, costs: list[AvoidableCost]) -> list[AvoidableCost]:
    chosen = [cost for cost in costs[:_MOST] if cost.request is not None][:_MOST_TRIED]
    tried = [_try(cost) if cost in chosen else cost for cost in costs]
    constraints = [cost.constraint for cost in costs[:_MOST] if cost.constraint is not None]
    if len(constraints) > 1:
        together = AvoidableCost(
            "together",
            "",
            "",
            sum(cost.seconds for cost in costs[:_MOST] if cost.constraint is not None),
            None,
            f"{len(constraints)} constraints at once",
            "",
            _constrained(result.request, constraints),
        )
        tried.append(_try(together))
    return tried


def _try(cost: AvoidableCost) -> AvoidableCost:
    # In the function because of a cycle: `api` makes rehearsals, and those know their costs.
    from meshwright.rehearsal.api import trial

    return cost if cost.request is None else dataclasses.replace(cost, **trial(cost.request))
