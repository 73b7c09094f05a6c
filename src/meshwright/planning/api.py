"""`plan`: find a mesh and shardings for a step, from its own jaxpr, in seconds."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright._compat import source_line
from meshwright._compat_lowering import equations
from meshwright._progress import Pulse, showing
from meshwright.errors import PlanningError, option_text, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import abstract_mesh
from meshwright.placement.placement import Placement
from meshwright.placement.placer import resolve_on
from meshwright.planning.chosen_pipeline import PipelineChoice
from meshwright.planning.dim_groups import find_groups
from meshwright.planning.group_names import data_values, name_kinds
from meshwright.planning.jit_options import read_arguments
from meshwright.planning.made_plans import PlanMaker, best_plan, context_notes, rehearsed
from meshwright.planning.pipeline_choice import choose_pipeline
from meshwright.planning.plan_costs import PlanCosts
from meshwright.planning.plan_notes import (
    constant_notes,
    idle_notes,
    kernel_notes,
    memory_notes,
    sharding_notes,
    slices_notes,
)
from meshwright.planning.plan_request import (
    check_options,
    check_speeds,
    hardware_of,
    kept_kinds,
    requested_mesh,
)
from meshwright.planning.plan_search import (
    MAY_BE_BETTER,
    Candidate,
    Hardware,
    mesh_sizes,
    search_meshes,
    search_queries,
)
from meshwright.planning.remat_blocks import TracedSource, trace_source
from meshwright.planning.remat_choice import RematChoice, Variant, choose_remat, recost, refine
from meshwright.planning.saved_plans import (
    SavedPlan,
    check_devices,
    mesh_of_saved,
    saved_candidate,
    saved_for,
    told_changes,
)
from meshwright.planning.step_plan import Plan
from meshwright.planning.stored_values import constants_of
from meshwright.planning.traced_program import read_program
from meshwright.planning.traced_step import TracedStep, trace_step
from meshwright.rehearsal.memory import available
from meshwright.rehearsal.request import check_installed
from meshwright.spec.mesh_spec import MeshSpec, SpecLike


def plan(
    function: Callable[..., Any],
    *args: Any,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    donate_argnums: int | Sequence[int] | None = None,
    check: int = 0,
    keep: Mapping[str, str] | None = None,
    mesh: SpecLike | Mesh | AbstractMesh | None = None,
    memory: float = 0.9,
    max_axes: int = 3,
    optimizer: Any = None,
    pipelines: bool = True,
    compiler: str = "vendor",
    speeds: str | os.PathLike[str] | Calibration | None = None,
    progress: bool = True,
    name: str | None = None,
    saved: str | os.PathLike[str] | None = None,
) -> Plan:
    """Find a mesh, and a sharding for every array, that make a train step fast and let it fit.

    The step is traced once; dims that are cut together are found in its jaxpr, and for every mesh
    that the hardware allows the cheapest choice of dims for its axes is searched for.

    Args:
      function: the step, bare or with `jax.jit`. What it raises while it is traced comes through.
      *args: its arguments, as arrays or as `jax.ShapeDtypeStruct`s. Python numbers in their trees
        are a part of the program, unless the step is jitted; so is what the step closes over.
      on: the hardware, as for `mesh`; by default the devices that are here.
      slices: how many of a named hardware are joined by DCN.
      donate_argnums: numbers of the arguments whose memory the results may take; by default those
        that the step's own `jit` donates, with `optimizer` parameters and state. Arrays passed for
        them are gone after a call of the planned step.
      check: rehearse the best this many plans, and return the best of them that fits. Plans that
        are context parallel are only taken so, and if the compiler keeps to them.
      keep: groups of dims by name, and the mesh axis that each must take: `{"batch": "dp"}`.
      mesh: a mesh to plan for, `"fsdp:-1, tp:4"`: only what its axes shard is chosen. A `Mesh` is
        taken as it is, with its devices in their order, an `AbstractMesh` for its axes alone.
      memory: the part of a device's memory that a plan may be predicted to need.
      max_axes: the most axes of a mesh.
      optimizer: an Optax transformation; then `function` is a loss of parameters and a batch, and
        the plan is of the train step `(params, state, *batch) -> (params, state, loss)`, in which
        the remat of layers is chosen too. Of a whole step that is chosen for what `block` marks.
      pipelines: consider stages, too; False: only plans without.
      compiler: as for `rehearse`: `"cpu"` plans, and checks, for the CPU's partitioner standing in.
      speeds: a calibration, as for `rehearse`.
      progress: show what is being done after two seconds.
      name: what the plan is called; by default the function's name.
      saved: a file that `Plan.save` wrote: its mesh and lists are taken, and nothing is searched.
        Where program or hardware differ, a `PlanChangedWarning` says how, and so does the plan. Of
        the options above, a `Mesh` with its axes may go with it.

    Raises:
      PlanningError: for a bad option, or a step with nothing to shard.

    >>> import jax, meshwright as mw
    >>> tiny = mw.models.model("tiny")
    >>> p = mw.plan(tiny.train_step, tiny.shapes(), tiny.batch(64), on="v5e:2x4", donate_argnums=0)
    >>> p
    <Plan train_step: dp:8 on v5e:2x4>
    >>> p.in_specs[1]["inputs"] == jax.sharding.PartitionSpec("dp")
    True
    """
    began = time.perf_counter()
    label = str(name or getattr(function, "__name__", "step"))
    if not callable(function):
        raise PlanningError(f"plan: {short(function)} cannot be called; pass a step function.")
    if not args:
        raise PlanningError("plan: pass the step's arguments, or their shapes.")
    check_options(check, memory, max_axes, compiler, progress=progress, pipelines=pipelines)
    before = None if saved is None else saved_for(saved, mesh, keep)
    if before is not None:
        mesh = mesh_of_saved(before, cast(Mesh | None, mesh), on)
    hardware, devices, placed = hardware_of(mesh, on, slices, speeds)
    check_speeds(hardware)
    if check and compiler == "vendor" and hardware.chip.family != "cpu":
        check_installed(hardware)  # told before the search, not after it
    if before is not None:
        check_devices(before, hardware)
    with showing(progress), Pulse(f"planning {label} on {hardware.name}") as pulse:
        pulse.now("tracing")
        fixed = None if mesh is None else resolve_on(requested_mesh(mesh), hardware, None)[0]
        stands_in = compiler == "cpu" and hardware.chip.family != "cpu"
        limit = available(hardware.chip)
        search = _Search(
            label,
            hardware,
            placed,
            stands_in,
            limit * memory,
            fixed,
            max_axes,
            keep,
            before,
            pulse,
        )
        traced = trace_source(
            function, args, optimizer, functools.partial(_trace, donate_argnums, fixed)
        )
        chosen, found, remat = search.run(traced)
        step, costs = chosen.step, chosen.costs
        maker = PlanMaker(
            label,
            hardware,
            devices,
            step,
            costs,
            chosen.groups,
            chosen.names,
            search.scatters,
            fixed,
            limit,
            placed,
        )
        found = search.with_queries(chosen, found)
        checked = rehearsed(maker, found, check, compiler, pulse)
        best = best_plan(maker, found, checked)
        staged: PipelineChoice | str | None = None
        if pipelines and fixed is None:
            pulse.now("stages")
            usable = [c for n, c in enumerate(found) if n == best or not maker.cuts_queries(c)]
            staged = choose_pipeline(
                chosen, usable, hardware, function=function, scatters=search.scatters
            )
    result = maker.make(found[best])
    rehearsal = checked[best].rehearsal if best in checked else None
    notes = idle_notes(step, result.layouts, result.axes, hardware.num_devices)
    held = rehearsal.memory.peak if rehearsal else result.predicted.bytes
    if held > (limit if rehearsal else costs.limit):
        notes = [
            *memory_notes(step, result.layouts, held, costs.limit, hardware.num_devices),
            *notes,
        ]
    return dataclasses.replace(
        result,
        rehearsal=rehearsal,
        alternatives=maker.alternatives(found, checked, best),
        tried=costs.tried,
        seconds=time.perf_counter() - began,
        unknown=chosen.program.unknown(),
        remat=remat,
        pipeline=staged if isinstance(staged, PipelineChoice) else None,
        notes=(
            *notes,
            *constant_notes(step, limit, result.predicted.bytes),
            *sharding_notes(step),
            *slices_notes(step, hardware.chip.family, result.predicted.seconds),
            *kernel_notes(chosen.program, hardware.num_devices),
            *context_notes(maker, found, checked, best),
            *(remat.lines() if remat is not None else ()),
            *([staged] if isinstance(staged, str) else staged.lines() if staged else ()),
            *told_changes(before, chosen, hardware, on_a_mesh=placed is not None),
        ),
    )


@dataclasses.dataclass
class _Search:
    """What the search for one plan goes by; `run` gives the plans that it found.

    `placed`: the user's own mesh. `stands_in`: the CPU's compiler is asked for other hardware.
    `limit`: bytes that a plan may be predicted to need. `before`: a saved plan, taken as it is.
    """

    label: str
    hardware: Topology
    placed: Placement | None
    stands_in: bool
    limit: float
    fixed: MeshSpec | None
    max_axes: int
    keep: Mapping[str, str] | None
    before: SavedPlan | None
    pulse: Pulse

    @property
    def scatters(self) -> bool:
        """Whether the compiler scatters sums: the CPU's makes an all-reduce of that."""
        return not self.stands_in

    @property
    def where(self) -> Hardware:
        """What meshes are placed on, or the one that is."""
        return self.placed or self.hardware

    def run(self, traced: TracedSource) -> tuple[Variant, list[Candidate], RematChoice | None]:
        """Search for a step as it is, or for every policy of what its blocks keep."""
        if traced.source is None:
            variant = self._prepare(cast(TracedStep, traced.plain))
            return variant, self._find(variant), None
        return choose_remat(
            traced.source,
            lambda assignment: self._prepare(traced.variant(assignment)),
            self._find,
            self._refine,
            self.where,
            self.scatters,
            self.pulse.now,
        )

    def _prepare(self, step: TracedStep) -> Variant:
        # The CPU's compiler computes in float32.
        program = read_program(step.closed, wide=self.stands_in)
        groups = find_groups(program, data_values(step, program))
        if not groups.count:
            raise PlanningError(
                f"plan: nothing in {self.label} can be sharded: none of its products, convolutions "
                "or lookups has a dim longer than 1 that comes from the arguments."
            )
        constants = sum(constants_of(step.closed).values())
        costs = PlanCosts(
            program, groups, self.hardware, step.donated, self.limit, self.scatters, constants
        )
        return Variant(step, program, groups, name_kinds(step, program, groups), costs)

    def _find(self, variant: Variant) -> list[Candidate]:
        if self.before is not None:
            return [saved_candidate(self.before, variant, self.where, self.scatters)]
        fixed = self.fixed
        devices = self.hardware.num_devices
        meshes = [tuple(fixed.sizes)] if fixed else mesh_sizes(devices, self.max_axes)
        return search_meshes(
            variant.costs,
            self.where,
            meshes,
            scatters=self.scatters,
            kept=kept_kinds(self.keep, variant, fixed),
            told=lambda sizes, number: self.pulse.now(
                f"mesh {number + 1} of {len(meshes)}, {'x'.join(map(str, sizes))}"
            ),
        )

    def with_queries(self, variant: Variant, found: list[Candidate]) -> list[Candidate]:
        """Add context parallel plans, where they may be better than the best that was found.

        Not where every device has rows of its own, and all fits: nothing is won by cutting these.
        """
        fits = found[0].totals.bytes <= self.limit
        if self.before is not None or (fits and self.fixed is None and self._rows_for_all(variant)):
            return found
        self.pulse.now("context parallel plans")
        kept = kept_kinds(self.keep, variant, self.fixed)
        more = search_queries(variant.costs, self.where, found, self.scatters, kept)
        # As those of other policies of remat: what waits for the host counts, too.
        more = recost(variant, variant, more, self.where, self.scatters)
        near = [each for each in more if each.objective < MAY_BE_BETTER * found[0].objective]
        return sorted([*found, *near], key=lambda each: each.objective)

    def _rows_for_all(self, variant: Variant) -> bool:
        """Whether the batch can be cut over all devices."""
        if "batch" not in variant.names:
            return False
        rows = variant.groups.sizes[variant.names.index("batch")]
        return min(rows) % self.hardware.num_devices == 0

    def _refine(self, variant: Variant, found: list[Candidate]) -> list[Candidate]:
        if self.before is not None:
            return self._find(variant)
        kept = kept_kinds(self.keep, variant, self.fixed)
        return refine(variant, found, self.where, self.scatters, kept)


