"""`Explanation`: what became of a function: its stages, what they hold, send and recompute."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshwright._compat import Atom, Var
from meshwright._html import Html, block, tag
from meshwright._show import Table, short_repr
from meshwright._text import amount, plural
from meshwright.errors import listing
from meshwright.pipelines.staged_program import variables
from meshwright.pipelines.task_programs import Program, TaskKey
from meshwright.pipelines.trace_marks import CLOSURE
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs, TaskKind
from meshwright.trees.walk import bits

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan


_HEADING = (
    "stage",
    "group",
    "parameters",
    "F",
    "B + W",
    "residuals",
    "sent on",
    "sent back",
    "recomputed",
)
_RIGHT = (*[True] * 8, False)


@dataclasses.dataclass(frozen=True, repr=False)
class StageNote:
    """One stage. FLOPs and bytes are of one microbatch.

    FLOPs are None where another process compiled the stage. `recomputed` counts the equations that
    the stage recomputes, by primitive. `whole` says why the backward was not split into B and W,
    where the schedule asks for that.
    """

    stage: int
    name: str | None
    group: int
    parameters: tuple[str, ...]
    parameter_bytes: int
    forward_flops: float | None
    backward_flops: float | None
    kept_bytes: int
    sent_on_bytes: int
    sent_back_bytes: int
    recomputed: dict[str, int]
    whole: str | None

    def __repr__(self) -> str:
        return short_repr(
            self,
            f"{self.stage} in group {self.group}: {plural(len(self.parameters), 'parameter')}, "
            f"{amount(self.parameter_bytes)}",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """How a function was cut, and how its schedule will run. Text, HTML in a notebook, JSON.

    `cut` are the arrays of the batch that are cut into microbatches, `whole` those that are not.
    `timeline` is predicted from FLOPs, in units of an average forward.
    """

    stages: tuple[StageNote, ...]
    timeline: Timeline
    cut: tuple[str, ...]
    whole: tuple[str, ...]

    def __repr__(self) -> str:
        schedule = self.timeline.schedule
        return short_repr(
            self,
            f"{plural(len(self.stages), 'stage')} in {plural(schedule.groups, 'group')}, "
            f"{schedule.name}, {plural(schedule.microbatches, 'microbatch')}",
        )

    def __str__(self) -> str:
        lines = [self._table().text(), self._batch(), *self._notes()]
        if any(note.recomputed for note in self.stages):
            lines.append(
                "recomputed: equations that depend only on parameters, constants or keys, computed "
                "again in each task that needs them"
            )
        return "\n".join([*lines, "", str(self.timeline)])

    def _repr_html_(self) -> str:
        notes = (tag("p", note) for note in self._notes())
        return block(self._table().html(), *notes, Html(self.timeline._repr_html_()))

    def _table(self) -> Table:
        return Table(_HEADING, [_row(note) for note in self.stages], _RIGHT)

    def _batch(self) -> str:
        count = self.timeline.schedule.microbatches
        whole = f"; whole in each: {listing(self.whole)}" if self.whole else ""
        return f"cut into {count} microbatches: {listing(self.cut) or 'nothing'}{whole}"

    def _notes(self) -> list[str]:
        return [f"stage {note.stage}: {note.whole}" for note in self.stages if note.whole]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for scripts."""
        return {
            "cut": list(self.cut),
            "whole": list(self.whole),
            "stages": [dataclasses.asdict(note) for note in self.stages],
            "predicted": self.timeline.to_json(),
        }


def explain(plan: Plan) -> Explanation:
    """Explain a plan: its stages, and a timeline predicted from FLOPs."""
    schedule, region = plan.proof.schedule, plan.stage_program.region
    flops = _flops(plan)
    notes = tuple(_note(plan, stage, flops) for stage in range(schedule.stages))

    def with_role(wanted: str) -> tuple[str, ...]:
        roles = zip(region.names, region.roles, strict=True)
        return tuple(name for name, role in roles if role == wanted and name != CLOSURE)

    timeline = simulate(schedule, _costs(plan, flops))
    return Explanation(notes, timeline, with_role("split"), with_role("whole"))


def _costs(plan: Plan, flops: dict[TaskKey, float]) -> str | list[Costs]:
    """Return the costs of tasks by their FLOPs; all alike where some were compiled elsewhere."""
    stages = range(plan.stage_program.stages)
    forwards = [flops.get((TaskKind.FORWARD, stage), 0.0) for stage in stages]
    # FLOPs of some stages only would mislead: then all tasks cost the same.
    known = all(key in flops for key, program in plan.programs.items() if program.eqns)
    if not known or not all(forwards):
        return "F=1,B=1,W=1"
    unit = sum(forwards) / len(forwards)
    costs = []
    for stage in stages:
        # To a tenth: FLOPs do not predict times more exactly than that.
        f, b, w, bw = (round(flops.get((kind, stage), 0.0) / unit, 1) for kind in TaskKind)
        costs.append(Costs(max(f, 0.1), b, w, max(bw or b + w, 0.1)))
    return costs


