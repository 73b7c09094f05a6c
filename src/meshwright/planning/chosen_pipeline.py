"""`PipelineChoice`: the pipeline that a plan recommends, what it costs, and how to get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright._show import Sheet, Shown, short_repr
from meshwright._text import amount, duration, plural
from meshwright.errors import PlanningError
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import mesh as build_mesh
from meshwright.models.base import Model
from meshwright.mpmd.groups import MpmdMesh
from meshwright.pipelines.api import pipeline
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.trace_marks import recording_regions
from meshwright.planning.plan_costs import Lists
from meshwright.planning.plan_text import paragraph
from meshwright.planning.traced_step import TracedStep, trace_step
from meshwright.schedules.timeline import Timeline
from meshwright.spec.mesh_spec import MeshSpec


@dataclasses.dataclass(frozen=True)
class StageRow:
    """One group of a pipeline: its layers, what else it computes, seconds of a microbatch, bytes.

    `held`: of how many microbatches it has activations at once.
    """

    layers: int
    also: str
    forward: float
    backward: float
    held: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class StagedSource:
    """A user's step whose blocks can end stages.

    `function`: makes it of the numbers of these blocks. `rules`: how its state lies in a stage.
    """

    function: Callable[[Collection[int]], Callable[..., Any]]
    step: TracedStep
    rules: tuple[tuple[str, PartitionSpec], ...]

    def in_stages(self, ends: Collection[int], microbatches: int) -> Callable[..., Any]:
        """Return the step with stages; refuse one that a pipeline cannot cut into microbatches."""
        function, step = self.function(ends), self.step
        with recording_regions(microbatches) as trace:
            trace_step(function, step.arguments, step.names, step.donate_argnums)
        if not trace.regions:
            raise PlanningError(
                "build: the step takes its gradients with JAX's own functions, so it cannot run in "
                "microbatches. Take them with mw.value_and_grad, which outside of a pipeline is "
                "jax.value_and_grad, and plan again."
            )
        return function


@dataclasses.dataclass(frozen=True, repr=False)
class PipelineChoice(Shown):
    """The best pipeline for a step: its mesh, schedule, microbatches and stages, and what it costs.

    `seconds` are comparable to `without`, those of the plan without stages. `bubble`: the part of
    the time in which groups wait. `hand_over`: bytes that a device passes on for a microbatch.
    `wins`: clearly faster, or it fits and the plan without stages does not. `split`: the layers of
    every stage. `ends`: the numbers of the blocks, from 0, after which stages end, where layers are
    written out; `marked`: whether they are those of `block`.
    """

    spec: MeshSpec
    lists: Lists
    schedule: str
    stages: int
    microbatches: int
    rows: tuple[StageRow, ...]
    seconds: float
    without: float
    bubble: float
    hand_over: float
    fits: bool
    wins: bool
    split: tuple[int, ...]
    ends: tuple[int, ...]
    marked: bool
    topology: Topology
    timeline: Timeline
    model: Model | None = None
    source: StagedSource | None = None

    @property
    def groups(self) -> int:
        """How many groups of devices run it."""
        return len(self.rows)

    def lines(self) -> list[str]:
        """Say in lines what it would bring, and how to get it."""
        gain = 1 - self.seconds / self.without
        verdict = f"{gain:.0%} faster" if gain > 0 else f"{-gain:.0%} slower"
        head = (
            f"Pipeline: the best one has {self.groups} groups, {self.spec}, {self.schedule}, "
            f"{self.microbatches} microbatches: {duration(self.seconds)} a step, {verdict}, "
            f"{self.bubble:.0%} of it waiting"
        )
        if not self.wins:
            why = "" if self.fits else f", and needs {amount(max(r.bytes for r in self.rows))}"
            return [f"{head}{why}; not taken."]
        rows = "; ".join(
            f"group {number}: {plural(row.layers, 'layer')}{row.also}, {duration(row.forward)} + "
            f"{duration(row.backward)}, {amount(row.bytes)}"
            for number, row in _ends(self.rows)
        )
        return [f"{head}. It wins.", f"Its stages: {rows}.", self.how()]

    def how(self) -> str:
        """Say how to build it."""
        if self.model is not None:
            return "plan.pipeline.build() makes it: the model in stages, and its step."
        call = (
            f"mw.pipeline(step, mw.MpmdMesh(mw.mesh('{self.spec}'), 'pp'), "
            f"schedule='{self.schedule}', microbatches={self.microbatches})"
        )
        built = "For them, "
        if self.source is not None:
            built = (
                "plan.pipeline.build() makes the step with them; one that is all your own must "
                "differentiate with mw.value_and_grad. By hand: "
            )
        return (
            f"This plan is without stages. {built}{self._where()}, differentiate with "
            f"mw.value_and_grad, and call {call}."
        )

    def _where(self) -> str:
        """Say where stages end."""
        if self.ends:
            *most, last = [str(end + 1) for end in self.ends]
            numbers = f"{', '.join(most)} and {last}" if most else last
            what = "marked blocks" if self.marked else "functions under jax.checkpoint"
            return (
                f"put x = mw.stage_end(x) after number {numbers} of the {what}, counted from 1 as "
                "they are called"
            )
        first = self.split[0]
        even = all(count == first for count in self.split)
        each = str(first) if even else ", ".join(map(str, self.split))
        return (
            f"cut the loop over {sum(self.split)} layers into {self.stages} loops of {each}, put "
            "x = mw.stage_end(x) between"
        )

    def build(self, on: Any = None, **options: Any) -> tuple[Any, PipelineStep]:
        """Return what is in stages, and its train step as a pipeline, to call or rehearse.

        Of a model of `mw.models` that is the model, of a step whose layers are marked with `block`
        the step. `on`: devices, by default the hardware of the plan; `options` are those of
        `pipeline`. For other steps `how()` says what to write.
        """
        if self.model is None and self.source is None:
            raise PlanningError(
                "build: only models of mw.models, and steps whose layers are marked with mw.block, "
                f"are cut by it. {self.how()}"
            )
        if self.source is not None and self.model is None:
            # Refused before the devices are asked for.
            function = self.source.in_stages(self.ends, self.microbatches)
        whole: Any = build_mesh(self.spec, on=self.topology if on is None else on)
        groups = MpmdMesh(whole, "pp")
        staged: Any
        if self.model is not None:
            config = dataclasses.replace(self.model.config, stages=self.stages, accumulation=1)
            staged = dataclasses.replace(self.model, config=config)
            function = staged.train_step
            options = {"rules": staged.rules(groups.meshes[0]), "donate_argnums": 0, **options}
        elif self.source is not None:
            staged, donated = function, self.source.step.donate_argnums
            options = {"rules": self.source.rules, "donate_argnums": donated, **options}
        step = pipeline(
            function, groups, schedule=self.schedule, microbatches=self.microbatches, **options
        )
        return staged, step

    def __repr__(self) -> str:
        microbatches = plural(self.microbatches, "microbatch")
        return short_repr(self, f"{self.spec}: {self.schedule}, {microbatches}")

    def _sheet(self) -> Sheet:
        headline, *parts = map(paragraph, self.lines())
        return Sheet(headline, parts)

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain data; times in seconds."""
        names = ("schedule", "stages", "microbatches", "seconds", "without", "bubble", "hand_over")
        return {
            "mesh": str(self.spec),
            **{name: getattr(self, name) for name in (*names, "fits", "wins")},
            "groups": [dataclasses.asdict(row) for row in self.rows],
        }


def _ends(rows: Sequence[StageRow]) -> list[tuple[int, StageRow]]:
    """The rows to show: all, or the first, the second and the last."""
    numbered = list(enumerate(rows))
    return numbered if len(rows) <= 4 else [*numbered[:2], numbered[-1]]
