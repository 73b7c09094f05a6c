"""Passes 4 and 5: the program of each task, and its equations on the mesh of its group.

Pass 4 says which values a task takes, gives, and adds up over microbatches. A step is traced once,
under the mesh that the caller has set or names, which is the whole one as a rule. So pass 5
rewrites constraints, `shard_map`s and variables to the group's mesh before anything is compiled;
what the group cannot express is refused, in every process alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright._compat import Atom, Eqn, Jaxpr, Var, is_literal
from meshwright.errors import PipelineError, listing
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.staged_program import NO_STAGE, StageKey, variables_read
from meshwright.pipelines.stages import StageProgram
from meshwright.pipelines.trace_marks import is_total
from meshwright.schedules.types import TaskKind
from meshwright.trees.specs import entry_axes, shard_count

TaskKey = tuple[str, int]  # (the letters of a TaskKind, stage): what a schedule's tasks are made of
Sum = tuple[int, int]  # (result, part): a result may be added up in parts, one per stage


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The equations of one task.

    `eqns` begins with `recomputed`, which other tasks may compute too. `outs` are what other tasks
    take and results of single microbatches; `sums` are values, made here or taken as inputs, that
    the task adds to accumulators.
    """

    kind: str
    stage: int
    eqns: tuple[Eqn, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    sums: dict[Sum, Var]
    recomputed: tuple[Eqn, ...]

    @property
    def name(self) -> str:
        """As it is called in traces and messages: `F0`."""
        return f"{self.kind}{self.stage}"


# Pass 4, programs of tasks.
#
# In: equations by stage, and the tasks that the schedule has. Out: one `Program` per task.
# Invariant: every input of a program is an operand of the region, a constant, or an output of
# another program for the same microbatch; nothing but what others need is an output. Example: stage
# 1 of mean((stage_end(x @ a) @ b) ** 2) with B and W split:
#     F1  h, b -> y            y = dot h b; l = ...    sums: l
#     B1  y, b -> dy, dh       dy = ...; dh = dot dy b
#     W1  h, dy -> nothing     db = dot h dy           sums: db


def programs(stages: StageProgram, tasks: Iterable[TaskKey]) -> dict[TaskKey, Program]:
    """Return the programs of the tasks that a schedule names."""
    keys = sorted(set(tasks))  # every process builds the same plan, and a set has no order
    own = {key: _equations(stages, *key) for key in keys}
    again = {key: recomputed(stages, variables_read(own[key])) for key in keys}
    computed = {key: {var for eqn in own[key] for var in eqn.outvars} for key in keys}
    sums = {key: _sums(stages, key, computed) for key in keys}
    ins = {}
    for key in keys:
        body = [*again[key], *own[key]]
        defined = {var for eqn in body for var in eqn.outvars}
        used = dict.fromkeys([*variables_read(body), *sums[key].values()])
        ins[key] = tuple(var for var in used if var not in defined)
    # Only now: what a task gives is what the inputs of all others ask for.
    results = _results(stages) | _gradients(stages)
    by_task = {}
    for key in keys:
        wanted = results.union(*(ins[other] for other in keys if not _exclusive(key, other)))
        outs = tuple(var for eqn in own[key] for var in eqn.outvars if var in wanted)
        eqns = (*again[key], *own[key])
        by_task[key] = Program(*key, eqns, ins[key], outs, sums[key], tuple(again[key]))
    return by_task


def _equations(stages: StageProgram, kind: str, stage: int) -> list[Eqn]:
    """Return the equations of a task, without those that it computes again."""
    if kind == TaskKind.FORWARD:
        return stages.eqns.get((TaskKind.FORWARD, stage), [])
    backward = stages.eqns.get((TaskKind.BACKWARD, stage), [])
    if kind == TaskKind.BACKWARD:
        return backward
    urgent = _urgent(stages, stage)
    return [eqn for eqn in backward if (id(eqn) in urgent) == (kind == TaskKind.INPUT_GRADIENT)]


def _urgent(stages: StageProgram, stage: int) -> set[int]:
    """Return the equations (by id) of a backward that other stages wait for: its B, not its W."""
    key = (TaskKind.BACKWARD, stage)
    others = [eqn for at, eqns in stages.eqns.items() if at != key for eqn in eqns]
    needed = set(variables_read(others)) | _results(stages)
    urgent = set()
    for eqn in reversed(stages.eqns.get(key, [])):
        if any(var in needed for var in eqn.outvars):
            urgent.add(id(eqn))
            needed.update(variables_read([eqn]))
    return urgent


def _sums(stages: StageProgram, key: TaskKey, computed: dict[TaskKey, set[Var]]) -> dict[Sum, Var]:
    """Return what a task adds up: reduced results and parts of gradients that it makes.

    What no task of the stage makes, an operand as it came, is added up by its F, B or BW.
    """
    kind, stage = key
    sums = {}
    for number, (at, var) in all_sums(stages).items():
        if at[1] != stage or (at[0] == TaskKind.FORWARD) != (kind == TaskKind.FORWARD):
            continue
        made_by_none = not any(var in computed[other] for other in computed if other[1] == stage)
        if var in computed[key] or (made_by_none and kind != TaskKind.WEIGHT_GRADIENT):
            sums[number] = var
    return sums


def all_sums(stages: StageProgram) -> dict[Sum, tuple[StageKey, Var]]:
    """Return every value that is added up over microbatches, and its stage."""
    maker = {var: at for at, eqns in stages.eqns.items() for e in eqns for var in e.outvars}
    sums = {}
    for number, (atom, how) in enumerate(zip(stages.outs, stages.region.reductions, strict=True)):
        if is_total(how) and not is_literal(atom) and atom in maker:
            sums[number, 0] = maker[atom], atom
    first = len(stages.outs)
    for number, parts in enumerate(stages.grads if is_total(stages.region.gradient or "") else ()):
        for part, (at, var) in enumerate(parts):
            if at != NO_STAGE:
                sums[first + number, part] = at, var
    return sums


def _results(stages: StageProgram) -> set[Atom]:
    """Return values of single microbatches that leave the tasks: joined, or carried on."""
    return {
        atom
        for atom, how in zip(stages.outs, stages.region.reductions, strict=True)
        if not is_total(how) and not is_literal(atom)
    }


def _gradients(stages: StageProgram) -> set[Atom]:
    """Return parts of gradients of single microbatches that leave the tasks: those stacked."""
    if is_total(stages.region.gradient or "mean"):
        return set()
    return {part for parts in stages.grads for at, part in parts if at != NO_STAGE}


def _exclusive(key: TaskKey, other: TaskKey) -> bool:
    """Whether two tasks never run for the same microbatch, or are the same.

    A schedule may have BW for some microbatches and B and W for others: neither feeds the other.
    """
    kinds = (key[0], other[0])
    whole = TaskKind.BACKWARD in kinds and TaskKind.FORWARD not in kinds
    return key == other or (key[1] == other[1] and whole)


def recomputed(stages: StageProgram, needed: Sequence[Var]) -> list[Eqn]:
    """Return the recomputable equations that these variables come from, in order."""
    eqns: dict[int, Eqn] = {}
    visited: set[int] = set()

    def add_maker(var: Var) -> None:
        eqn = stages.recomputable.get(var)
        if eqn is None or id(eqn) in visited:
            return
        visited.add(id(eqn))
        for operand in variables_read([eqn]):
            add_maker(operand)
        eqns[id(eqn)] = eqn

    for var in needed:
        add_maker(var)
    return list(eqns.values())


# Pass 5, rewrite to a group's mesh.
#
# In: equations as they were traced, whose parameters, contexts and inner programs may name the
# whole mesh. Out: equations that name the group's mesh in its place. Invariant: variables at the
# top level stay the same objects, since other programs name them; those inside of inner programs
# are replaced where their type holds a mesh. Example, for group 1 of MpmdMesh(mesh("pp:2, dp:4"),
# "pp"):
#     b = sharding_constraint[sharding=NamedSharding({pp: 2, dp: 4}, P("dp"))] a
# becomes the same with NamedSharding({pp: 1, dp: 4}, P("dp")), a mesh of group 1's four devices.


def rewrite_to_group_mesh(eqns: Iterable[Eqn], groups: Groups, group: int) -> tuple[Eqn, ...]:
    """Return equations as they run in a group; their variables stay."""
    rewriter = _Rewriter(groups, group)
    return tuple(rewriter.equation(eqn, {}) for eqn in eqns)


@dataclasses.dataclass(frozen=True)
class _Rewriter:
    """Rewrites to one group. `programs` caches inner programs by id.

    A function that is called often is one jaxpr object, and stays one: JAX lowers it once.
    """

    groups: Groups
    group: int
    programs: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.groups.meshes[self.group]

    def equation(self, eqn: Eqn, renamed: dict[Var, Var]) -> Eqn:
        # By name: `jax.extend.core.primitives` does not have it (jax 0.10).
        if eqn.primitive.name == "shard_map":
            self._check_shard_map(eqn)
        if eqn.primitive is _compat.known_primitives()["constraint"]:
            self._check_constraint(eqn)
        return eqn.replace(
            invars=[v if is_literal(v) else renamed.get(v, v) for v in eqn.invars],
            outvars=[renamed.get(var, var) for var in eqn.outvars],
            params={name: self._parameter(value) for name, value in eqn.params.items()},
            ctx=_compat.equation_context(eqn.ctx, self._abstract_mesh(eqn.ctx.cur_abstract_mesh)),
        )

    def _parameter(self, value: Any) -> Any:
        """Rewrite every mesh and program in a parameter of an equation."""
        jc = _compat.jaxprs()
        if type(value) in (tuple, list):
            return type(value)(map(self._parameter, value))
        if isinstance(value, (jc.Jaxpr, jc.ClosedJaxpr)):
            if id(value) not in self.programs:
                is_closed = hasattr(value, "consts")
                self.programs[id(value)] = (
                    value.map_jaxpr(self._jaxpr) if is_closed else self._jaxpr(value)
                )
            return self.programs[id(value)]
        if isinstance(value, NamedSharding):
            spec = self.groups.local_spec(value.spec)
            return NamedSharding(self._parameter(value.mesh), spec, memory_kind=value.memory_kind)
        if isinstance(value, PartitionSpec):
            return self.groups.local_spec(value)
        if isinstance(value, AbstractMesh):
            return self._abstract_mesh(value)
        return self.mesh if isinstance(value, Mesh) and not value.empty else value

    def _jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        computed = [var for eqn in jaxpr.eqns for var in eqn.outvars]
        renamed = {v: self._variable(v) for v in (*jaxpr.constvars, *jaxpr.invars, *computed)}
        return jaxpr.replace(
            constvars=[renamed[var] for var in jaxpr.constvars],
            invars=[renamed[var] for var in jaxpr.invars],
            outvars=[v if is_literal(v) else renamed[v] for v in jaxpr.outvars],
            eqns=[self.equation(eqn, renamed) for eqn in jaxpr.eqns],
            debug_info=jaxpr.debug_info,
        )

    def _variable(self, var: Var) -> Var:
        """Make a new variable if the type of the old one names a mesh, as inside of `shard_map`."""
        if not isinstance(var.aval, jax.core.ShapedArray) or var.aval.sharding.mesh.empty:
            return var
        sharding = var.aval.sharding
        moved = NamedSharding(self._abstract_mesh(sharding.mesh), sharding.spec)
        return type(var)(var.aval.update(sharding=moved))  # type: ignore[no-untyped-call]

    def _abstract_mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        """Return the group's mesh, manual along the axes along which the other one is."""
        if mesh.empty:
            return mesh
        kinds = dict.fromkeys(mesh.manual_axes, AxisType.Manual)
        moved: AbstractMesh = self.mesh.abstract_mesh.update_axis_types(kinds)
        return moved

    def _check_constraint(self, eqn: Eqn) -> None:
        """Refuse axes that the group does not have, and dims that they do not divide."""
        sharding, shape = eqn.params["sharding"], eqn.invars[0].aval.shape
        if not isinstance(sharding, NamedSharding):
            self._refuse(eqn, f"{sharding} names devices, not axes. Pass a PartitionSpec.")
        spec = self.groups.local_spec(sharding.spec)
        self._check_axes(eqn, spec)
        for dim, (size, entry) in enumerate(zip(shape, spec.partitions, strict=False)):
            pieces = shard_count(entry, self.mesh.shape)
            if size % pieces:
                self._refuse(
                    eqn,
                    f"dim {dim} of {eqn.invars[0].aval.str_short()} has size {size}, not "
                    f"divisible by {pieces} (axes {listing(entry_axes(entry))}). Use fewer "
                    "microbatches, so that each has more rows, or fewer axes.",
                )

    def _check_shard_map(self, eqn: Eqn) -> None:
        """Refuse axes that have another size in the group.

        The body was traced with the blocks and the collectives of the mesh that it names.
        """
        sizes = eqn.params["mesh"].shape
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        for spec in specs:
            self._check_axes(eqn, spec)
        used = {axis for spec in specs for axis in _axes(spec)}
        used |= set(_strings(eqn.params["jaxpr"].eqns)) & set(sizes)
        for axis in sorted(used):
            if self.mesh.shape.get(axis) != sizes[axis]:
                self._refuse(
                    eqn,
                    f"it is mapped over {axis!r} of size {sizes[axis]}, which has size "
                    f"{self.mesh.shape.get(axis, 'none')} there. Map over axes that are the same "
                    "in every group.",
                )

    def _check_axes(self, eqn: Eqn, spec: PartitionSpec) -> None:
        for axis in _axes(spec):
            if axis not in self.mesh.shape:
                self._refuse(
                    eqn,
                    f"{spec} names the axis {axis!r}, and the group's mesh has "
                    f"{listing(self.mesh.axis_names)}. Use axes that every group has, or leave "
                    "this to the compiler.",
                )

    def _refuse(self, eqn: Eqn, reason: str) -> None:
        raise PipelineError(
            f"{eqn.primitive.name} at {_compat.source_line(eqn)}, in group {self.group}: {reason}"
        )


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in entry_axes(entry)]


def _strings(eqns: Sequence[Eqn]) -> Iterator[str]:
    """Yield strings among the parameters of equations, also inside of their programs.

    Collectives keep their axis names in parameters of different names (`axes`, `axis_name`, ...).
    """
    for eqn in eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list, frozenset)) else (value,):
                if isinstance(item, str):
                    yield item
                elif hasattr(item, "eqns"):
                    yield from _strings(item.eqns)
