"""What a plan must say of itself: devices that repeat work, a batch too small, kernels, no room.

Where a step does not fit, the ways out are listed with what each would save, as far as that is
known without planning again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from jax.sharding import Sharding

from meshwright._compat import Eqn, source_line
from meshwright._compat_lowering import equations, kernel_name
from meshwright._text import amount, duration, plural
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.step_plan import AxisChoice
from meshwright.planning.stored_values import constants_of
from meshwright.planning.traced_program import TracedProgram
from meshwright.planning.traced_step import TracedStep
from meshwright.planning.written_forms import SLICE_SECONDS

_MOMENTS = re.compile(r"(^|/)(opt|opt_state|optimizer|mu|nu|trace|momentum)(/|$)")
_REMAT = ("checkpoint", "remat2")
# Constants of more of the limit, or of what is predicted and of more bytes, are worth a note.
_CONSTANTS, _SMALL_CONSTANTS = 0.01, 2**20
_SLOW = 0.01  # of the time: slices that take less are not worth a note
_SMALL_SAVING = 0.02  # of the limit: ways out that save less are not worth a line


def idle_notes(
    step: TracedStep, layouts: Layouts, axes: Sequence[AxisChoice], devices: int
) -> list[str]:
    """Say which devices do what others do too, and where the batch is what stops them."""
    notes = []
    used = math.prod(axis.size for axis in axes)
    if used < devices:
        notes.append(
            f"The mesh has {plural(used, 'device')} of {devices:,}: {devices - used:,} stay idle."
        )
    rows = batch_rows(layouts)
    ways = batch_ways(layouts)
    idle = [axis for axis in axes if axis.size > 1 and not axis.shards]
    if rows and ways < devices and (rows < devices or rows % devices):
        others = [
            f"{axis.name} shards {', then '.join(axis.shards)}"
            for axis in axes
            if axis.size > 1 and axis.shards and axis.shards[0] != "batch"
        ]
        notes.append(
            f"The batch has {plural(rows, 'row')} for {plural(devices, 'device')} and is "
            f"{f'cut {ways} ways' if ways > 1 else 'not cut'}{'; ' if others else ''}"
            f"{', '.join(others)}. With a multiple of {devices} rows every device could have its "
            "own."
        )
    if idle:
        named = ", ".join(f"{axis.name}:{axis.size}" for axis in idle)
        repeated = math.prod(axis.size for axis in idle)
        sizes = [size for each in layouts.costs.groups.sizes for size in each]
        why = (
            "to shard more would cost more than it saves"
            if all(any(size % axis.size == 0 for size in sizes) for axis in idle)
            else f"no dim is divisible by {', '.join(str(axis.size) for axis in idle)}"
        )
        notes.append(
            f"{named} shards nothing: {repeated} devices at a time do the same work, since {why}. "
            "Take fewer devices, or other sizes."
        )
    return notes


def constant_notes(step: TracedStep, limit: float, predicted: float) -> list[str]:
    """Say what the step closes over, where that is much: no mesh cuts it."""
    constants = constants_of(step.closed)
    held = sum(constants.values())
    much = held > _SMALL_CONSTANTS and held > _CONSTANTS * predicted
    if not much and held <= _CONSTANTS * limit:
        return []
    return [
        f"The step closes over arrays of {amount(held)}, {listed(constants, 3)}: constants, which "
        "are copied whole to every device and cannot be sharded. Pass them as arguments."
    ]


def slices_notes(step: TracedStep, family: str, predicted: float) -> list[str]:
    """Say where gradients add rows to tables in a way that a TPU is slow at, which is mended."""
    rows = sum(step.by_slices.values())
    seconds = rows * SLICE_SECONDS
    if family != "tpu" or seconds < _SLOW * predicted:
        return []
    lines = dict.fromkeys(map(_shortened, step.by_slices))
    return [
        f"{listed(lines, 3)}: vmap looks slices up here, and adds their gradients to the table "
        f"slice by slice; a TPU's compiler makes a loop of that, of {rows:,} runs and about "
        f"{duration(seconds)} if they are not cut. p.jit() adds all at once. Without it, "
        "look rows up as table[ids]."
    ]


def sharding_notes(step: TracedStep) -> list[str]:
    """Name what the step jits with shardings of its own, which are not used."""
    names: dict[str, None] = {}
    for eqn, *_ in equations(step.closed):
        given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
        if any(isinstance(each, Sharding) for each in given):
            names[str(eqn.params.get("name", eqn.primitive.name))] = None
    if not names:
        return []
    return [
        f"in_shardings and out_shardings of the jit of {listed(names, 5)} are not used: the plan's "
        "take their place. To have the data cut so, pass mesh= and keep=."
    ]


def kernel_notes(program: TracedProgram, devices: int) -> list[str]:
    """Name the kernels of which nothing may be cut, and what is sharded by hand, with its kernels.

    Both with their lines, each once.
    """
    if devices == 1:
        return []
    whole: dict[str, None] = {}
    by_hand: dict[str, None] = {}
    for operation in program.operations:
        eqn = operation.eqn
        if operation.primitive == "pallas_call" and all(d.kind == "whole" for d in operation.dims):
            whole[f"{kernel_name(eqn)} ({short_line(eqn)})"] = None
        elif operation.primitive == "shard_map":
            inner = [each for each, *_ in equations(eqn.params["jaxpr"])]
            kernels = [kernel_name(e) for e in inner if e.primitive.name == "pallas_call"]
            named = f", with {listed(dict.fromkeys(kernels), 3)}" if kernels else ""
            by_hand[f"shard_map ({short_line(eqn)}{named})"] = None
    notes = []
    if whole:
        notes.append(
            f"Every device runs all of {listed(whole, 5)}, on gathered operands: no dim of a grid "
            "there can be cut so that each part computes the same."
        )
    if by_hand:
        notes.append(
            f"Sharded by hand, and left as it is: {listed(by_hand, 5)}. What it computes is not in "
            "the predicted time."
        )
    return notes


def listed(names: Collection[str], most: int) -> str:
    """Names in a row, no more than so many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def short_line(eqn: Eqn) -> str:
    """The file and the line that an equation comes from, without folders and columns."""
    return _shortened(source_line(eqn))