def _note(plan: Plan, stage: int, flops: dict[TaskKey, float]) -> StageNote:
    tasks = {key: program for key, program in plan.programs.items() if key[1] == stage}
    forward = plan.programs[TaskKind.FORWARD, stage]
    backward = [program for key, program in tasks.items() if key[0] != TaskKind.FORWARD]
    others = [program for key, program in plan.programs.items() if key[1] != stage]
    read_elsewhere = {var for program in others for var in program.ins}
    parameters = _parameters(plan, tasks.values())
    recomputed: collections.Counter[str] = collections.Counter()
    for program in tasks.values():
        recomputed.update(eqn.primitive.name for eqn in program.recomputed)
    return StageNote(
        stage,
        plan.stage_program.names[stage],
        plan.proof.schedule.group_of[stage],
        tuple(dict.fromkeys(plan.names[n] for numbers, _ in parameters for n in numbers)),
        sum(_bytes(var) for _, var in parameters),
        flops.get((TaskKind.FORWARD, stage)),
        _backward_flops(tasks, flops),
        # Residuals: what the forward hands to the backward of its own stage.
        sum(_bytes(var) for var in forward.outs if any(var in b.ins for b in backward)),
        sum(_bytes(var) for var in forward.outs if var in read_elsewhere),
        sum(_bytes(var) for b in backward for var in b.outs if var in read_elsewhere),
        dict(recomputed.most_common()),
        _why_whole(plan, stage),
    )


def _backward_flops(tasks: Iterable[TaskKey], flops: dict[TaskKey, float]) -> float | None:
    known = {key: flops[key] for key in tasks if key[0] != TaskKind.FORWARD and key in flops}
    # A schedule may run some microbatches as BW and others as B and W: count one of the two ways.
    both = {key: count for key, count in known.items() if key[0] == TaskKind.BACKWARD}
    return sum((both or known).values()) if known else None


def _parameters(plan: Plan, tasks: Iterable[Program]) -> list[tuple[list[int], Var]]:
    """List a stage's parameters: variables, each with the arguments that it comes from."""
    program = plan.stage_program
    used = {var for task in tasks for var in task.ins}
    return [
        (_arguments(plan, operand), var)
        for var, operand, role in zip(
            program.invars, plan.traced.operands, program.region.roles, strict=True
        )
        if role == "params" and var in used
    ]


def _arguments(plan: Plan, operand: Atom) -> list[int]:
    """Return the arguments of a step that an operand of its microbatches is computed from.

    Those of its own shape, if there are any: a cast or scaled parameter, not its scale.
    """
    arguments = plan.assembled.builder.arguments
    makers = {var: eqn for eqn in plan.traced.prologue for var in eqn.outvars}
    seen, queue = set[Var](), variables([operand])
    while queue:
        var = queue.pop()
        if var not in seen:
            seen.add(var)
            queue += variables(makers[var].invars) if var in makers else []
    given = seen & set(arguments)
    alike = {var for var in given if var.aval.shape == operand.aval.shape}
    return sorted(arguments[var] for var in alike or given)


def _why_whole(plan: Plan, stage: int) -> str | None:
    """Say why the backward is all B or all W although the schedule has both for this stage."""
    w = plan.programs.get((TaskKind.WEIGHT_GRADIENT, stage))
    if w is None:
        return None
    b = plan.programs[TaskKind.INPUT_GRADIENT, stage]
    if not b.eqns:
        return "backward runs whole in W, and B is empty: no stage waits for what it computes."
    # The transpose of a loop is one loop equation: its B and W cannot be told apart.
    loops = {eqn.primitive.name for eqn in b.eqns} & {"scan", "while", "cond"}
    if loops:
        return (
            f"its {', '.join(sorted(loops))} runs whole in B: the gradients of input and weights "
            "are one equation. Unroll it to split them."
        )
    if w.eqns:
        return None
    return "backward runs whole in B, and W is empty: it has no weights of its own to put off."


def _flops(plan: Plan) -> dict[TaskKey, float]:
    """Read the compiler's FLOPs of the tasks that this process compiled."""
    flops: dict[TaskKey, float] = {}
    for operation in plan.operations:
        task, function = operation.task, operation.function
        if task is None or function is None or (task.kind, task.stage) in flops:
            continue
        # Not every backend counts: `cost_analysis()` may give None, or no FLOPs.
        analysis = function.compiled.cost_analysis() or {}
        if "flops" in analysis:
            flops[task.kind, task.stage] = float(analysis["flops"])
    return flops


def _row(note: StageNote) -> list[str]:
    recomputed = [f"{count} {name}" for name, count in note.recomputed.items()]
    return [
        f"{note.stage} {note.name or ''}".strip(),
        str(note.group),
        f"{len(note.parameters)}, {amount(note.parameter_bytes)}",
        _flop_count(note.forward_flops),
        _flop_count(note.backward_flops),
        amount(note.kept_bytes),
        amount(note.sent_on_bytes),
        amount(note.sent_back_bytes),
        ", ".join([*recomputed[:3], "..."] if len(recomputed) > 3 else recomputed),
    ]


def _flop_count(flops: float | None) -> str:
    """
    >>> _flop_count(1.5e9), _flop_count(None)
    ('1.5 GFLOP', '?')
    """
    if flops is None:
        return "?"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def _bytes(var: Var) -> int:
    return math.ceil(int(math.prod(var.aval.shape)) * bits(var.aval.dtype) / 8)
