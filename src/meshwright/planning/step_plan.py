"""`Plan`: the mesh, the shardings and the step that planning gives, and why."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright._show import Sheet, Shown, short_repr
from meshwright.errors import PlanningError, short
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import abstract_mesh
from meshwright.meshes.build import mesh as build_mesh
from meshwright.planning.apply_plan import planned_function
from meshwright.planning.chosen_pipeline import PipelineChoice
from meshwright.planning.exchange_costs import Exchange
from meshwright.planning.operation_work import Work
from meshwright.planning.plan_costs import Lists, PlanCosts, Totals
from meshwright.planning.plan_drawing import plan_drawing, plan_page
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.plan_rules import PlanRules, make_rules
from meshwright.planning.plan_search import Candidate
from meshwright.planning.plan_text import axis_role, exchange_rows, plan_sheet, reason_it_loses
from meshwright.planning.planned_step import (
    jit_step,
    on_mesh,
    specs_of_arguments,
    specs_of_results,
)
from meshwright.planning.remat_choice import RematChoice
from meshwright.planning.saved_plans import write_plan
from meshwright.planning.traced_step import TracedStep
from meshwright.rehearsal.api import rehearse
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.verification import Verification
from meshwright.rehearsal.verifier import verify
from meshwright.spec.mesh_spec import MeshSpec
from meshwright.trees.specs import make_spec


@dataclasses.dataclass(frozen=True)
class AxisChoice:
    """One mesh axis of a plan: what it shards, in order, and what it carries in a step.

    `shards`: names of groups of dims; in every array and operation the first that is there, and
    that the axis divides, takes it. `moved`: bytes a device exchanges over it, `seconds` for that.
    """

    name: str
    size: int
    shards: tuple[str, ...]
    moved: float
    seconds: float


UNASKED = 0.01  # part of the time that the compiler may exchange unasked in a context parallel plan


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A plan that was found: its mesh, lists, predicted seconds and bytes a device.

    `compiled` and `peak`: the seconds and bytes of its rehearsal, where it was checked. `chosen`:
    whether it is the plan that was returned. `unasked`: the part of the compiled seconds for what
    the compiler exchanges unasked, of a plan that is only taken where that is next to nothing.
    """

    mesh: str
    sizes: tuple[int, ...]
    lists: Lists
    predicted: Totals
    fits: bool
    compiled: float | None = None
    peak: float | None = None
    chosen: bool = False
    unasked: float = 0.0

    @property
    def kept_to(self) -> bool:
        """Whether the compiler keeps to it, as far as that is known."""
        return self.unasked <= UNASKED


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Plan(Shown):
    """A mesh and shardings for a step, and the step with them applied.

    Prints itself; HTML in a notebook; `to_json()`. `predicted` is by the planner's own model,
    `rehearsal` what the compiler said of it if it was asked (`check`). `alternatives` are the best
    plans of all meshes that were tried, the best first, this one among them. `intensity`: how much
    each axis was taken to carry when the mesh was placed, as `place` and `mesh` take it. `devices`:
    what its mesh is built on, or the user's own `Mesh`. `seconds`: how long planning took; a step
    is predicted to take `predicted.seconds`.
    """

    name: str
    topology: Topology
    spec: MeshSpec
    axes: tuple[AxisChoice, ...]
    predicted: Totals
    limit: float
    alternatives: tuple[Alternative, ...]
    rehearsal: Rehearsal | None
    unknown: Mapping[str, str]
    tried: int
    seconds: float
    groups: tuple[str, ...]
    step: TracedStep
    layouts: Layouts
    intensity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    devices: Any = None
    notes: tuple[str, ...] = ()
    remat: RematChoice | None = None
    pipeline: PipelineChoice | None = None

    @property
    def fits(self) -> bool:
        """Whether it fits in a device's memory: by the rehearsal, or else as predicted."""
        return self.rehearsal.fits if self.rehearsal else self.predicted.bytes <= self.limit

    @property
    def lists(self) -> Lists:
        """Per axis, the numbers of the groups that it shards, in order."""
        return self.layouts.lists

    @property
    def costs(self) -> PlanCosts:
        """The model that the plan was found by, on its mesh."""
        return self.layouts.costs

    @functools.cached_property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh: on the devices that are here, or without devices for hardware that is not."""
        if isinstance(self.devices, Mesh):
            return self.devices
        if self.devices is None:
            return abstract_mesh(self.spec)
        return build_mesh(self.spec, on=self.devices, intensity=self.intensity)

    @property
    def in_specs(self) -> tuple[Any, ...]:
        """A tree of `PartitionSpec`s for every argument; `None` for what is no array."""
        return specs_of_arguments(self.step, self.layouts)

    @property
    def out_specs(self) -> Any:
        """A tree of `PartitionSpec`s for what the step returns.

        Results that are the next step's arguments, the new state, lie as the arguments do.
        """
        return specs_of_results(self.step, self.layouts)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """A tree of `NamedSharding`s on `mesh` for every argument, as `jax.jit` takes them."""
        return tuple(on_mesh(specs, self.mesh) for specs in self.in_specs)

    @property
    def out_shardings(self) -> Any:
        """A tree of `NamedSharding`s on `mesh` for what the step returns."""
        return on_mesh(self.out_specs, self.mesh)

    def function(self, mesh: Mesh | AbstractMesh | None = None) -> Callable[..., Any]:
        """Return the step with the plan's constraints in it, not jitted.

        Without a mesh the constraints are bare specs, for the mesh set around the call.
        """
        return planned_function(self.step, self.layouts, mesh)

    def jit(self, mesh: Mesh | None = None) -> Any:
        """Return the step with the plan applied: call it, lower it, rehearse it.

        A `jax.jit`; where arguments have leaves that are no arrays, or are modules of NNX, which
        are updated in place, a `PlannedStep` that is called as one. Donated arguments
        (`donate_argnums`, or parameters and state with `optimizer`) are gone after a call.

        `mesh`: another mesh with these axes, e.g. the one of the machine that was planned for.
        """
        on: Any = self.mesh if mesh is None else mesh
        sizes = dict(zip(self.spec.names, self.spec.sizes, strict=True))
        if not isinstance(on, (Mesh, AbstractMesh)) or dict(on.shape) != sizes:
            raise PlanningError(
                f"mesh: the plan is for {self.spec}, not for {short(on)}. Build it with "
                f"mw.mesh({str(self.spec)!r}).",
                option="mesh",
            )
        return jit_step(self.step, self.layouts, on, self.topology)

    def verify(self, *args: Any, **options: Any) -> Verification:
        """Run the step on one device and as planned, and compare what comes out.

        Args: the step's arguments with values, of the shapes that were planned for; options are
        those of `verify`. Plan a small model on the mesh in question: the step runs, on simulated
        devices where the mesh has more than are here.

        >>> import jax.numpy as jnp, meshwright as mw
        >>> def step(w, x):
        ...     return w - 0.1 * x.T @ (x @ w)
        >>> w, x = jnp.eye(256), jnp.ones((64, 256))
        >>> mw.plan(step, w, x, on="v5e:2x4").verify(w, x).ok
        True
        """
        planned = self.function()

        @functools.wraps(planned)
        def either(*args: Any) -> Any:
            alone = jax.sharding.get_abstract_mesh().size == 1
            return (self.step.function if alone else planned)(*args)

        options.setdefault("gradients", False)  # a plan is of the step as it is
        return verify(
            either, *args, mesh=abstract_mesh(self.spec), in_shardings=self._specs(), **options
        )

    def _specs(self) -> tuple[Any, ...]:
        # Not None for what is no array: a None of the arguments themselves is no leaf.
        return specs_of_arguments(self.step, self.layouts, other=make_spec())

    def rehearse(self, **options: Any) -> Rehearsal:
        """Compile the planned step for the hardware; options are those of `rehearse`."""
        rehearsal = rehearse(
            self.function(),
            *(part.rebuild(part.arrays) for part in self.step.arguments),
            mesh=self.devices if isinstance(self.devices, Mesh) else self.spec,
            on=self.topology,
            intensity=self.intensity,
            in_shardings=self._specs(),
            out_shardings=self.out_specs,
            donate_argnums=self.step.donate_argnums,
            name=f"{self.name}, planned",
            **options,
        )
        return _with_constants(rehearsal) if self.costs.constants else rehearsal

    def rules(self, argument: int = 0) -> PlanRules:
        """Write the plan as rules for an argument and constraints, to be used without it.

        `partition(state, plan.mesh, rules=plan.rules().rules)` gives `plan.in_specs[0]`.

        >>> import meshwright as mw
        >>> tiny = mw.models.model("tiny")
        >>> p = mw.plan(tiny.train_step, tiny.shapes(), tiny.batch(64), on="v5e:2x4", mesh="dp:8")
        >>> mw.partition(tiny.shapes(), p.mesh, rules=p.rules().rules) == p.in_specs[0]
        True
        """
        if isinstance(argument, int) and 0 <= argument < len(self.in_specs):
            specs = self.in_specs[argument]
        else:
            specs = None
        return make_rules(self.step, self.layouts, specs, self.groups, str(self.spec), argument)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to a `.json` file, for `plan(..., saved=path)`, or a page to `.html`.

        A saved plan has the mesh, what its axes shard by name, and a fingerprint of program and
        hardware, by which `plan` tells what has changed since.
        """
        return write_plan(self, path)

    def page(self) -> str:
        """Return the plan as one page of HTML that works offline."""
        return plan_page(self)

    def exchanges(self) -> list[tuple[Exchange, Work, int]]:
        """Every exchange that the plan implies, with its operation and how often it runs."""
        return self.costs.exchanges(self.lists)

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}: {self.spec} on {self.topology.name}")

    def _sheet(self) -> Sheet:
        return plan_sheet(self, plan_drawing(self))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data; times in seconds.

        `seconds` is what a step is predicted to take, as `predicted_seconds` is, and
        `planning_seconds` what planning took.
        """
        return {
            "name": self.name,
            "topology": self.topology.name,
            "mesh": str(self.spec),
            "fits": self.fits,
            "seconds": self.predicted.seconds,
            "predicted_seconds": self.predicted.seconds,
            "compute": self.predicted.compute,
            "exchange": self.predicted.exchange,
            "bytes": self.predicted.bytes,
            "limit": self.limit,
            "groups": list(self.groups),
            "axes": [
                {**dataclasses.asdict(axis), "role": axis_role(axis.shards)} for axis in self.axes
            ],
            "exchanges": [dataclasses.asdict(row) for row in exchange_rows(self)],
            "alternatives": [
                {
                    "mesh": each.mesh,
                    "shards": [[self.groups[kind] for kind in order] for order in each.lists],
                    "seconds": each.predicted.seconds,
                    "compute": each.predicted.compute,
                    "exchange": each.predicted.exchange,
                    "bytes": each.predicted.bytes,
                    "fits": each.fits,
                    "compiled_seconds": each.compiled,
                    "compiled_bytes": each.peak,
                    "unasked": each.unasked,
                    "chosen": each.chosen,
                    "why_not": None if each.chosen else reason_it_loses(self, each),
                }
                for each in self.alternatives
            ],
            "remat": self.remat and self.remat.to_json(),
            "pipeline": self.pipeline and self.pipeline.to_json(),
            "unknown_primitives": dict(self.unknown),
            "tried": self.tried,
            "planning_seconds": self.seconds,
        }


# Compilers of CPUs and GPUs leave the constants of a program out when they say what it needs;
# those of TPUs count them (jax 0.10.2: as temporaries before code is generated, as code after it).
def _with_constants(rehearsal: Rehearsal) -> Rehearsal:
    """Count the constants of a compiled program as a part of its code."""
    counted = rehearsal.placement.topology.chip.family == "tpu" and not rehearsal.stand_in
    if counted or rehearsal.program is None:
        return rehearsal
    held = sum(
        each.shape.bytes
        for computation in rehearsal.program.computations.values()
        for each in computation.instructions
        if each.opcode == "constant"
    )
    memory = dataclasses.replace(rehearsal.memory, code=rehearsal.memory.code + held)
    return dataclasses.replace(rehearsal, memory=memory)


def choices(
    costs: PlanCosts, lists: Lists, names: Sequence[str], groups: Sequence[str]
) -> tuple[AxisChoice, ...]:
    """Return what each axis of a plan shards, and what it carries."""
    moved, seconds = [0.0] * len(lists), [0.0] * len(lists)
    for entry, _, times in costs.exchanges(lists):
        moved[entry.axis] += times * entry.bytes
        seconds[entry.axis] += times * entry.seconds
    return tuple(
        AxisChoice(name, size, tuple(groups[kind] for kind in order), moved[axis], seconds[axis])
        for axis, (name, size, order) in enumerate(zip(names, costs.sizes, lists, strict=True))
    )


def mesh_text(candidate: Candidate, names: Sequence[str]) -> str:
    """Write the mesh of a candidate."""
    return ", ".join(f"{n}:{s}" for n, s in zip(names, candidate.sizes, strict=True))