def _shortened(source: str) -> str:
    return ":".join(source.split(" ")[0].rpartition("/")[2].split(":")[:2])


def batch_rows(layouts: Layouts) -> int:
    """How many rows the data have: 0 where no dim of theirs can be cut."""
    program, layout = layouts.costs.program, layouts.costs.groups.layout
    return max(
        (program.shapes[v][0] for v in layouts.data if layout[v] and layout[v][0][0] >= 0),
        default=0,
    )


def batch_ways(layouts: Layouts) -> int:
    """How many ways the rows of the data are cut."""
    costs = layouts.costs
    return max(
        (
            math.prod(
                costs.sizes[axis]
                for axis, dim in costs.cut(costs.groups.layout[value], layouts.lists).items()
                if dim == 0
            )
            for value in layouts.data
        ),
        default=1,
    )


def _bytes_of_rows(layouts: Layouts) -> float:
    """What of a device's memory goes by the number of rows, at the worst moment."""
    costs, lists = layouts.costs, layouts.lists
    data = [costs.groups.layout[value] for value in layouts.data]
    rows = {dims[0][0] for dims in data if dims and dims[0][0] >= 0}
    moments = []
    for held in costs.moments.held:
        sizes = [
            (each.bytes(costs, lists), bool(kinds & rows))
            for kinds, arrays in held.items()
            for each in arrays
        ]
        of_rows = sum(size for size, has_rows in sizes if has_rows)
        moments.append((sum(size for size, _ in sizes), of_rows))
    return max(moments, default=(0.0, 0.0))[1]


# In: a plan that does not fit, its bytes a device and the bytes that there are. Out: by how much,
# and the ways out, the cheapest first; each with its saving where that is plain arithmetic.
def memory_notes(
    step: TracedStep, layouts: Layouts, held: float, limit: float, devices: int
) -> list[str]:
    """Say by how much a plan does not fit, and what would help."""
    costs = layouts.costs
    local = {
        value: costs.program.bytes[value]
        / math.prod(
            costs.sizes[axis] for axis in costs.cut(costs.groups.layout[value], layouts.lists)
        )
        for value in costs.program.arguments
    }
    arguments = sum(local.values())
    computed = max(0.0, held - arguments - costs.constants)
    of_rows = min(_bytes_of_rows(layouts), computed)
    closed_over = f"{amount(costs.constants)} closed over, " if costs.constants else ""
    notes = [
        f"Nothing that was tried fits. This comes nearest: {amount(held)} a device of "
        f"{amount(limit)}, {amount(held - limit)} too much; {amount(arguments)} are arguments, "
        f"{closed_over}{amount(of_rows)} computed for the rows, "
        f"{amount(computed - of_rows)} other, as gradients."
    ]
    ways = []
    donated = step.donated
    kept = sum(
        local[costs.program.arguments[number]]
        for number in set(step.carried.values())
        if not donated[number]
    )
    if kept > _SMALL_SAVING * limit:
        ways.append(f"donate the state (donate_argnums), {amount(kept)} less")
    rematted = any(eqn.primitive.name in _REMAT for eqn, *_ in equations(step.closed))
    if of_rows > _SMALL_SAVING * limit and not rematted:
        ways.append(f"jax.checkpoint around each layer: {amount(of_rows)} are of the rows")
    rows, cut = batch_rows(layouts), batch_ways(layouts)
    if rows and of_rows > 0 and held - of_rows < limit:
        fewer = int(rows * (limit - held + of_rows) / of_rows) // cut * cut
        if 0 < fewer < rows:
            ways.append(f"{fewer} rows in place of {rows}")
    moments = sum(
        size
        for (value, size), path in zip(local.items(), step.paths, strict=True)
        if _MOMENTS.search(path) and costs.program.dtypes[value] == "float32"
    )
    if moments > _SMALL_SAVING * limit:
        ways.append(f"the optimizer's moments in bfloat16, {amount(moments / 2)} less")
    ways.append(f"about {math.ceil(devices * held / limit):,} chips in place of {devices:,}")
    return [*notes, f"Ways out: {'; '.join(ways)}."]
