"""`MpmdSharding`: which groups hold an array, and how each of them shards it."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright._text import plural_noun
from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.groups import Groups, MpmdMesh, as_groups, check_ids, clip
from meshwright.trees.specs import make_spec, mesh_axes, spec_problems


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MpmdSharding:
    """The groups that hold an array, and how each of them shards it.

    Args:
      mpmd_mesh: all the groups, or a list of meshes.
      mesh_ids: the number of the group that holds the array, or several numbers.
      spec: the `PartitionSpec` in all of them, or a dict with one per group. The axis along which
        an `MpmdMesh` was cut is dropped from it: whether an array lives in several groups is what
        `mesh_ids` says.

    Raises `GroupError` for a group that is not there, or a spec that its mesh cannot have.

    >>> import meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> split = mw.MpmdSharding(groups, {1, 0}, P(("pp", "fsdp")))
    >>> split
    MpmdSharding(P('fsdp',) in groups 0, 1 of 2)
    >>> dict(split.sharding_of(1).mesh.shape)
    {'pp': 1, 'fsdp': 4}
    """

    mpmd_mesh: Groups
    mesh_ids: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]

    def __init__(
        self,
        mpmd_mesh: Groups | Sequence[Mesh],
        mesh_ids: int | Iterable[int],
        spec: PartitionSpec | Mapping[int, PartitionSpec],
    ):
        groups = as_groups(mpmd_mesh)
        ids = read_ids("mesh_ids", mesh_ids, groups, option="mesh_ids")
        object.__setattr__(self, "mpmd_mesh", groups)
        object.__setattr__(self, "mesh_ids", ids)
        object.__setattr__(self, "specs", tuple(_local_specs(groups, ids, spec)))

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all groups. Raises `GroupError` where they differ."""
        for group, spec in zip(self.mesh_ids, self.specs, strict=True):
            # `make_spec` drops trailing None entries, which mean nothing.
            if make_spec(spec) != make_spec(self.specs[0]):
                raise GroupError(
                    f"the groups split the array in different ways: {self.specs[0]} in group "
                    f"{self.mesh_ids[0]}, {spec} in group {group}. Ask sharding_of(group)."
                )
        return self.specs[0]

    @functools.cached_property
    def shardings(self) -> dict[int, NamedSharding]:
        """`{group: its sharding}`; shared, so do not write to it."""
        pairs = zip(self.mesh_ids, self.specs, strict=True)
        return {group: NamedSharding(self.mpmd_mesh.meshes[group], spec) for group, spec in pairs}

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices that hold the array, those of several groups joined.

        Raises `GroupError` for several groups of a list of meshes, which join to no mesh.
        """
        chosen = self.mpmd_mesh.mpmd_submesh(self.mesh_ids)
        if isinstance(chosen, MpmdMesh):
            return chosen.jax_mesh
        if chosen.mpmd_dim > 1:
            raise GroupError(
                f"{groups_text(self.mesh_ids)} are meshes of their own and join to no mesh. Ask "
                "sharding_of(group).mesh."
            )
        return chosen.meshes[0]

    @property
    def sharding(self) -> NamedSharding:
        """The spec on `mesh`: the array sharded in each group, replicated over the groups."""
        return NamedSharding(self.mesh, self.spec)

    def sharding_of(self, group: int) -> NamedSharding:
        """Return the sharding inside a group. Raises `GroupError` if it does not hold the array."""
        if group not in self.shardings:
            raise GroupError(
                f"group {short(group)} does not hold the array; groups {listing(self.mesh_ids)} do."
            )
        return self.shardings[group]

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """Those of `mesh_ids` that have devices of this process."""
        if self.mpmd_mesh.compile_only:
            return ()  # their devices belong to no process
        shardings = self.shardings.items()
        return tuple(group for group, sharding in shardings if sharding.has_addressable_devices)

    @property
    def local(self) -> NamedSharding | None:
        """The sharding in this process's group, in the first of several, or `None` without any."""
        return self.shardings[self.local_ids[0]] if self.local_ids else None

    def __repr__(self) -> str:
        specs = listing(dict.fromkeys(self.specs), 3)
        held_by = f"{groups_text(self.mesh_ids)} of {self.mpmd_mesh.mpmd_dim}"
        return clip(f"MpmdSharding({specs} in {held_by})")


def groups_text(ids: Sequence[int]) -> str:
    """
    >>> groups_text([3]), groups_text([0, 2])
    ('group 3', 'groups 0, 2')
    """
    return f"{plural_noun(len(ids), 'group')} {listing(ids)}"


def read_ids(what: str, ids: Any, groups: Groups, *, option: str | None = None) -> tuple[int, ...]:
    """Return a group's number or several, sorted and checked; messages begin with `what`."""
    several = [ids] if isinstance(ids, numbers.Integral) else ids
    return tuple(sorted(check_ids(what, several, groups.mpmd_dim, option=option)))


def _local_specs(groups: Groups, ids: Sequence[int], spec: Any) -> Iterator[PartitionSpec]:
    """Yield the spec of each group, checked, as it holds inside the group."""
    per_group = spec if isinstance(spec, Mapping) else dict.fromkeys(ids, spec)
    unexpected = [group for group in per_group if group not in ids]
    if unexpected:
        raise GroupError(
            f"spec: group {short(unexpected[0])} has a spec but is not one of {groups_text(ids)}.",
            option="spec",
        )
    for group in ids:
        if group not in per_group:
            raise GroupError(
                f"spec: group {group} has none. Give one for each of {groups_text(ids)}.",
                option="spec",
            )
        yield _local_spec(groups, group, per_group[group])


def _local_spec(groups: Groups, group: int, spec: Any) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec):
        raise GroupError(
            f"spec: group {group}: {short(spec)} is not a PartitionSpec.", option="spec"
        )
    # Unreduced values are partial sums within one program; an array that is kept holds whole ones.
    if spec.unreduced or spec.reduced:
        raise GroupError(
            f"spec: group {group}: {spec} asks for more than a split. Name axes only.",
            option="spec",
        )
    inside = groups.local_spec(spec)
    # The sizes of the dims are not known here; a size of zero is divisible by everything.
    unknown = (0,) * len(inside)
    for problem in spec_problems(
        f"group {group}", unknown, inside, mesh_axes(groups.meshes[group])
    ):
        raise GroupError(f"spec: {problem}", option="spec")
    return inside
