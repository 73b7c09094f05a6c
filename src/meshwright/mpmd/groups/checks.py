"""What groups must be: meshes with devices of their own, of one kind, a process in one of them."""

from __future__ import annotations

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright import _compat
from meshwright.errors import GroupError, listing, short


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
