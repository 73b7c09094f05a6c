"""`MpmdMesh` and `MeshGroups`: devices in groups that each run their own program, either one mesh
cut along an axis or a list of meshes; and `Groups`, their common interface.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshwright import _compat
from meshwright._show import LONGEST_REPR, Sheet, Shown, Table
from meshwright._text import plural, plural_noun, ranges
from meshwright.errors import GroupError, listing, near, short
from meshwright.trees.specs import entry_axes

# Groups whose row is printed; a job with thousands must still fit on a screen.
_MOST_ROWS = 16


class Groups(Shown, abc.ABC):
    """Meshes with devices of their own, each to run its own program, numbered from 0.

    Either an `MpmdMesh`, one mesh cut along an axis, or `MeshGroups`, meshes of any shapes. What
    is derived from them is computed once, on first use, since there may be 100,000 devices; the
    dicts are shared, so do not write to them.
    """

    meshes: tuple[Mesh, ...]

    def check(self) -> None:
        """Raise `GroupError` if groups overlap, differ in platform, or share a process."""
        # In this order: a device that is in two groups would also put its process into two.
        check_one_kind(list(self.device_mpmd_idx))
        _ = self.process_mpmd_idx  # computing it checks it

    @property
    def unstack(self) -> list[Mesh]:
        """The groups' meshes, as a list."""
        return list(self.meshes)

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        return len(self.meshes)

    @functools.cached_property
    def device_mpmd_idx(self) -> dict[Any, int]:
        """`{device: its group}`."""
        return group_of_devices(self.meshes)

    @functools.cached_property
    def mpmd_idx_for_mesh(self) -> dict[Mesh, int]:
        """`{group mesh: its number}`."""
        # Groups share no device, so no two of these meshes are equal.
        return {mesh: group for group, mesh in enumerate(self.meshes)}

    @functools.cached_property
    def compile_only(self) -> bool:
        """Whether the devices exist only for the compiler; then they belong to no process."""
        # `check` has made sure that all devices are alike in this.
        return bool(_compat.is_compile_only(self.meshes[0].devices.flat[0]))

    @functools.cached_property
    def process_mpmd_idx(self) -> dict[int, int]:
        """`{process: its group}`; for a single process that holds several, the first of them."""
        return {} if self.compile_only else group_of_processes(self.device_mpmd_idx)

    @property
    def spans_processes(self) -> bool:
        """Whether more than one process has devices here."""
        return len(self.process_mpmd_idx) > 1

    @property
    def my_mpmd_axis_index(self) -> int:
        """This process's group. Raises `GroupError` unless the groups span processes."""
        if not self.spans_processes:
            why = "exist only for the compiler" if self.compile_only else "are all in one process"
            raise GroupError(
                f"no group is this process's own: the devices {why}. Name a group by its number, "
                "or compile against lowering_mesh()."
            )
        process = jax.process_index()
        if process not in self.process_mpmd_idx:
            raise GroupError(
                f"process {process} has no devices in {self!r}; processes "
                f"{listing(self.process_mpmd_idx)} have. Do not address their arrays from here."
            )
        return self.process_mpmd_idx[process]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The mesh of this process's group. Raises `GroupError` as `my_mpmd_axis_index` does."""
        return self.meshes[self.my_mpmd_axis_index]

    def lowering_mesh(self) -> Mesh:
        """Return the mesh to compile against: this process's group, or group 0 if it has all."""
        # Compile-only devices belong to no process, so for them it is group 0, too.
        return self.my_mpmd_group_mesh if self.spans_processes else self.meshes[0]

    @abc.abstractmethod
    def mpmd_submesh(self, indices: Sequence[int]) -> Groups:
        """Return the chosen groups, in the order given."""

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return a spec as it holds inside a group."""
        return spec

    def to_json(self) -> dict[str, Any]:
        """Return the axis that was cut (or `None`) and, per group, its axes, devices, processes.

        Devices and processes are numbers, so that `json.dumps` takes it as it is.
        """
        axis = getattr(self, "mpmd_axis_name", None)
        return {
            "mpmd_axis": None if axis is None else str(axis),
            "groups": [
                {
                    "axes": {str(name): size for name, size in mesh.shape.items()},
                    "devices": [int(device.id) for device in mesh.devices.flat],
                    "processes": [] if self.compile_only else _processes(mesh),
                }
                for mesh in self.meshes
            ],
        }

    def _headline(self) -> str:
        devices = plural(len(self.device_mpmd_idx), "device")
        return f"{self.mpmd_dim} {plural_noun(self.mpmd_dim, 'group')}, {devices}"

    def _sheet(self) -> Sheet:
        rows = [
            [
                str(group),
                axes_text(mesh),
                ranges(device.id for device in mesh.devices.flat),
                "compile-only" if self.compile_only else ranges(_processes(mesh)),
            ]
            for group, mesh in enumerate(self.meshes[:_MOST_ROWS])
        ]
        left_out = self.mpmd_dim - _MOST_ROWS
        shown = Table(
            ["group", "mesh", "devices", "process"],
            rows,
            [True, False, False, False],
            left_out=f"and {left_out} more groups" if left_out > 0 else "",
        )
        return Sheet(self._headline(), [shown])


@dataclasses.dataclass(frozen=True, repr=False)
class MpmdMesh(Groups):
    """A mesh cut along one axis: as many groups as the axis is long, all of one shape.

    A group's mesh keeps all axis names and types, with size 1 along the axis that was cut. In
    several processes every process belongs to exactly one group. Entered with `with`, it is the
    last of `MpmdMesh.mesh_stack` inside. Raises `GroupError` if the mesh has no such axis or no
    devices, or if a process has devices in two groups.

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

    # Of the whole process, not per thread, unlike JAX's own mesh context.
    mesh_stack: ClassVar[list[MpmdMesh]] = []

    def __post_init__(self) -> None:
        mesh, axis = check_mesh("jax_mesh", self.jax_mesh), self.mpmd_axis_name
        if axis not in mesh.axis_names:
            hint = near(axis, map(str, mesh.axis_names)) if isinstance(axis, str) else ""
            raise GroupError(
                f"mpmd_axis_name: no axis {short(axis)} in this mesh: "
                f"{listing(mesh.axis_names)}.{hint}",
                option="mpmd_axis_name",
            )
        self.check()

    def __enter__(self) -> MpmdMesh:
        MpmdMesh.mesh_stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        MpmdMesh.mesh_stack.pop()

    @functools.cached_property
    def mpmd_axis(self) -> int:
        """The index, among the mesh's axes, of the axis that is cut."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    # A plain attribute in the base class, computed here: mypy sees an override by a property.
    @functools.cached_property
    def meshes(self) -> tuple[Mesh, ...]:  # type: ignore[override]
        """The groups' meshes, as a tuple; `unstack` has them as a list."""
        count = self.jax_mesh.devices.shape[self.mpmd_axis]
        return tuple(self._mesh_of([group]) for group in range(count))

    @functools.cached_property
    def device_coords(self) -> dict[Any, tuple[int, ...]]:
        """`{device: its coordinates in the whole mesh}`."""
        return {device: coords for coords, device in np.ndenumerate(self.jax_mesh.devices)}

    def mpmd_submesh(self, indices: Sequence[int]) -> MpmdMesh:
        """Return an `MpmdMesh` of the chosen groups, in the order given.

        Raises `GroupError` for a group that is not there or is named twice.

        >>> import meshwright as mw
        >>> groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:2"), "pp")
        >>> [device.id for device in groups.mpmd_submesh([3, 0]).jax_mesh.devices.flat]
        [6, 7, 0, 1]
        """
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim, option="indices")
        return MpmdMesh(self._mesh_of(chosen), self.mpmd_axis_name)

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return a spec as it holds inside a group: without the axis that was cut."""
        return without_axis(spec, self.mpmd_axis_name)

    def __repr__(self) -> str:
        return clip(f"MpmdMesh('{axes_text(self.jax_mesh)}', {self.mpmd_axis_name!r})")

    def _headline(self) -> str:
        return (
            f"{self.mpmd_dim} {plural_noun(self.mpmd_dim, 'group')} of "
            f"{plural(self.meshes[0].size, 'device')}, "
            f"{axes_text(self.jax_mesh)} cut along {self.mpmd_axis_name}"
        )

    def _mesh_of(self, groups: Sequence[int]) -> Mesh:
        mesh = self.jax_mesh
        # A list of indices keeps the axis, also where it gets size 1, and so all axis names.
        devices = np.take(mesh.devices, list(groups), axis=self.mpmd_axis)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclasses.dataclass(frozen=True, repr=False)
class MeshGroups(Groups):
    """A list of meshes as groups, each with devices of its own; shapes and axis names may differ.

    Raises `GroupError` if the list is empty, if two meshes share a device, or if a process has
    devices in two of them.

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
            raise GroupError(
                f"meshes: {short(self.meshes)} is not a list of meshes.", option="meshes"
            )
        if not self.meshes:
            raise GroupError("meshes: the list is empty. Give at least one mesh.", option="meshes")
        for group, mesh in enumerate(self.meshes):
            check_mesh(f"group {group}", mesh)
        # A tuple, so that groups made of a list are hashable and compare by value.
        object.__setattr__(self, "meshes", tuple(self.meshes))
        self.check()

    def mpmd_submesh(self, indices: Sequence[int]) -> MeshGroups:
        """Return the chosen groups, in the order given.

        Raises `GroupError` for a group that is not there or is named twice.
        """
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim, option="indices")
        return MeshGroups(tuple(self.meshes[group] for group in chosen))

    def __repr__(self) -> str:
        shown = [f"'{axes_text(mesh)}'" for mesh in self.meshes[:8]]
        more = len(self.meshes) - len(shown)
        shown += [f"and {more} more"] if more else []
        return clip(f"MeshGroups([{', '.join(shown)}])")


