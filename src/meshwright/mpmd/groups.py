"""`Groups`: what every kind of groups can tell, whether cut from a mesh or given as a list."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import html
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshwright import _compat
from meshwright._html import html_table
from meshwright._text import ranges, table
from meshwright.errors import GroupError, listing, near, short
from meshwright.trees.specs import entry_axes


class Groups(abc.ABC):
    """Meshes with devices of their own, each to run its own program. They are numbered from 0.

    Either an `MpmdMesh`, one mesh cut along an axis, or `MeshGroups`, meshes of any shapes. What
    is derived from them is worked out once; the dicts are shared, so nobody may write to them.
    """

    meshes: tuple[Mesh, ...]

    def check(self) -> None:
        """Refuse groups that overlap, differ in platform, or tear a process apart."""
        check_one_kind(list(self.device_mpmd_idx))
        _ = self.process_mpmd_idx

    @property
    def unstack(self) -> list[Mesh]:
        """The groups' meshes."""
        return list(self.meshes)

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        return len(self.meshes)

    @functools.cached_property
    def device_mpmd_idx(self) -> dict[Any, int]:
        """`{device: its group}`."""
        return group_of_each(self.meshes)

    @functools.cached_property
    def mpmd_idx_for_mesh(self) -> dict[Mesh, int]:
        """`{group mesh: its number}`."""
        return {mesh: group for group, mesh in enumerate(self.meshes)}

    @functools.cached_property
    def compile_only(self) -> bool:
        """Whether the devices exist only for the compiler; they belong to no process then."""
        return bool(_compat.is_compile_only(self.meshes[0].devices.flat[0]))

    @functools.cached_property
    def process_mpmd_idx(self) -> dict[int, int]:
        """`{process: its group}`, of a single process the first one."""
        return {} if self.compile_only else group_of_processes(self.device_mpmd_idx)

    @property
    def spans_processes(self) -> bool:
        """Whether the devices are those of more than one process."""
        return len(self.process_mpmd_idx) > 1

    @property
    def my_mpmd_axis_index(self) -> int:
        """This process's group; refused unless the groups span processes."""
        if not self.spans_processes:
            why = "exist only for the compiler" if self.compile_only else "are all in one process"
            raise GroupError(
                f"no group is this process's own: the devices {why}. Name a group by its number, "
                "or compile against lowering_mesh()."
            )
        me = jax.process_index()
        if me not in self.process_mpmd_idx:
            raise GroupError(
                f"process {me} has no devices in {self!r}; processes "
                f"{listing(self.process_mpmd_idx)} have. Leave what is theirs to them."
            )
        return self.process_mpmd_idx[me]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The mesh of this process's group; refused unless the groups span processes."""
        return self.meshes[self.my_mpmd_axis_index]

    def lowering_mesh(self) -> Mesh:
        """The mesh to compile against: this process's group, or group 0 in a single process."""
        return self.my_mpmd_group_mesh if self.spans_processes else self.meshes[0]

    @abc.abstractmethod
    def mpmd_submesh(self, indices: Sequence[int]) -> Groups:
        """The chosen groups, in the order given."""

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec as it holds inside a group."""
        return spec

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The same facts as plain data."""
        return as_json(self)


# `MpmdMesh`: one mesh, cut along an axis into groups that each run their own program.


