"""`Advice`: what to do next about a step, what it would bring as a number, and what to write.

First how to make it fit (`remedies`), then what would save time (`avoidable_costs`, and what the
step waits for), then what would use the memory that is left. Numbers are of the same model as the
step's time, unless the change was compiled ("tried"), and the list says that they are estimates;
"up to" where the change may cost something elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from meshwright._html import Html, block, join, tag
from meshwright._show import Sheet, Shown, short_repr
from meshwright._text import amount, duration, text_width
from meshwright.axes import role
from meshwright.errors import option_text
from meshwright.partitioning.report import LeafRow
from meshwright.rehearsal.avoidable_costs import AvoidableCosts
from meshwright.rehearsal.collectives.types import IMPLICIT_RESHARDING, Collective
from meshwright.rehearsal.memory import CPU_ESTIMATE
from meshwright.rehearsal.mesh_remedies import data_rows, data_shards
from meshwright.rehearsal.model_commands import rehearse_command
from meshwright.rehearsal.remedy_table import Remedies, Remedy
from meshwright.rehearsal.request import INSTALL, batch_shape, changed_model

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal

# Fractions of the step's time, and of a device's memory, from which advice is given.
_MUCH_WAITING, _MUCH_READING, _MUCH_ROOM, _GAIN = 0.25, 0.4, 0.4, 0.02
_COSTS, _REPLICATED = 3, 3  # that are named
_TIMES = (16, 8, 4, 3, 2, 1.5, 1.25)  # the batch
_ESTIMATES = (
    "What is not marked as tried is an estimate, by the model of the step's time and memory."
)
_CONSTRAIN = "jax.lax.with_sharding_constraint(x, spec) on what goes into it and comes out of it"


@dataclasses.dataclass(frozen=True, repr=False)
class Advice:
    """One thing to do: `what`, what it `brings` in words with a number, and the `change` to make.

    `change` is a command, an option or a line of code. `seconds` of a step and `bytes` of a device
    are what it would save at most, where it saves such.
    """

    what: str
    brings: str
    change: str
    seconds: float | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self._sentence()} {self.change}"

    def _sentence(self) -> str:
        return f"{self.what[:1].upper()}{self.what[1:]}: {self.brings}."

    def __repr__(self) -> str:
        return short_repr(self, f"{self.what}: {self.brings}")

    def text(self, mark: str) -> str:
        """Lines of the screen's width behind a mark; a command is a line of its own, to copy."""
        apart = self.change.startswith("meshwright ")
        prose = f"{mark}{self._sentence() if apart else self}"
        lines = textwrap.fill(prose, text_width(), subsequent_indent="   ", break_on_hyphens=False)
        return f"{lines}\n   {self.change}" if apart else lines

    def drawing(self) -> Html:
        """An item of a list."""
        change = tag("code", self.change) if self.change else Html()
        what = f"{self.what[:1].upper()}{self.what[1:]}: "
        return tag("li", what, tag("b", self.brings), ".", change)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; bytes and seconds."""
        return dataclasses.asdict(self)


class AdviceList(Shown, Sequence[Advice]):
    """What to do next, most important first. Prints itself; HTML in a notebook; `to_json()`.

    A sequence: it has a length, is iterated over and indexed; a slice of it is one too.
    """

    def __init__(self, entries: Sequence[Advice], cpu_estimate: bool, notes: Sequence[str] = ()):
        self._entries = tuple(entries)
        self.cpu_estimate = cpu_estimate
        self._notes = tuple(notes)

    @overload
    def __getitem__(self, index: int) -> Advice: ...
    @overload
    def __getitem__(self, index: slice) -> AdviceList: ...
    def __getitem__(self, index: int | slice) -> Advice | AdviceList:
        if isinstance(index, slice):
            return AdviceList(self._entries[index], self.cpu_estimate, self._notes)
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def _sheet(self) -> Sheet:
        mark = f" ({CPU_ESTIMATE})" if self.cpu_estimate else ""
        lines = (each.text(f"{number}. ") for number, each in enumerate(self, 1))
        notes = (textwrap.fill(note, text_width()) for note in self._notes)
        return Sheet(f"What to do next{mark}", [*lines, *notes])

    def drawing(self) -> Html:
        """The list, numbered, each with its number in bold and the change as code."""
        notes = (tag("p", note, class_="note") for note in self._notes)
        return join([tag("ol", *(each.drawing() for each in self), class_="next"), *notes])

    def _repr_html_(self) -> str:
        return block(tag("b", self._sheet().headline), self.drawing())

    def to_json(self) -> list[dict[str, Any]]:
        """Return every piece of advice as plain data, the most important first."""
        return [each.to_json() for each in self]


def find_advice(
    result: Rehearsal, remedies: Sequence[Remedy] = (), costs: AvoidableCosts | None = None
) -> AdviceList:
    """List what to do; `remedies` and `costs` are those that were tried, if any."""
    listed = remedies or (() if result.memory.fits else result.remedies())
    notes = listed.notes() if isinstance(listed, Remedies) else []
    entries = [
        *(_remedy(each, result.memory.limit) for each in listed),
        *_costs(result, result.costs() if costs is None else costs),
        *_replicated(result),
    ]
    if result.fits:
        entries += [*_communication(result), *_rows(result), *_reading(result)]
        entries += _recomputing(result)
    if any("tried, " not in each.brings for each in entries[len(listed) :]):
        notes.append(_ESTIMATES)
    entries += _stand_in(result)
    if not result.memory.fits and not listed:
        entries.insert(0, _too_large(result))
    if not entries:
        brings = f"{amount(result.margin)} of every device to spare"
        entries = [Advice("run it, nothing stands out", brings, _command(result))]
    return AdviceList(entries, result.stand_in, notes)


def _command(result: Rehearsal) -> str:
    return rehearse_command(result.request)


def _remedy(remedy: Remedy, limit: int) -> Advice:
    saved = f"{amount(remedy.saves)} of {amount(remedy.before)} on a device"
    if remedy.tried is not None:
        brings = f"saves {saved}; tried, {remedy.outcome()}"
    elif remedy.failed:
        brings = f"tried, {remedy.failed}"
    else:
        fits = ", enough to fit" if remedy.peak <= limit else ""
        yours = "; yours to try" if remedy.request is None else ""
        brings = f"saves about {saved}{fits}{yours}"
    return Advice(remedy.what, brings, remedy.command or remedy.how, bytes=remedy.saves)


def _too_large(result: Rehearsal) -> Advice:
    memory = result.memory
    brings = f"{amount(memory.arguments)} of {amount(memory.peak)} are arguments"
    change = "a smaller model or batch, or hardware with more memory: `meshwright hardware`"
    return Advice("make the step smaller, nothing known saves memory of it", brings, change)


def _costs(result: Rehearsal, costs: AvoidableCosts) -> Iterator[Advice]:
    """The largest costs of a sharding, each with what to write against it."""
    step = costs.step or 1.0
    for cost in costs.entries[:_COSTS]:
        over = f" over {cost.over}" if cost.over else ""
        array = f" ({cost.what})" if cost.what else ""
        seconds, sure = cost.seconds, "up to "
        if cost.tried is not None and cost.tried.time is not None:
            seconds, sure = costs.step - cost.tried.time.total, "tried, "
        yield Advice(
            f"avoid {cost.kind}{over} at {cost.where}{array}",
            f"{sure}{duration(max(0.0, seconds))} of a step of {duration(step)} "
            f"({max(0.0, seconds) / step:.0%})",
            cost.write or "the constraints of all lines together",
            seconds=seconds,
        )


def _replicated(result: Rehearsal) -> Iterator[Advice]:
    """Replicated arrays, where their copies take 5 % of one together."""
    copies = result.placement.topology.num_devices
    if result.request.in_shardings is not None or copies < 2:
        return  # then they were meant to be replicated
    for row in result.arguments.replicated[:_REPLICATED]:
        if row.bytes * copies <= 0.05 * result.memory.limit:
            continue  # small arrays are well replicated
        cut = _cut(result, row)
        if cut is None:
            what = f"pad {row.path} ({row.text}), which no mesh axis divides"
            brings = f"{amount(row.bytes)} of it are replicated"
            yield Advice(what, brings, f'then a rule, ("{row.path}", P(...))', bytes=row.bytes)
            continue
        spec, pieces = cut
        saved = row.bytes - row.bytes // pieces
        yield Advice(
            f"shard {row.path} ({row.text}), which is replicated",
            f"saves {amount(saved)} on each",
            f'rules=[("{row.path}", {spec}), ...]',
            bytes=saved,
        )


def _cut(result: Rehearsal, row: LeafRow) -> tuple[str, int] | None:
    """A spec that shards a dim over the largest axis that divides it, and into how many pieces."""
    spec = result.placement.spec
    for size, name in sorted(zip(spec.sizes, spec.names, strict=True), reverse=True):
        for dim, length in enumerate(row.shape):
            if size > 1 and length % size == 0:
                return f"P({'None, ' * dim}{name!r})".replace("'", '"'), size
    return None


# What a step that fits waits for. In: its modelled time. Out: the change that shortens the largest
# part of it, if the same model says that it is worth it. Example: on fsdp:64, tp:4 the gradient
# sums over fsdp take as long for twice the rows; tp:2 halves what moves over tp, but every device
# then gathers twice the weights.


def _communication(result: Rehearsal) -> Iterator[Advice]:
    """A constraint or another mesh, where the step waits for activations that are moved."""
    timing, worst = result.time, _waited_for(result)
    if timing is None or worst is None:
        return
    if worst.cause == IMPLICIT_RESHARDING:
        what, change = "constrain its operands to one sharding", _CONSTRAIN
        seconds = _waited(result, [worst])
    elif _of_weights(worst):
        return  # more rows share its cost: `_rows`
    else:
        what = f"a smaller {worst.over} would send less"
        change = _smaller_axis(result, [part.name for part in worst.axes or ()])
        alike = (entry for entry in result.collectives if entry.over == worst.over)
        weights = _waited(result, filter(_of_weights, result.collectives))
        seconds = _waited(result, alike) * _less_sent(worst) - weights
    if change and seconds > _GAIN * timing.total:
        brings = f"saves about {duration(seconds)} of a step of {duration(timing.total)}"
        yield Advice(f"{what}: {_waits(result, worst)}", brings, change, seconds=seconds)


def _less_sent(entry: Collective) -> float:
    """The part that half an axis saves: of n devices each sends (n - 1) / n, of half the rows."""
    size = math.prod(part.members for part in entry.axes or ())
    return 1.0 if size <= 2 else 1 - 0.5 * ((size - 2) / size) / ((size - 1) / size)


def _waited_for(result: Rehearsal) -> Collective | None:
    """The longest collective, where a step waits for communication much of its time.

    Those of one line that move alike count together, as in the table of collectives.
    """
    timing = result.time
    if timing is None or not timing.total or timing.exposed <= _MUCH_WAITING * timing.total:
        return None
    together: dict[Any, float] = {}
    for entry in result.collectives:
        key = _line(entry)
        together[key] = together.get(key, 0.0) + entry.total_seconds
    return max(
        result.collectives,
        key=lambda entry: (together[_line(entry)], entry.total_seconds),
        default=None,
    )


def _line(entry: Collective) -> tuple[Any, ...]:
    return entry.kind, entry.over, entry.source


def _waits(result: Rehearsal, worst: Collective) -> str:
    share = result.time.exposed / result.time.total if result.time else 0.0
    where = f", from {worst.source}" if worst.source else ""
    return (
        f"{share:.0%} of the step waits for communication, the largest part is the {worst.kind} "
        f"of {worst.shape} over {worst.over}{where}"
    )


def _waited(result: Rehearsal, entries: Iterable[Collective]) -> float:
    """Seconds that the step waits for some of its collectives, in proportion to their time."""
    whole = result.collectives.seconds
    exposed = 0.0 if result.time is None else result.time.exposed
    return exposed * sum(entry.total_seconds for entry in entries) / whole if whole else 0.0


def _of_weights(entry: Collective) -> bool:
    """Whether it runs over axes that weights and their gradients are moved over."""
    named = [part.name for part in entry.axes or ()]
    return bool(named) and all(role(name).moves == "weights" for name in named)


def _smaller_axis(result: Rehearsal, axes: Sequence[str]) -> str:
    """The mesh with half of one axis, for the axis that takes most of the devices."""
    sizes = dict(zip(result.placement.spec.names, result.placement.spec.sizes, strict=True))
    others = [name for name in sizes if role(name).moves == "weights" and name not in axes]
    if len(axes) != 1 or sizes[axes[0]] % 2 or not others:
        return ""
    sizes[axes[0]] //= 2
    sizes[max(others, key=lambda name: sizes[name])] *= 2
    mesh = ", ".join(f"{name}:{size}" for name, size in sizes.items())
    changed = dataclasses.replace(result.request, mesh=mesh)
    return rehearse_command(changed) or f'mesh="{mesh}"'


def _reading(result: Rehearsal) -> Iterator[Advice]:
    timing = result.time
    if timing is None or result.stand_in:  # how kernels fuse is the CPU's there
        return
    if timing.memory > _MUCH_READING * timing.total:
        yield Advice(
            f"{timing.memory / timing.total:.0%} of the step waits for the chip's own memory",
            f"up to {duration(timing.memory)} of a step of {duration(timing.total)}",
            "more rows on a device, or kernels that fuse more (attention first)",
            seconds=timing.memory,
        )


# What would use the memory that is free: more rows, or less that is computed again.


def _rows(result: Rehearsal) -> Iterator[Advice]:
    """More rows, where they fit: weights and their gradients are sent once for all of them."""
    request, timing, times = result.request, result.time, _fitting_rows(result)
    if timing is None or not timing.total or times <= 1:
        return
    fixed = _waited(result, filter(_of_weights, result.collectives))
    gain = times * timing.total / (fixed + times * (timing.total - fixed)) - 1
    worst = _waited_for(result)
    waits = worst is not None and _of_weights(worst) and worst.cause != IMPLICIT_RESHARDING
    if gain <= _GAIN or (not waits and result.margin <= _MUCH_ROOM * result.memory.limit):
        return
    what = f"{times:g} times the rows, {amount(result.margin)} of every device are free"
    if worst is not None and waits:
        share = f"more rows on a device would share its cost, {times:g} times as many fit"
        what = f"{share}: {_waits(result, worst)}"
    rows = data_rows(request.args, request.data)
    change = f"{int(times * rows):,} rows instead of {rows:,}"
    if request.model is not None:
        larger, length = batch_shape(request)
        change = rehearse_command(changed_model(request, batch=int(times * larger), seq=length))
    unit = "tokens" if result.tokens_per_second is not None else "rows"
    brings = f"up to {gain:.0%} more {unit} a second"
    yield Advice(what, brings, change or f"batch={times * rows:g}")


def _fitting_rows(result: Rehearsal) -> float:
    """How many times the rows fit, if temporaries grow as rows do; 1 if no more do."""
    memory, spec = result.memory, result.placement.spec
    rows = data_rows(result.request.args, result.request.data)
    for times in _TIMES:
        whole = rows * times
        fits = (times - 1) * memory.temporaries <= memory.margin
        if whole and fits and whole == int(whole) and int(whole) % data_shards(spec) == 0:
            return times
    return 1.0


def _recomputing(result: Rehearsal) -> Iterator[Advice]:
    """Compute nothing again, where what is computed again would fit."""
    timing = result.time
    # Twice as much, since values that are fused away in the backward pass are kept, too.
    if timing is None or not timing.flops or 2 * timing.recomputed_bytes > result.margin:
        return
    seconds = timing.compute * timing.recomputed / timing.flops
    if seconds <= _GAIN * timing.total:
        return
    change = "the layers without jax.checkpoint (nn.remat, eqx.filter_checkpoint, nnx.remat)"
    if result.request.model is not None:
        less = changed_model(result.request, remat="none", saved=(), offloaded=())
        change = rehearse_command(less) or 'models.model(..., remat="none")'
    yield Advice(
        f"compute nothing again, {amount(result.margin)} of every device are free",
        f"up to {duration(seconds)} of a step of {duration(timing.total)}",
        change,
        seconds=seconds,
    )


def _stand_in(result: Rehearsal) -> Iterator[Advice]:
    if result.stand_in:
        chip, request = result.placement.topology.chip, result.request
        command = rehearse_command(dataclasses.replace(request, compiler="vendor"))
        again = f"rehearse again without {option_text('compiler', 'cpu')}"
        yield Advice(
            f"ask the compiler of {chip.name} itself before you rent it",
            f"its own peak in place of {amount(result.memory.peak)}, which is a {CPU_ESTIMATE}",
            f"{INSTALL[chip.family]}; then {command or again}",
        )
