"""`MpmdSharding`: in which groups an array lives, and how each of them splits it."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.mpmd.groups.checks import check_ids
from meshwright.partitioning.specs import make_spec, mesh_axes, problems


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MpmdSharding:
    """Where an array of groups lies: the groups, the numbers of those that hold it, the split.

    `mesh_ids` is a number or several. `spec` holds in all of them, or is a dict with one per
    group. The axis along which an `MpmdMesh` was cut is dropped from it: whether an array lives
    in several groups is what `mesh_ids` says.

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
        ids = read_ids("mesh_ids", mesh_ids, groups)
        object.__setattr__(self, "mpmd_mesh", groups)
        object.__setattr__(self, "mesh_ids", ids)
        object.__setattr__(self, "specs", tuple(_specs(groups, ids, spec)))

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all groups; refused where they disagree."""
        for group, spec in zip(self.mesh_ids, self.specs, strict=True):
            if not _alike(spec, self.specs[0]):
                raise GroupError(
                    f"the groups split the array in different ways: {self.specs[0]} in group "
                    f"{self.mesh_ids[0]}, {spec} in group {group}. Ask sharding_of(group)."
                )
        return self.specs[0]

    @functools.cached_property
    def shardings(self) -> dict[int, NamedSharding]:
        """`{group: its sharding}`; shared, so nobody may write to it."""
        pairs = zip(self.mesh_ids, self.specs, strict=True)
        return {group: NamedSharding(self.mpmd_mesh.meshes[group], spec) for group, spec in pairs}

    def sharding_of(self, group: int) -> NamedSharding:
        """The sharding inside a group."""
        if group not in self.shardings:
            raise GroupError(
                f"group {short(group)} does not hold the array; groups {listing(self.mesh_ids)} do."
            )
        return self.shardings[group]

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """The groups among them that have devices of this process."""
        if self.mpmd_mesh.compile_only:
            return ()
        held = self.shardings.items()
        return tuple(group for group, split in held if split.has_addressable_devices)

    @property
    def local(self) -> NamedSharding | None:
        """The sharding in this process's group, the first where it has several; None without."""
        return self.shardings[self.local_ids[0]] if self.local_ids else None

    def __repr__(self) -> str:
        specs = listing(dict.fromkeys(self.specs), 3)
        return f"MpmdSharding({specs} in {named(self.mesh_ids)} of {self.mpmd_mesh.mpmd_dim})"


def named(ids: Sequence[int]) -> str:
    """
    >>> named([3]), named([0, 2])
    ('group 3', 'groups 0, 2')
    """
    return f"group{'s' if len(ids) > 1 else ''} {listing(ids)}"


def read_ids(what: str, ids: Any, groups: Groups) -> tuple[int, ...]:
    """A group or several, in order of their numbers."""
    several = [ids] if isinstance(ids, numbers.Integral) else ids
    return tuple(sorted(check_ids(what, several, groups.mpmd_dim)))


def _alike(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Whether two specs split alike; whole dims at the end do not count."""
    return make_spec(one) == make_spec(other)


def _specs(groups: Groups, ids: Sequence[int], spec: Any) -> Iterator[PartitionSpec]:
    per_group = spec if isinstance(spec, Mapping) else dict.fromkeys(ids, spec)
    strangers = [group for group in per_group if group not in ids]
    if strangers:
        raise GroupError(
            f"spec: group {short(strangers[0])} has a spec but is not one of {named(ids)}."
        )
    for group in ids:
        if group not in per_group:
            raise GroupError(f"spec: group {group} has none. Give one for each of {named(ids)}.")
        yield _checked(groups, group, per_group[group])


def _checked(groups: Groups, group: int, spec: Any) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec):
        raise GroupError(f"spec: group {group}: {short(spec)} is not a PartitionSpec.")
    if spec.unreduced or spec.reduced:
        raise GroupError(f"spec: group {group}: {spec} asks for more than a split. Name axes only.")
    inside = groups.local_spec(spec)
    # Dims are not known here; a size of zero is divisible by everything.
    wrong = problems(f"group {group}", (0,) * len(inside), inside, mesh_axes(groups.meshes[group]))
    for problem in wrong:
        raise GroupError(f"spec: {problem}")
    return inside