def _check_shard_maps(step: TracedStep, fixed: MeshSpec | None) -> None:
    """Refuse a step whose own `shard_map` is over another mesh than is planned for."""
    for eqn, *_ in equations(step.closed):
        if eqn.primitive.name != "shard_map":
            continue
        sizes = dict(eqn.params["mesh"].shape)
        if fixed is None or dict(zip(fixed.names, fixed.sizes, strict=True)) != sizes:
            text = ", ".join(f"{name}:{size}" for name, size in sizes.items())
            raise PlanningError(
                f"{source_line(eqn)}: a shard_map over {text}. What is inside of it is sharded by "
                f"hand, so plan for that mesh: {option_text('mesh', text)}.",
                option="mesh",
            )


def _trace(
    donate_argnums: int | Sequence[int] | None,
    fixed: MeshSpec | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[str],
    donated: Sequence[int] | None,
) -> TracedStep:
    """Trace the step; where it needs a mesh around it, with the one that is planned for.

    `donated`: arguments that are donated where the user says nothing.
    """
    told = donated if donate_argnums is None else donate_argnums

    def trace() -> TracedStep:
        parts, donated = read_arguments(function, args, names, told)
        step = trace_step(function, parts, names, donated)
        _check_shard_maps(step, fixed)
        return step

    try:
        return trace()
    except PlanningError:
        raise
    except Exception as error:
        # Constraints that are bare specs, and shard_map without a mesh of its own.
        if "mesh" not in str(error):
            raise
        if fixed is None:
            error.add_note("meshwright: the step names axes of a mesh. Plan for it: mesh='...'.")
            raise
    with jax.sharding.use_abstract_mesh(abstract_mesh(fixed)):
        return trace()
