"""Programs on the mesh of the group that runs them: what names another mesh is moved there.

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
from meshwright.errors import PipelineError, listing
from meshwright.mpmd.groups import Groups
from meshwright.trees.specs import entry_axes, shard_count


def rewrite_to_group_mesh(eqns: Iterable[Any], groups: Groups, group: int) -> tuple[Any, ...]:
    """Equations as they run in a group; their variables stay."""
    place = _Place(groups, group)
    return tuple(place.equation(eqn, {}) for eqn in eqns)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A group, and the programs that were moved there: one that is called often stays one."""

    groups: Groups
    group: int
    moved: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.groups.meshes[self.group]

    def equation(self, eqn: Any, renamed: dict[Any, Any]) -> Any:
        if eqn.primitive.name == "shard_map":
            self._check_shard_map(eqn)
        if eqn.primitive is _compat.known_primitives()["constraint"]:
            self._check_constraint(eqn)
        return eqn.replace(
            invars=[renamed.get(var, var) if _is_var(var) else var for var in eqn.invars],
            outvars=[renamed.get(var, var) for var in eqn.outvars],
            params={name: self._value(value) for name, value in eqn.params.items()},
            ctx=_compat.equation_context(eqn.ctx, self._abstract(eqn.ctx.cur_abstract_mesh)),
        )

    def _value(self, value: Any) -> Any:
        """A parameter of an equation, with every mesh and program in it moved."""
        jc = _compat.jaxprs()
        if type(value) in (tuple, list):
            return type(value)(map(self._value, value))
        if isinstance(value, (jc.Jaxpr, jc.ClosedJaxpr)):
            if id(value) not in self.moved:
                closed = hasattr(value, "consts")
                found = value.map_jaxpr(self._program) if closed else self._program(value)
                self.moved[id(value)] = found
            return self.moved[id(value)]
        if isinstance(value, NamedSharding):
            spec = self.groups.local_spec(value.spec)
            return NamedSharding(self._value(value.mesh), spec, memory_kind=value.memory_kind)
        if isinstance(value, PartitionSpec):
            return self.groups.local_spec(value)
        if isinstance(value, AbstractMesh):
            return self._abstract(value)
        return self.mesh if isinstance(value, Mesh) and not value.empty else value

    def _program(self, jaxpr: Any) -> Any:
        made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
        renamed = {v: self._variable(v) for v in (*jaxpr.constvars, *jaxpr.invars, *made)}
        return jaxpr.replace(
            constvars=[renamed[var] for var in jaxpr.constvars],
            invars=[renamed[var] for var in jaxpr.invars],
            outvars=[renamed[var] if _is_var(var) else var for var in jaxpr.outvars],
            eqns=[self.equation(eqn, renamed) for eqn in jaxpr.eqns],
            debug_info=jaxpr.debug_info,
        )

    def _variable(self, var: Any) -> Any:
        if not isinstance(var.aval, jax.core.ShapedArray) or var.aval.sharding.mesh.empty:
            return var
        sharding = var.aval.sharding
        moved = NamedSharding(self._abstract(sharding.mesh), sharding.spec)
        return type(var)(var.aval.update(sharding=moved))  # type: ignore[no-untyped-call]

    def _abstract(self, mesh: AbstractMesh) -> AbstractMesh:
        """The group's mesh, manual along the axes along which the other one is."""
        if mesh.empty:
            return mesh
        kinds = dict.fromkeys(mesh.manual_axes, AxisType.Manual)
        moved: AbstractMesh = self.mesh.abstract_mesh.update_axis_types(kinds)
        return moved

    def _check_constraint(self, eqn: Any) -> None:
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

    def _check_shard_map(self, eqn: Any) -> None:
        """Blocks must have the shape, and collectives the reach, that they were traced with."""
        params = eqn.params
        sizes = params["mesh"].shape
        for spec in (*params["in_specs"], *params["out_specs"]):
            self._check_axes(eqn, spec)
        used = {
            axis for spec in (*params["in_specs"], *params["out_specs"]) for axis in _axes(spec)
        }
        used |= set(_names(params["jaxpr"].eqns)) & set(sizes)
        for axis in sorted(used):
            if self.mesh.shape.get(axis) != sizes[axis]:
                self._refuse(
                    eqn,
                    f"it is mapped over {axis!r} of size {sizes[axis]}, which has size "
                    f"{self.mesh.shape.get(axis, 'none')} there. Map over axes that are the same "
                    "in every group.",
                )

    def _check_axes(self, eqn: Any, spec: PartitionSpec) -> None:
        for axis in _axes(spec):
            if axis not in self.mesh.shape:
                self._refuse(
                    eqn,
                    f"{spec} names the axis {axis!r}, and the group's mesh has "
                    f"{listing(self.mesh.axis_names)}. Use axes that every group has, or leave "
                    "this to the compiler.",
                )

    def _refuse(self, eqn: Any, what: str) -> None:
        raise PipelineError(
            f"{eqn.primitive.name} at {_compat.source_line(eqn)}, in group {self.group}: {what}"
        )


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in entry_axes(entry)]


def _names(eqns: Sequence[Any]) -> Iterator[str]:
    """Words among the parameters of equations, also inside of their programs: names of axes."""
    for eqn in eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list, frozenset)) else (value,):
                if isinstance(item, str):
                    yield item
                elif hasattr(item, "eqns"):
                    yield from _names(item.eqns)


def _is_var(var: Any) -> bool:
    return not isinstance(var, _compat.jaxprs().Literal)