@dataclasses.dataclass(frozen=True, repr=False)
class MpmdMesh(Groups):
    """A mesh cut along one axis: as many groups as the axis is long, all of one shape.

    A group's mesh keeps all axis names and types, with size 1 along the axis that was cut. In
    several processes every process belongs to exactly one group. Entered with `with`, it is the
    last of `MpmdMesh.mesh_stack` inside.

    >>> import meshwright as mw
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> groups.mpmd_dim, dict(groups.unstack[1].shape)
    (2, {'pp': 1, 'fsdp': 4})
    >>> print(groups)
    2 groups of 4 devices, pp:2, fsdp:4 cut along pp
    group  mesh          devices  process
        0  pp:1, fsdp:4  0-3      0
        1  pp:1, fsdp:4  4-7      0
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    mesh_stack: ClassVar[list[MpmdMesh]] = []

    def __post_init__(self) -> None:
        mesh, axis = check_mesh("jax_mesh", self.jax_mesh), self.mpmd_axis_name
        if axis not in mesh.axis_names:
            hint = near(axis, map(str, mesh.axis_names)) if isinstance(axis, str) else ""
            raise GroupError(
                f"mpmd_axis_name: no axis {short(axis)} in this mesh: "
                f"{listing(mesh.axis_names)}.{hint}"
            )
        self.check()

    def __enter__(self) -> MpmdMesh:
        MpmdMesh.mesh_stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        MpmdMesh.mesh_stack.pop()

    @functools.cached_property
    def mpmd_axis(self) -> int:
        """The place of the axis that is cut."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @functools.cached_property
    def meshes(self) -> tuple[Mesh, ...]:  # type: ignore[override]
        """The groups' meshes, as in `unstack`."""
        return tuple(
            self._part([group]) for group in range(self.jax_mesh.devices.shape[self.mpmd_axis])
        )

    @functools.cached_property
    def device_coords(self) -> dict[Any, tuple[int, ...]]:
        """`{device: its coordinates in the whole mesh}`."""
        return {device: place for place, device in np.ndenumerate(self.jax_mesh.devices)}

    def mpmd_submesh(self, indices: Sequence[int]) -> MpmdMesh:
        """An `MpmdMesh` of the chosen groups, in the order given.

        >>> import meshwright as mw
        >>> groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:2"), "pp")
        >>> [device.id for device in groups.mpmd_submesh([3, 0]).jax_mesh.devices.flat]
        [6, 7, 0, 1]
        """
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim)
        return MpmdMesh(self._part(chosen), self.mpmd_axis_name)

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec as it holds inside a group: without the axis that was cut."""
        return without_axis(spec, self.mpmd_axis_name)

    def __repr__(self) -> str:
        return f"MpmdMesh('{axes_text(self.jax_mesh)}', {self.mpmd_axis_name!r})"

    def _part(self, groups: Sequence[int]) -> Mesh:
        mesh = self.jax_mesh
        devices = np.take(mesh.devices, list(groups), axis=self.mpmd_axis)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


# `MeshGroups`: groups that need not be alike, from meshes of any shapes and axis names.


@dataclasses.dataclass(frozen=True, repr=False)
class MeshGroups(Groups):
    """Meshes as groups, each with devices of its own; shapes and axis names may differ.

    >>> import jax, meshwright as mw
    >>> devices = jax.devices()
    >>> wide = mw.mesh("fsdp:3, tp:2", devices=devices[:6])
    >>> groups = mw.MeshGroups([wide, mw.mesh("tp:2", devices=devices[6:])])
    >>> print(groups)
    2 groups, 8 devices
    group  mesh          devices  process
        0  fsdp:3, tp:2  0-5      0
        1  tp:2          6-7      0
    """

    meshes: tuple[Mesh, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.meshes, (list, tuple)):
            raise GroupError(f"meshes: {short(self.meshes)} is not a list of meshes.")
        if not self.meshes:
            raise GroupError("meshes: the list is empty. Give at least one mesh.")
        for group, mesh in enumerate(self.meshes):
            check_mesh(f"group {group}", mesh)
        object.__setattr__(self, "meshes", tuple(self.meshes))
        self.check()

    def mpmd_submesh(self, indices: Sequence[int]) -> MeshGroups:
        """The chosen groups, in the order given."""
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim)
        return MeshGroups(tuple(self.meshes[group] for group in chosen))

    def __repr__(self) -> str:
        shown = [f"'{axes_text(mesh)}'" for mesh in self.meshes[:8]]
        more = len(self.meshes) - len(shown)
        return f"MeshGroups([{', '.join(shown + [f'and {more} more'] * (more > 0))}])"


def as_groups(groups: Groups | Sequence[Mesh]) -> Groups:
    """Groups as they are, or made of a list of meshes."""
    if isinstance(groups, Groups):
        return groups
    if isinstance(groups, Mesh):
        raise GroupError(
            f"groups: {short(groups)} is one mesh. Cut it with MpmdMesh(mesh, 'pp'), or pass a "
            "list of meshes."
        )
    if not isinstance(groups, (list, tuple)):
        raise GroupError(f"groups: {short(groups)} is not an MpmdMesh or a list of meshes.")
    return MeshGroups(tuple(groups))


# Specs inside a group: the axis along which the mesh was cut has nothing left to split.


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """The spec with one mesh axis dropped; a spec that does not name it comes back as it is.

    >>> without_axis(PartitionSpec(("pp", "fsdp"), "pp", "tp"), "pp")
    P('fsdp', None, 'tp')
    """
    if not any(axis in entry_axes(entry) for entry in spec.partitions):
        return spec
    sums = {"unreduced": spec.unreduced, "reduced": spec.reduced}
    return PartitionSpec(  # type: ignore[no-untyped-call]
        *(_without(entry, axis) for entry in spec.partitions), **sums
    )


def _without(entry: Any, axis: str) -> Any:
    axes = entry_axes(entry)
    if axis not in axes:
        return entry
    left = tuple(other for other in axes if other != axis)
    return left[0] if len(left) == 1 else left or None


# What groups must be: meshes with devices of their own, of one kind, a process in one of them.


def check_mesh(what: str, mesh: object) -> Mesh:
    """A mesh that has devices."""
    if isinstance(mesh, AbstractMesh):
        raise GroupError(
            f"{what}: an AbstractMesh ({short(mesh)}) has no devices. "
            "Make one that has: meshwright.mesh('pp:2, fsdp:-1')."
        )
    if not isinstance(mesh, Mesh):
        raise GroupError(f"{what}: {short(mesh)} is not a jax.sharding.Mesh.")
    if not mesh.size:
        raise GroupError(f"{what}: the mesh {axes_text(mesh)} is empty. Give it devices.")
    return mesh


def axes_text(mesh: Mesh) -> str:
    """The axes as a mesh spec's text."""
    return ", ".join(f"{name}:{size}" for name, size in mesh.shape.items()) or "no axes"


