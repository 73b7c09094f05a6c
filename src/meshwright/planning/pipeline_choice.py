"""Would a pipeline be faster: stages of layers, a schedule and microbatches for a planned step.

Parts of the step are costed by `stage_costs`; `simulate` runs the schedule with these costs, and
what stages hand over crosses their links. Taken only where it is clearly faster, or fits and
nothing else does.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from meshwright.hardware.topology import Topology
from meshwright.models.base import Model
from meshwright.placement.placement import Placement
from meshwright.placement.placer import placement_of
from meshwright.planning.chosen_pipeline import PipelineChoice, StagedSource, StageRow
from meshwright.planning.exchange_costs import AxisSpeed, axis_speed
from meshwright.planning.group_names import data_values
from meshwright.planning.layer_parts import CutProgram, cut_program
from meshwright.planning.plan_costs import Lists, PlanCosts
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.plan_rules import suffix_rules
from meshwright.planning.plan_search import Candidate, axis_names, mesh_sizes
from meshwright.planning.remat_choice import Variant
from meshwright.planning.stage_costs import (
    PartWork,
    Seconds,
    StageCosts,
    fold_parts,
    optimizer_seconds,
    scaled_program,
    task_costs,
    whole_step,
)
from meshwright.rehearsal.collectives.costs import pairs_cost
from meshwright.schedules.named import schedule
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Schedule
from meshwright.spec.mesh_spec import MeshSpec

GAIN = 0.03  # by which a pipeline must be faster to be taken
_MOST_STAGES, _MOST_MICROBATCHES = 32, 256
_ROUNDS = (1, 2, 4, 8)  # microbatches for each stage
_SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b")
_LISTS = 3  # of plans without stages, tried inside of them, for each number of axes
_SIMULATED = 4  # plans inside of stages, of which all numbers of microbatches are tried
_LOOKED_AT = 4  # pipelines whose memory is looked at, the fastest of each plan inside of stages
_SIMPLE_KINDS = 4  # that come after the rows in the simplest plans inside of stages


@dataclasses.dataclass(frozen=True)
class _Inside:
    """So many groups of devices, and a plan inside of each."""

    groups: int
    sizes: tuple[int, ...]
    lists: Lists
    placed: Placement


@dataclasses.dataclass(frozen=True)
class _Costed:
    """The parts of a step inside of stages, for a number of microbatches.

    `carried`: bytes that a device hands over for one; `saved`: those it keeps, for each layer.
    """

    inside: _Inside
    microbatches: int
    seconds: Seconds
    carried: float
    saved: float
    speeds: tuple[AxisSpeed, ...]

    def bound(self, cut: CutProgram) -> float:
        """Seconds below which no schedule is: all groups alike, and the first forward's way."""
        tasks = task_costs(self.seconds, (cut.layers // self.inside.groups,) * self.inside.groups)
        mean = sum(each.F + each.BW for each in tasks) / len(tasks)
        fill = sum(each.F for each in tasks[:-1])
        once = sum(self.seconds[part] for part in ("once", "once first", "once last"))
        return self.microbatches * mean + fill + once / self.inside.groups


@dataclasses.dataclass(frozen=True)
class _Try:
    """A pipeline with its schedule simulated."""

    seconds: float
    costed: _Costed
    name: str
    layers: tuple[int, ...]
    timeline: Timeline


def choose_pipeline(
    variant: Variant,
    found: Sequence[Candidate],
    topology: Topology,
    *,
    function: Any = None,
    scatters: bool = True,
) -> PipelineChoice | str | None:
    """Find the best pipeline for a step that was planned; where it has no layers, say so.

    `found`: the plans without stages, best first; their lists are tried inside of stages, too.
    `None` where a pipeline can win nothing.
    """
    best = found[0]
    fits = best.totals.bytes <= variant.costs.limit
    devices = topology.num_devices
    # What groups wait for at the ends of a schedule costs more than the least that can be won.
    if devices < 4 or (fits and best.totals.exchange < 2 * GAIN * best.totals.seconds):
        return None
    cut = cut_program(variant)
    if isinstance(cut, str):
        return cut
    model = getattr(function, "__self__", None)
    model = model if isinstance(model, Model) and not getattr(model.config, "tied", False) else None
    works = fold_parts(variant, cut)
    whole = StageCosts(variant, cut, works, 1)
    names = [f"axis{n}" for n in range(len(best.sizes))]
    placed = _placed(names, best.sizes, topology, best.intensity)
    whole.costs.on(tuple(axis_speed(axis, topology, scatters) for axis in placed.axes))
    without = whole_step(whole.seconds(best.lists), cut)
    tries = _tries(variant, cut, works, found, topology, scatters, even=model is not None)
    fastest: PipelineChoice | None = None
    looked_at: list[_Inside] = []
    for each in tries:
        inside = each.costed.inside
        if inside in looked_at:
            continue  # its fastest does not fit, and what the weights take is in all of them
        looked_at.append(inside)
        if len(looked_at) > _LOOKED_AT:
            break
        choice = _choice(variant, cut, each, topology, without, fits, model)
        fastest = fastest or choice
        if choice.fits:
            return choice
    return fastest


# In: a step that is cut, and the plans without stages. Out: pipelines with their times, the fastest
# first. Every number of groups and mesh inside of them is costed with one number of microbatches;
# the best few with others, and only what can still win by a lower bound is simulated.
def _tries(
    variant: Variant,
    cut: CutProgram,
    works: Sequence[PartWork],
    found: Sequence[Candidate],
    topology: Topology,
    scatters: bool,
    even: bool,
) -> list[_Try]:
    """Find the fastest pipelines."""
    devices = topology.num_devices
    costs: dict[int, StageCosts] = {}
    by_axes = _lists_inside(cut, found, variant.groups.count)

    def costed(inside: _Inside, rounds: int) -> _Costed | None:
        count = inside.groups * rounds
        if cut.rows % count or count > _MOST_MICROBATCHES:
            return None
        if count not in costs:
            costs[count] = StageCosts(variant, cut, works, count)
        stage = costs[count]
        speeds = tuple(axis_speed(axis, topology, scatters) for axis in inside.placed.axes[1:])
        stage.costs.on(speeds)
        seconds = stage.seconds(inside.lists)
        carried = stage.bytes(cut.carried, inside.lists)
        saved = stage.bytes(cut.saved, inside.lists) / cut.layers
        return _Costed(inside, count, seconds, carried, saved, speeds)

    options = []
    for groups in range(2, min(devices, cut.layers, _MOST_STAGES) + 1):
        if devices % groups or cut.layers % groups:
            continue
        for sizes in mesh_sizes(devices // groups, 2):
            names = ["pp", *(f"axis{n}" for n in range(len(sizes)))]
            placed = _placed(names, (groups, *sizes), topology, None)
            options += [
                _Inside(groups, sizes, lists, placed) for lists in by_axes[len(sizes)] or [()]
            ]
    first = [
        each
        for option in options
        if (each := next(filter(None, (costed(option, n) for n in (2, 1))), None)) is not None
    ]
    first.sort(key=lambda each: (each.bound(cut), each.inside.groups, each.inside.lists))
    # The bound knows nothing of hand-overs: every number of groups has its turn.
    seen: collections.Counter[int] = collections.Counter()
    chosen = []
    for each in first:
        seen[each.inside.groups] += 1
        if seen[each.inside.groups] <= _SIMULATED:
            chosen.append(each.inside)
    more = [
        each
        for inside in chosen
        for rounds in _ROUNDS
        if (each := costed(inside, rounds)) is not None
    ]
    more.sort(key=lambda each: (each.bound(cut), each.inside.groups, each.microbatches))
    tries: list[_Try] = []
    for each in more:
        if len(tries) > _LOOKED_AT and each.bound(cut) > sorted(t.seconds for t in tries)[2]:
            break
        tries += _scheduled(each, cut, even)
    return sorted(
        tries,
        key=lambda each: (
            each.seconds,
            each.costed.inside.groups,
            each.costed.microbatches,
            each.name,
        ),
    )


def _lists_inside(
    cut: CutProgram, found: Sequence[Candidate], kinds: int
) -> dict[int, list[Lists]]:
    """The plans to try inside of stages, by their number of axes.

    Those of the step without stages, and the simplest: rows, and what is cut where there are none,
    or too few of them in a microbatch.
    """
    by_axes: dict[int, list[Lists]] = collections.defaultdict(list)
    for candidate in found:
        known = by_axes[len(candidate.sizes)]
        if candidate.lists not in known and len(known) < _LISTS:
            known.append(candidate.lists)
    rows = (cut.batch,)
    others = [kind for kind in range(kinds) if kind != cut.batch][:_SIMPLE_KINDS]
    simple: list[Lists] = [(rows, order) for (order,) in by_axes[1] if cut.batch not in order]
    for count in range(3):
        simple += [((*rows, *order),) for order in itertools.permutations(others, count)]
    for lists in simple:
        if lists not in by_axes[len(lists)]:
            by_axes[len(lists)].append(lists)
    return by_axes


def _placed(
    names: Sequence[str],
    sizes: Sequence[int],
    topology: Topology,
    intensity: Sequence[float] | None,
) -> Placement:
    """Place a mesh: small axes are the busiest ones, and a pipeline's the least busy."""
    weights = intensity or tuple(
        1e-3 if name == "pp" else 3.0**number for number, name in enumerate(names)
    )
    spec = MeshSpec.parse(list(zip(names, sizes, strict=True)))
    return placement_of(spec, topology, intensity=dict(zip(names, weights, strict=True)))


def _scheduled(costed: _Costed, cut: CutProgram, even: bool) -> Iterator[_Try]:
    """Run every schedule with the costs of one plan inside of the stages."""
    groups, seconds = costed.inside.groups, costed.seconds
    inner = math.prod(costed.inside.sizes)
    pairs = np.stack([np.arange(inner * (groups - 1)), np.arange(inner, inner * groups)], axis=1)
    latency = pairs_cost(max(1, int(costed.carried)), pairs, costed.inside.placed).seconds
    for name in _SCHEDULES:
        stages = groups * (2 if name == "interleaved-1f1b" else 1)
        if cut.layers % stages:
            continue
        made = _named(name, groups, costed.microbatches, stages)
        splits = [(cut.layers // stages,) * stages]
        if not even and stages == groups and (uneven := _uneven(seconds, cut, groups)) != splits[0]:
            splits.append(uneven)
        for layers in splits:
            timeline = simulate(made, task_costs(seconds, layers), latency)
            total = timeline.makespan + optimizer_seconds(seconds, layers, cut.layers)
            yield _Try(total, costed, name, layers, timeline)


@functools.lru_cache(maxsize=64)
def _named(name: str, groups: int, microbatches: int, stages: int) -> Schedule:
    return schedule(name, groups=groups, microbatches=microbatches, stages=stages)


def _uneven(seconds: Seconds, cut: CutProgram, stages: int) -> tuple[int, ...]:
    """Deal out layers so that the slowest stage is fastest: fewer where embedding or head weigh."""
    layer = seconds["layer F"] + seconds["layer B"] + seconds["layer W"]
    busy = [0.0] * stages
    busy[0] += seconds["first F"] + seconds["first B"]
    busy[-1] += seconds["last"]
    layers = [1] * stages
    for _ in range(cut.layers - stages):
        least = min(range(stages), key=lambda n: (busy[n] + layers[n] * layer, n))
        layers[least] += 1
    return tuple(layers)


def _choice(
    variant: Variant,
    cut: CutProgram,
    best: _Try,
    topology: Topology,
    without: float,
    others_fit: bool,
    model: Model | None,
) -> PipelineChoice:
    """Look at the memory of a pipeline, and say whether it wins."""
    timeline, schedule_ = best.timeline, best.timeline.schedule
    batch = frozenset({cut.batch})
    experts = frozenset(n for n, name in enumerate(variant.names) if "expert" in name)
    inside = best.costed.inside
    names = ("pp", *axis_names(inside.lists, batch, experts, variant.groups.queries))
    spec = MeshSpec.parse(list(zip(names, (inside.groups, *inside.sizes), strict=True)))
    alone = functools.cache(functools.partial(_stage_bytes, variant, cut, best.costed, topology))
    rows = []
    for group, own in enumerate(schedule_.stages_of):
        count = sum(best.layers[stage] for stage in own)
        also = {(True, False): " and what comes before them", (False, True): " and the loss"}.get(
            (0 in own, schedule_.stages - 1 in own), ""
        )
        held = timeline.memory[group]
        rows.append(
            StageRow(
                count,
                also,
                sum(timeline.costs[stage].F for stage in own),
                sum(timeline.costs[stage].BW for stage in own),
                held,
                # Those of one microbatch are in the memory of the stage alone.
                alone(count, 0 in own, schedule_.stages - 1 in own)
                + max(0.0, held - 1) * count * best.costed.saved,
            )
        )
    ends: tuple[int, ...] = ()
    source = None
    if cut.ends:
        ends = tuple(cut.ends[layer - 1] for layer in itertools.accumulate(best.layers[:-1]))
    if cut.ends and variant.staged is not None:
        rules = _rules(variant, best.costed, names[1:])
        source = StagedSource(variant.staged, variant.step, rules)
    most = max(row.bytes for row in rows)
    fits = most <= variant.costs.limit
    return PipelineChoice(
        spec=spec,
        lists=inside.lists,
        schedule=best.name,
        stages=schedule_.stages,
        microbatches=best.costed.microbatches,
        rows=tuple(rows),
        seconds=best.seconds,
        without=without,
        bubble=timeline.idle,
        hand_over=best.costed.carried,
        fits=fits,
        wins=fits and (not others_fit or best.seconds < (1 - GAIN) * without),
        split=best.layers,
        ends=ends,
        marked=cut.marked,
        topology=topology,
        timeline=timeline,
        model=model,
        source=source,
    )


def _rules(
    variant: Variant, best: _Costed, names: Sequence[str]
) -> tuple[tuple[str, PartitionSpec], ...]:
    """How the state lies inside of a stage, as rules over the paths inside of its arguments."""
    layouts = Layouts(variant.costs.copy().on(best.speeds), best.inside.lists, names)
    data = set(data_values(variant.step, variant.program))
    paths = [path for part in variant.step.arguments for path in part.paths]
    specs: dict[str, PartitionSpec] = {}
    for path, value in zip(paths, variant.program.arguments, strict=True):
        if value not in data and path:
            specs.setdefault(path, layouts.of_value(value))
    return suffix_rules(list(specs), list(specs.values()))


def _stage_bytes(
    variant: Variant,
    cut: CutProgram,
    best: _Costed,
    topology: Topology,
    layers: int,
    first: bool,
    last: bool,
) -> float:
    """Bytes on a device for some of the layers and one microbatch."""
    program, groups = scaled_program(variant, cut, best.microbatches, layers / cut.layers)
    absent = set(cut.elsewhere(layers, first, last))
    program = dataclasses.replace(
        program,
        bytes=[0 if value in absent else size for value, size in enumerate(program.bytes)],
        operations=[each for each in program.operations if not absent.issuperset(each.outputs)],
        events=[each for each in program.events if not absent.issuperset(each[2])],
    )
    limit, donated = variant.costs.limit, variant.step.donated
    costs = PlanCosts(
        program, groups, topology, donated, limit, constants=variant.costs.constants
    ).on(best.speeds)
    return costs.totals(best.inside.lists).bytes