def as_groups(groups: Groups | Sequence[Mesh]) -> Groups:
    """Return groups as they are; make `MeshGroups` of a list of meshes."""
    if isinstance(groups, Groups):
        return groups
    if isinstance(groups, Mesh):
        raise GroupError(
            f"groups: {short(groups)} is one mesh. Cut it with MpmdMesh(mesh, 'pp'), or pass a "
            "list of meshes.",
            option="groups",
        )
    if not isinstance(groups, (list, tuple)):
        raise GroupError(
            f"groups: {short(groups)} is not an MpmdMesh or a list of meshes.", option="groups"
        )
    return MeshGroups(tuple(groups))


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Drop one mesh axis from a spec; a spec that does not name it is returned as it is.

    Used for the axis along which a mesh was cut: inside a group it has size 1.

    >>> without_axis(PartitionSpec(("pp", "fsdp"), "pp", "tp"), "pp")
    P('fsdp', None, 'tp')
    """
    if not any(axis in entry_axes(entry) for entry in spec.partitions):
        return spec
    # Axes over which values are still to be summed are no part of `partitions`.
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


def check_mesh(what: str, mesh: object) -> Mesh:
    """Return `mesh` if it is one that has devices; else raise a `GroupError` that begins `what`."""
    # First, because to a user an AbstractMesh is a mesh: "not a Mesh" would not help.
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
    """Write a mesh's axes as the text of a `MeshSpec`."""
    return ", ".join(f"{name}:{size}" for name, size in mesh.shape.items()) or "no axes"


