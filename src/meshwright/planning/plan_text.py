"""What a plan says of itself: the role of every axis and why, exchanges, runners-up, checks.

All numbers come from the model that the plan was found by: why an axis shards what it does is what
the step would cost if it did not.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright._html import Html
from meshwright._show import Sheet, Table
from meshwright._text import amount, duration, plural
from meshwright.planning.dim_groups import HEAVY, Layout
from meshwright.planning.exchange_costs import Exchange
from meshwright.planning.group_names import data_values, is_queries
from meshwright.planning.operation_work import Work
from meshwright.planning.plan_costs import Lists, Totals
from meshwright.rehearsal.callbacks import source_of

if TYPE_CHECKING:
    from meshwright.planning.step_plan import Alternative, Plan

_COLUMNS = 100
_LONGEST_NAME = 22  # of a group of dims, in a table
_MOST_EXCHANGES, _MOST_MESHES = 6, 7
_SAME = 0.01  # part of the time below which two plans are called equal


# What an axis is called, from the groups that it lists.

DATA, FSDP, TENSOR = "data parallel", "FSDP", "tensor parallel"
MEGATRON, EXPERT, SEQUENCE = "tensor parallel (Megatron)", "expert parallel", "sequence parallel"
CONTEXT = "context parallel"
_MEANING = {
    DATA: "every part of it has rows of its own; gradients are summed over it",
    FSDP: "rows are split over it, and so are stored weights, which are gathered where they are "
    "used",
    TENSOR: "weights and what is computed from them are split over it; partial sums are added up",
    MEGATRON: "weights and what is computed from them are split over it; partial sums are added up",
    EXPERT: "every part of it has experts of its own; tokens are sent to them",
    SEQUENCE: "every row is split over it along its length",
    CONTEXT: "every row is split over it along its length, attention by its queries; keys and "
    "values are gathered",
}


def axis_role(shards: Sequence[str]) -> str:
    """Name what an axis does as JAX users do, from the groups that it shards, in order.

    >>> axis_role(["batch"]), axis_role(["batch", "embed"]), axis_role([])
    ('data parallel', 'FSDP', 'unused')
    >>> axis_role(["mlp/down dim 1", "vocab", "seq"])
    'tensor parallel (Megatron) + sequence parallel'
    >>> axis_role(["seq", "queries"]), axis_role(["queries", "seq", "embed"])
    ('context parallel', 'context parallel + FSDP')
    """
    if not shards:
        return "unused"
    shards = without_table(list(shards))
    first, rest = shards[0], shards[1:]
    queries = [name for name in shards if is_queries(name)]
    rows = ("batch", "seq", *queries)
    along = CONTEXT if queries else SEQUENCE
    weights = [name for name in rest if name not in rows]
    if "expert" in first:
        return EXPERT
    if first == "batch":
        if weights:
            return FSDP
        return f"{DATA} + {along}" if rest else DATA
    if first in rows:
        return f"{along} + FSDP" if weights else along
    role = TENSOR if first == "embed" else MEGATRON
    return f"{role} + {along}" if "seq" in rest or queries else role


def without_table(shards: Sequence[str]) -> Sequence[str]:
    """Leave out `vocab` before `batch`: it cuts the table of a lookup alone, and names no role.

    >>> without_table(["vocab", "batch", "embed"])
    ['batch', 'embed']
    """
    return shards[1:] if shards[:1] == ["vocab"] and "batch" in shards else shards


def short_name(name: str, longest: int = _LONGEST_NAME) -> str:
    """Shorten the name of a group from its left, which says least.

    >>> short_name("transformer/blocks/mlp_projection/down dim 1")
    '..projection/down dim 1'
    """
    if len(name) <= longest + 2:
        return name
    return f"..{name[-longest + 1 :]}"


def shards_text(shards: Sequence[str], longest: int = 36) -> str:
    """Write the groups of an axis in their order, as many as there is room for.

    >>> shards_text(["batch", "embed"]), shards_text(["layers/down dim 0"] * 4)
    ('batch, embed', 'layers/down dim 0, +3')
    """
    for count in range(len(shards), 0, -1):
        more = [f"+{len(shards) - count}"] if count < len(shards) else []
        text = ", ".join([*map(short_name, shards[:count]), *more])
        if len(text) <= longest:
            return text
    return "nothing"


def _short_role(shards: Sequence[str]) -> str:
    """The role, in as many letters as a column has."""
    role = axis_role(shards)
    if " + " not in role:
        return role
    return " + ".join(part.split(" ")[0] for part in role.split(" + ")) + " parallel"


# Why. In: a plan. Out: a paragraph per axis, with what the same mesh would cost without the axis,
# and with no more than the first of the groups that it shards.


def axis_reason(plan: Plan, number: int) -> str:
    """Say what an axis does, and what the step would cost if it did not."""
    axis = plan.axes[number]
    role = axis_role(axis.shards)
    if role == "unused":
        return f"{axis.name} shards nothing: no group that was tried makes the step faster."
    meaning = "; ".join(_MEANING[part] for part in role.split(" + ") if part in _MEANING)
    said = [f"{axis.name}, {role}: {meaning}."]
    first = 1 + len(axis.shards) - len(without_table(list(axis.shards)))
    if len(axis.shards) > first:
        alone = _with(plan.lists, number, plan.lists[number][:first])
        names = " and ".join(short_name(name) for name in axis.shards[:first])
        said.append(f"With {names} alone {_changed(plan, alone)}.")
    said.append(f"Without it {_changed(plan, _with(plan.lists, number, ()))}.")
    return " ".join(said)


def _with(lists: Lists, axis: int, order: tuple[int, ...]) -> Lists:
    return (*lists[:axis], order, *lists[axis + 1 :])


def _changed(plan: Plan, lists: Lists) -> str:
    """What the step would cost under other lists, beside what it costs."""
    other, own = plan.costs.totals(lists), plan.predicted
    ratio = other.seconds / own.seconds if own.seconds else 1.0
    time = f"a step would take {duration(other.seconds)}"
    if ratio >= 10:
        time = f"a step would take {ratio:,.0f} times as long"
    elif ratio >= 2:
        time += f", {ratio:.1f} times as long"
    elif abs(ratio - 1) >= _SAME:
        time += f", {abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}"
    memory = f"{amount(other.bytes)} a device"
    if other.bytes > plan.costs.limit >= own.bytes:
        return f"{memory} would be needed, too much; {time}"
    return f"{time}, {memory}"


# Exchanges, told apart by what they are for. In the program's own words a gathered operand with the
# dims of an argument is that parameter, and a summed result with its dims is its gradient.


@dataclasses.dataclass(frozen=True)
class ExchangeRow:
    """Exchanges of one kind for one purpose: `bytes` of the largest, `seconds` of all in a step."""

    kind: str
    axis: str
    bytes: float
    times: int
    seconds: float
    purpose: str
    source: str

    def row(self) -> list[str]:
        """Its cells in a table."""
        return [
            self.kind,
            self.axis,
            amount(self.bytes),
            f"{self.times:,}",
            duration(self.seconds),
            self.purpose,
            self.source,
        ]


def exchange_rows(plan: Plan) -> list[ExchangeRow]:
    """List what a plan exchanges by kind, axis and purpose, what takes longest first."""
    parameters = _parameters(plan)
    batch = {number for number, name in enumerate(plan.groups) if name in ("batch", "seq")}
    sources: dict[Work, str] = {}
    for operation in plan.costs.program.operations:
        if operation.primitive in HEAVY:
            line = source_of([operation.eqn])
            where = f"{line.file.rpartition('/')[2]}:{line.line}" if line else ""
            sources.setdefault(plan.costs.work(operation), where)
    rows: dict[tuple[str, str, str], ExchangeRow] = {}
    for entry, work, times in plan.exchanges():
        layout = _moved_layout(plan, entry, work)
        name = parameters.get(_dims(layout))
        if any(kind in batch for kind, _ in layout):
            purpose = f"activations [{_layout_text(plan, layout)}]"
        elif name is None:
            purpose = f"an array [{_layout_text(plan, layout)}]"
        elif "reduce" in entry.kind:
            purpose = f"gradient of {name}"
        else:
            purpose = f"parameter {name}"
        axis = plan.axes[entry.axis].name
        new = ExchangeRow(
            entry.kind,
            axis,
            entry.bytes,
            times,
            times * entry.seconds,
            purpose,
            sources.get(work, ""),
        )
        old = rows.get((new.kind, axis, purpose))
        if old is not None:
            larger = max(old, new, key=lambda row: row.seconds)
            new = dataclasses.replace(
                larger,
                bytes=max(old.bytes, new.bytes),
                times=old.times + new.times,
                seconds=old.seconds + new.seconds,
            )
        rows[new.kind, axis, purpose] = new
    return sorted(rows.values(), key=lambda row: (-row.seconds, row.kind, row.axis, row.purpose))


def _dims(layout: Layout) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(layout))


def _parameters(plan: Plan) -> dict[tuple[tuple[int, int], ...], str]:
    """The name of each parameter by its dims, and by those of one layer of a stack."""
    program, groups = plan.costs.program, plan.costs.groups
    data = set(data_values(plan.step, program))
    found: dict[tuple[tuple[int, int], ...], list[str]] = {}
    entries = sorted(
        zip(plan.step.paths, program.arguments, strict=True), key=lambda e: (len(e[0]), e[0])
    )
    for path, value in entries:
        if value in data or len(groups.layout[value]) < 1:
            continue
        words = [word for word in path.split("/") if not word.isdigit()][-2:]
        layout = groups.layout[value]
        for dims in {_dims(layout), _dims(layout[1:])}:
            names = found.setdefault(dims, [])
            if "/".join(words) not in names:
                names.append("/".join(words))
    return {
        dims: short_name(names[0]) + (f" +{len(names) - 1}" if len(names) > 1 else "")
        for dims, names in found.items()
    }


def _moved_layout(plan: Plan, entry: Exchange, work: Work) -> Layout:
    """The layout of the array that an exchange of an operation is of."""
    way = plan.costs.way(work, plan.lists)
    if "reduce" in entry.kind:
        return work.values[-1][0]
    for number, (layout, size) in enumerate(work.values):
        lies, used = plan.costs.cut(layout, plan.lists), way.cuts[number]
        have, want = (lies, used) if number < work.inputs else (used, lies)
        if entry.axis in have and have[entry.axis] != want.get(entry.axis) and size >= entry.bytes:
            return layout
    return work.values[-1][0]


def _layout_text(plan: Plan, layout: Layout) -> str:
    return ", ".join(
        short_name(plan.groups[kind], 12) if kind >= 0 else str(size) for kind, size in layout
    )


# The other plans that were kept, and why they lose.


def runners_up(plan: Plan) -> list[Alternative]:
    """The best plan of every other mesh, and the next best of this one."""
    seen: dict[tuple[int, ...], Alternative] = {}
    for each in plan.alternatives:
        if not each.chosen and not _alike(each.predicted, plan.predicted, each, plan):
            seen.setdefault(each.sizes, each)
    return list(seen.values())


def _alike(one: Totals, other: Totals, each: Alternative, plan: Plan) -> bool:
    """Whether a plan is this one, written otherwise."""
    return one == other and each.sizes == plan.costs.sizes


def reason_it_loses(plan: Plan, each: Alternative) -> str:
    """Say in a few words why another plan was not chosen."""
    chosen = next((one.compiled for one in plan.alternatives if one.chosen), None)
    if not each.kept_to:
        return f"{each.unasked:.0%} exchanged unasked"
    queries = plan.costs.groups.queries.keys()
    if each.compiled is None and any(queries & set(order) for order in each.lists):
        return "context parallel, not compiled"
    if each.compiled is not None and chosen is not None:
        if not each.fits:
            return "does not fit, compiled"
        slower = each.compiled / chosen - 1
        return f"{slower:+.1%} compiled" if abs(slower) >= 0.0005 else "as fast compiled"
    own, other = plan.predicted, each.predicted
    if other.bytes > plan.costs.limit and other.bytes > own.bytes:
        over = other.bytes - plan.costs.limit
        return f"memory: {amount(over)} too much"
    parts = {
        "computing": other.compute - own.compute,
        "exchanging": other.exchange - own.exchange,
    }
    part = max(parts, key=lambda name: parts[name])
    if parts[part] <= _SAME * own.seconds or other.seconds <= own.seconds * (1 + _SAME / 2):
        return "as fast, but not simpler"
    return f"{part}: {duration(parts[part])} more"


# The sheet.


def plan_sheet(plan: Plan, drawing: Html | None = None) -> Sheet:
    """Lay out everything that a plan says of itself."""
    others = runners_up(plan)
    parts: list[str | Table | Html] = [_verdict(plan), _axes_table(plan)]
    parts += [paragraph(axis_reason(plan, number)) for number in range(len(plan.axes))]
    if drawing is not None:
        parts.append(drawing)
    rows = exchange_rows(plan)
    if rows:
        parts += ["\nLargest exchanges of a step", _exchange_table(rows)]
    if others:
        parts += ["\nThe next best plan of each mesh", _others_table(plan, others)]
    checked = [each for each in plan.alternatives if each.compiled is not None]
    if checked:
        parts += ["\nChecked by the compiler", _checked_table(plan, checked)]
    notes = [*plan.notes, *_unknown_note(plan)]
    compiled = f" and {len(checked)} compiled" if checked else ""
    counted = f"{plural(plan.tried, 'plan')} costed{compiled} in {duration(plan.seconds)}."
    if not checked:
        counted += " Nothing was compiled: check=3 rehearses the best three."
    headline = f"{plan.name} on {plan.topology.name}, planned: {plan.spec}"
    return Sheet(headline, [*parts, "\n" + "\n".join([*map(paragraph, notes), counted])])


def paragraph(text: str) -> str:
    """Break a line of prose into lines of a screen."""
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False)


def _verdict(plan: Plan) -> str:
    predicted = plan.predicted
    fits = "fits" if plan.fits else "does NOT fit"
    by, made = "", plan.rehearsal
    if made is not None:
        seconds = f" and {duration(made.time.total)} a step" if made.time else ""
        by = f", as compiled: {amount(made.memory.peak)}{seconds}"
    hidden = f" (and {duration(predicted.hidden)} beside it)" if predicted.hidden else ""
    text = (
        f"{fits}{by}{';' if by else ':'} {amount(predicted.bytes)} of {amount(plan.limit)} a device"
        f" predicted; {duration(predicted.seconds)} a step predicted, computing "
        f"{duration(predicted.compute)} and exchanging {duration(predicted.exchange)}{hidden}"
    )
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ")


def _axes_table(plan: Plan) -> Table:
    return Table(
        ["axis", "size", "role", "shards the first of", "moved", "time"],
        [
            [
                axis.name,
                str(axis.size),
                _short_role(axis.shards),
                shards_text(axis.shards),
                amount(axis.moved),
                duration(axis.seconds),
            ]
            for axis in plan.axes
        ],
        [False, True, False, False, True, True],
    )


def _exchange_table(rows: Sequence[ExchangeRow]) -> Table:
    rest = rows[_MOST_EXCHANGES:]
    left_out = ""
    if rest:
        time = duration(sum(row.seconds for row in rest))
        left_out = f"... and {plural(len(rest), 'kind')} more, {time} in all"
    return Table(
        ["kind", "axis", "bytes", "times", "time", "of", "from"],
        [row.row() for row in rows[:_MOST_EXCHANGES]],
        [False, False, True, True, True, False, False],
        left_out,
    )


def _others_table(plan: Plan, others: Sequence[Alternative]) -> Table:
    rest = len(others) - _MOST_MESHES
    return Table(
        ["mesh", "shards", "time", "memory", "why not"],
        [
            [
                each.mesh,
                _lists_text(plan, each),
                duration(each.predicted.seconds),
                amount(each.predicted.bytes),
                reason_it_loses(plan, each),
            ]
            for each in others[:_MOST_MESHES]
        ],
        [False, False, True, True, False],
        f"... and {plural(rest, 'mesh')} more" if rest > 0 else "",
    )


def _lists_text(plan: Plan, each: Alternative, longest: int = 26) -> str:
    lists = (
        "+".join(short_name(plan.groups[kind], 12) for kind in order) or "-" for order in each.lists
    )
    text = " | ".join(lists)
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


def lists_lines(groups: Sequence[str], lists: Lists, longest: int = 28) -> list[str]:
    """Write the lists of all axes in full, in lines; different lists never look alike.

    >>> lists_lines(["batch", "embed", "layers/down dim 0"], ((0, 1), (2, 1)), 20)
    ['batch+embed |', 'layers/down dim 0+', 'embed']
    """
    names = list(map(short_name, groups))
    words: list[str] = []
    for order in lists:
        shown = [groups[k] if names.count(names[k]) > 1 else names[k] for k in order] or ["-"]
        words += [*(f"{name}+" for name in shown[:-1]), f"{shown[-1]} | "]
    lines = [""]
    for word in [*words[:-1], *(word.removesuffix(" | ") for word in words[-1:])]:
        if lines[-1] and len(lines[-1] + word.rstrip()) > longest:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _checked_table(plan: Plan, checked: Sequence[Alternative]) -> Table:
    rows = []
    for each in checked:
        compiled, peak = each.compiled or 0.0, each.peak or 0.0
        first, *more = lists_lines(plan.groups, each.lists)
        rows.append(
            [
                each.mesh,
                first,
                duration(each.predicted.seconds),
                duration(compiled),
                amount(each.predicted.bytes),
                amount(peak),
                _checked_word(each),
            ]
        )
        rows += [["", line, "", "", "", "", ""] for line in more]
    return Table(
        ["mesh", "shards", "time", "compiled", "memory", "compiled", ""],
        rows,
        [False, False, True, True, True, True, False],
    )


def _checked_word(each: Alternative) -> str:
    if each.chosen or each.kept_to:
        return "chosen" if each.chosen else "fits" if each.fits else "does not fit"
    return f"{each.unasked:.0%} unasked"


def _unknown_note(plan: Plan) -> list[str]:
    if not plan.unknown:
        return []
    places = ", ".join(
        f"{name} ({line.split(' ')[0].rpartition('/')[2]})"
        for name, line in list(plan.unknown.items())[:5]
    )
    more = f" and {len(plan.unknown) - 5} more" if len(plan.unknown) > 5 else ""
    return [f"No rule for {places}{more}: dims of equal size are taken to go through."]