def group_of_each(meshes: Sequence[Mesh]) -> dict[Any, int]:
    """`{device: its group}`; refuses a device that stands in two places."""
    found: dict[Any, int] = {}
    for group, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            if device in found:
                places = f"groups {found[device]} and {group}"
                if found[device] == group:
                    places = f"group {group} twice"
                raise GroupError(f"device {device.id} is in {places}. Use every device once.")
            found[device] = group
    return found


def check_one_kind(devices: Sequence[Any]) -> None:
    """One platform, and all live or all of a compiler."""
    kinds = collections.Counter(
        f"{device.platform}{', compile-only' if _compat.is_compile_only(device) else ''}"
        for device in devices
    )
    if len(kinds) > 1:
        counts = listing(f"{count} of {kind}" for kind, count in kinds.items())
        raise GroupError(
            f"groups of different platforms: {counts} devices. Use devices of one platform."
        )


def group_of_processes(group_of: Mapping[Any, int]) -> dict[int, int]:
    """`{process: its group}`; refuses a process that is in two, where there are several."""
    places: dict[int, set[int]] = collections.defaultdict(set)
    for device, group in group_of.items():
        places[device.process_index].add(group)
    torn = {process: sorted(held) for process, held in places.items() if len(held) > 1}
    if len(places) > 1 and torn:
        process = min(torn)
        others = f" (and {len(torn) - 1} more likewise)" if len(torn) > 1 else ""
        raise GroupError(
            f"process {process} is in groups {listing(torn[process])}{others}. A process runs one "
            "program: give all its devices to one group, e.g. let the axis that is cut cross the "
            "processes, meshwright.mesh(..., dcn={axis: number of groups})."
        )
    return {process: min(held) for process, held in sorted(places.items())}


def check_ids(what: str, ids: Any, count: int) -> tuple[int, ...]:
    """Numbers of groups in the order given, each there and none twice."""
    try:
        several = None if isinstance(ids, (str, bytes, Mapping)) else list(ids)
    except TypeError:
        several = None
    if several is None:
        raise GroupError(f"{what}: {short(ids)} is not a list of group numbers, e.g. [0, 1].")
    found: list[int] = []
    for number in several:
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise GroupError(f"{what}: {short(number)} is not the number of a group.")
        number = int(number)
        if not 0 <= number < count:
            raise GroupError(f"{what}: group {number} is not there. Use 0 to {count - 1}.")
        if number in found:
            raise GroupError(f"{what}: group {number} appears twice. Name it once.")
        found.append(number)
    if not found:
        raise GroupError(f"{what}: no groups are named. Name at least one of 0 to {count - 1}.")
    return tuple(found)


# Groups as text, HTML and plain data.


MOST_ROWS = 16
_HEADING = ["group", "mesh", "devices", "process"]
_RIGHT = [True, False, False, False]


def as_text(groups: Groups) -> str:
    return "\n".join([_headline(groups), table(_rows(groups), _RIGHT), *_more(groups)])


def as_html(groups: Groups) -> str:
    more = "".join(f"<p>{line}</p>" for line in _more(groups))
    return (
        f'<div style="font-family:system-ui,sans-serif"><b>{html.escape(_headline(groups))}</b>'
        f"{html_table(_rows(groups), _RIGHT)}{more}</div>"
    )


def as_json(groups: Groups) -> dict[str, Any]:
    axis = getattr(groups, "mpmd_axis_name", None)
    return {
        "mpmd_axis": None if axis is None else str(axis),
        "groups": [
            {
                "axes": {str(name): size for name, size in mesh.shape.items()},
                "devices": [int(device.id) for device in mesh.devices.flat],
                "processes": [] if groups.compile_only else _processes(mesh),
            }
            for mesh in groups.meshes
        ],
    }


def _headline(groups: Groups) -> str:
    count = f"{groups.mpmd_dim} group{'s' if groups.mpmd_dim > 1 else ''}"
    whole = getattr(groups, "jax_mesh", None)
    if whole is None:
        return f"{count}, {len(groups.device_mpmd_idx):,} devices"
    axis = getattr(groups, "mpmd_axis_name", None)
    return f"{count} of {groups.meshes[0].size:,} devices, {axes_text(whole)} cut along {axis}"


def _rows(groups: Groups) -> list[list[str]]:
    rows = [
        [
            str(group),
            axes_text(mesh),
            ranges(device.id for device in mesh.devices.flat),
            "compile-only" if groups.compile_only else ranges(_processes(mesh)),
        ]
        for group, mesh in enumerate(groups.meshes[:MOST_ROWS])
    ]
    return [_HEADING, *rows]


def _more(groups: Groups) -> list[str]:
    left = groups.mpmd_dim - MOST_ROWS
    return [f"and {left} more groups"] if left > 0 else []


def _processes(mesh: Mesh) -> list[int]:
    return sorted({int(device.process_index) for device in mesh.devices.flat})
