"""Pass 5: rewrite equations to the mesh of the group that runs them.

A step is traced once, under the mesh that the caller has set or names, which is the whole one as
a rule. Its constraints, `shard_map`s and variables are rewritten to the group's mesh before
anything is compiled; what the group cannot express is refused, in every process alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright._compat import Eqn, Jaxpr, Var, is_literal
from meshwright.errors import PipelineError, listing
from meshwright.mpmd.groups import Groups
from meshwright.trees.specs import entry_axes, shard_count

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
