"""`step.explain()`: what became of the function: stages, what they hold, send and repeat."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright._html import html_table
from meshwright._text import amount, table
from meshwright.errors import listing
from meshwright.pipelines.microbatching import CLOSURE
from meshwright.pipelines.staged_program import variables
from meshwright.pipelines.task_programs import Program, TaskKey
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs
from meshwright.trees.walk import bits

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan


_HEADING = [
    "stage",
    "group",
    "parameters",
    "F",
    "B + W",
    "kept",
    "sent on",
    "sent back",
    "cloned",
]
_RIGHT = [True, True, *[True] * 6, False]


@dataclasses.dataclass(frozen=True)
class StageNote:
    """One stage. FLOPs and bytes are of one microbatch; FLOPs are None in other processes."""

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
    cloned: dict[str, int]
    whole: str | None
    """Why the backward was not split, where the schedule asks for that."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a function was cut, and how its schedule will run. Text, HTML, JSON.

    `cut` are the arrays of the batch that are cut into microbatches, `whole` those that are not.
    """

    stages: tuple[StageNote, ...]
    timeline: Timeline
    cut: tuple[str, ...]
    whole: tuple[str, ...]

    def __str__(self) -> str:
        lines = [table([_HEADING, *map(_row, self.stages)], _RIGHT), self._batch()]
        lines += [f"stage {note.stage}: {note.whole}" for note in self.stages if note.whole]
        if any(note.cloned for note in self.stages):
            lines.append(
                "cloned: equations that depend only on parameters, constants or keys, computed "
                "again in each task that needs them"
            )
        return "\n".join([*lines, "", str(self.timeline)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>stage {n.stage}: {n.whole}</p>" for n in self.stages if n.whole)
        shown = html_table([_HEADING, *map(_row, self.stages)], _RIGHT)
        return f"{shown}{notes}{self.timeline._repr_html_()}"

    def _batch(self) -> str:
        count = self.timeline.schedule.microbatches
        whole = f"; whole in each: {listing(self.whole)}" if self.whole else ""
        return f"cut into {count} microbatches: {listing(self.cut) or 'nothing'}{whole}"

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts."""
        return {
            "cut": list(self.cut),
            "whole": list(self.whole),
            "stages": [dataclasses.asdict(note) for note in self.stages],
            "predicted": self.timeline.to_json(),
        }


def explain(plan: Plan, names: Sequence[str]) -> Explanation:
    """Read a plan. The timeline is predicted from FLOPs, in units of an average forward."""
    schedule = plan.proof.schedule
    flops = _flops(plan)
    notes = tuple(_note(plan, stage, names, flops) for stage in range(schedule.stages))
    region = plan.cut.region
    batch = [
        [name for name, role in zip(region.names, region.roles, strict=True) if role == wanted]
        for wanted in ("split", "whole")
    ]
    cut, whole = (tuple(name for name in names if name != CLOSURE) for names in batch)
    return Explanation(notes, simulate(schedule, _costs(plan, flops)), cut, whole)


def _costs(plan: Plan, flops: dict[TaskKey, float]) -> str | list[Costs]:
    """What tasks cost by their FLOPs; all alike where some are unknown, in other processes."""
    forwards = [flops.get(("F", stage), 0.0) for stage in range(plan.cut.stages)]
    known = all(key in flops for key, program in plan.programs.items() if program.eqns)
    if not known or not all(forwards):
        return "F=1,B=1,W=1"
    unit = sum(forwards) / len(forwards)
    found = []
    for stage in range(plan.cut.stages):
        f, b, w, bw = (
            round(flops.get((kind, stage), 0.0) / unit, 1) for kind in ("F", "B", "W", "BW")
        )
        whole = max(bw or b + w, 0.1)
        found.append(Costs(max(f, 0.1), b, w, whole))
    return found