def group_of_devices(meshes: Sequence[Mesh]) -> dict[Any, int]:
    """Return `{device: its group}`; raise if a device is in two places."""
    group_of: dict[Any, int] = {}
    for group, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            if device in group_of:
                places = f"groups {group_of[device]} and {group}"
                if group_of[device] == group:
                    places = f"group {group} twice"
                raise GroupError(f"device {device.id} is in {places}. Use every device once.")
            group_of[device] = group
    return group_of


def check_one_kind(devices: Sequence[Any]) -> None:
    """Raise unless all devices are of one platform, and all live or all compile-only."""
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
    """Return `{process: its group}`; raise if one of several processes is in two groups."""
    groups: dict[int, set[int]] = collections.defaultdict(set)
    for device, group in group_of.items():
        groups[device.process_index].add(group)
    torn = {process: sorted(several) for process, several in groups.items() if len(several) > 1}
    # A single process runs the programs of all groups itself, one after the other.
    if len(groups) > 1 and torn:
        process = min(torn)
        others = f" (and {len(torn) - 1} more likewise)" if len(torn) > 1 else ""
        raise GroupError(
            f"process {process} is in groups {listing(torn[process])}{others}. A process runs one "
            "program: give all its devices to one group, e.g. let the axis that is cut cross the "
            "processes, meshwright.mesh(..., dcn={axis: number of groups})."
        )
    return {process: min(several) for process, several in sorted(groups.items())}


def check_ids(what: str, ids: Any, count: int, *, option: str | None = None) -> tuple[int, ...]:
    """Return numbers of groups in the order given, each below `count` and none twice.

    Messages begin with `what`: an option, or the path of an array.
    """

    def error(problem: str) -> GroupError:
        return GroupError(f"{what}: {problem}", option=option)

    try:
        # These can be iterated, but hardly mean a list of groups.
        several = None if isinstance(ids, (str, bytes, Mapping)) else list(ids)
    except TypeError:
        several = None
    if several is None:
        raise error(f"{short(ids)} is not a list of group numbers, e.g. [0, 1].")
    checked: list[int] = []
    for number in several:
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise error(f"{short(number)} is not the number of a group.")
        number = int(number)
        if not 0 <= number < count:
            raise error(f"group {number} is not there. Use 0 to {count - 1}.")
        if number in checked:
            raise error(f"group {number} appears twice. Name it once.")
        checked.append(number)
    if not checked:
        raise error(f"no groups are named. Name at least one of 0 to {count - 1}.")
    return tuple(checked)


def clip(text: str) -> str:
    """Cut a `repr` that ends in a bracket to the length that all of them have at most."""
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 5]} ...)"


def _processes(mesh: Mesh) -> list[int]:
    return sorted({int(device.process_index) for device in mesh.devices.flat})