def _note(plan: Plan, stage: int, names: Sequence[str], flops: dict[TaskKey, float]) -> StageNote:
    tasks = {key: program for key, program in plan.programs.items() if key[1] == stage}
    backward = [program for key, program in tasks.items() if key[0] != "F"]
    others = [program for key, program in plan.programs.items() if key[1] != stage]
    forward = plan.programs["F", stage]
    elsewhere = {var for program in others for var in program.ins}
    owned = _parameters(plan, tasks.values())
    recomputed: collections.Counter[str] = collections.Counter()
    for program in tasks.values():
        recomputed.update(eqn.primitive.name for eqn in program.recomputed)
    back = {key: flops[key] for key in tasks if key[0] != "F" and key in flops}
    # BW stands for B and W together; count one of the two ways.
    back = {key: f for key, f in back.items() if key[0] == "BW"} or back
    return StageNote(
        stage,
        plan.cut.names[stage],
        plan.proof.schedule.group_of[stage],
        tuple(dict.fromkeys(names[n] for numbers, _ in owned for n in numbers)),
        sum(_bytes(var) for _, var in owned),
        flops.get(("F", stage)),
        sum(back.values()) if back else None,
        sum(_bytes(v) for v in forward.outs if any(v in b.ins for b in backward)),
        sum(_bytes(v) for v in forward.outs if v in elsewhere),
        sum(_bytes(v) for b in backward for v in b.outs if v in elsewhere),
        dict(recomputed.most_common()),
        _why_whole(plan, stage),
    )


def _parameters(plan: Plan, tasks: Any) -> list[tuple[list[int], Any]]:
    """A stage's variables for parameters, each with the arguments that it comes from."""
    roles = zip(plan.cut.invars, plan.traced.operands, plan.cut.region.roles, strict=True)
    used = {var for program in tasks for var in program.ins}
    return [
        (_arguments(plan, operand), var)
        for var, operand, role in roles
        if role == "params" and var in used
    ]


def _arguments(plan: Plan, operand: Any) -> list[int]:
    """The arguments of a step that an operand of its microbatches is computed from.

    Those of its own shape, if there are any: a cast or scaled parameter, not its scale.
    """
    arguments = plan.assembled.builder.arguments
    makers = {var: eqn for eqn in plan.traced.prologue for var in eqn.outvars}
    found, queue = set[Any](), variables([operand])
    while queue:
        var = queue.pop()
        if var not in found:
            found.add(var)
            queue += variables(makers[var].invars) if var in makers else []
    given = found & set(arguments)
    alike = {var for var in given if var.aval.shape == operand.aval.shape}
    return sorted(arguments[var] for var in alike or given)


def _why_whole(plan: Plan, stage: int) -> str | None:
    """A stage whose backward is all B or all W although the schedule has both for it."""
    w: Program | None = plan.programs.get(("W", stage))
    if w is None:
        return None
    if not plan.programs["B", stage].eqns:
        return "backward runs whole in W, and B is empty: no stage waits for what it computes."
    names = {eqn.primitive.name for eqn in plan.programs["B", stage].eqns}
    loops = names & {"scan", "while", "cond"}
    if loops:
        return (
            f"its {', '.join(sorted(loops))} runs whole in B: the gradients of input and weights "
            "are one equation. Unroll it to split them."
        )
    if w.eqns:
        return None
    return "backward runs whole in B, and W is empty: it has no weights of its own to put off."


def _flops(plan: Plan) -> dict[TaskKey, float]:
    """By the compiler's own count, for the tasks that this process compiled."""
    found: dict[TaskKey, float] = {}
    for operation in plan.operations:
        task, code = operation.task, operation.code
        if task is None or code is None or (task.kind, task.stage) in found:
            continue
        analysis = code.compiled.cost_analysis() or {}
        if "flops" in analysis:
            found[task.kind, task.stage] = float(analysis["flops"])
    return found


def _row(note: StageNote) -> list[str]:
    recomputed = ", ".join(f"{n} {name}" for name, n in list(note.cloned.items())[:3])
    return [
        f"{note.stage} {note.name or ''}".strip(),
        str(note.group),
        f"{len(note.parameters)}, {amount(note.parameter_bytes)}",
        _count(note.forward_flops),
        _count(note.backward_flops),
        amount(note.kept_bytes),
        amount(note.sent_on_bytes),
        amount(note.sent_back_bytes),
        recomputed + (", ..." if len(note.cloned) > 3 else ""),
    ]


def _count(flops: float | None) -> str:
    """
    >>> _count(1.5e9), _count(None)
    ('1.5 GFLOP', '?')
    """
    if flops is None:
        return "?"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def _bytes(var: Any) -> int:
    return math.ceil(int(math.prod(var.aval.shape)) * bits(var.aval.dtype) / 8)
