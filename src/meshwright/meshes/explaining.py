"""`explain(mesh)`: what any mesh, ours or not, means on its hardware."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import MeshError, short
from meshwright.hardware import Topology
from meshwright.hardware import topology as read_topology
from meshwright.meshes.build import prepare
from meshwright.meshes.memory import recall
from meshwright.meshes.targets import attach, one_slice
from meshwright.placement import Placement, measure, place
from meshwright.spec import MeshSpec, SpecLike

# A layout is called better from one per cent on; latency alone makes smaller differences.
_CLEARLY = 0.99


def explain(
    mesh: Mesh | AbstractMesh | SpecLike | Placement,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
) -> Placement:
    """Per axis: the links it uses, their bandwidth, modelled times, what crosses the network.

    Takes any `jax.sharding.Mesh`, and an `AbstractMesh` that `mesh` made for named hardware. A
    spec, or an `AbstractMesh` from elsewhere, has no devices: say `on` what hardware. The result
    prints itself, draws itself in a notebook, and has `to_json()`.

    >>> import meshwright as mw
    >>> print(mw.explain("fsdp:-1, tp:4", on="v5e:16x16").axes[1].cost.shape)
    ring
    """
    if on is None and not one_slice(slices):
        raise MeshError("slices goes with a hardware name: say on='v5p:8x8x8'.")
    if isinstance(mesh, Placement):
        if on is not None or intensity is not None:
            raise MeshError("a Placement is explained as it is; place it anew with other options.")
        return mesh
    if isinstance(mesh, Mesh):
        return _explain_mesh(mesh, on, slices, intensity)
    if on is None and isinstance(mesh, AbstractMesh):
        found = recall(mesh)
        if intensity is None:
            return found
        return place(found.spec, found.topology, intensity=intensity)
    if on is None:
        raise MeshError(
            f"{short(mesh)} has no devices: say on what hardware, explain(..., on='v5p:8x8x8')."
        )
    if isinstance(mesh, AbstractMesh):
        spec = MeshSpec.parse(list(mesh.axis_sizes), names=_printable(mesh.axis_names))
    else:
        spec = MeshSpec.parse(mesh)
    spec, hardware = prepare(spec, read_topology(on, slices=slices))
    return place(spec, hardware, intensity=intensity)


def _printable(names: Sequence[Any]) -> list[str]:
    """Axis names of any mesh as words of ours: JAX allows every hashable value."""
    words: list[str] = []
    for name in names:
        word = re.sub(r"[^\w.-]+", "_", str(name))[:40] or "_"
        words.append(word if word not in words else f"{word}_{len(words)}")
    return words


def _explain_mesh(
    mesh: Mesh, on: Any, slices: int, intensity: Mapping[str, float] | None
) -> Placement:
    if mesh.empty:
        raise MeshError("the mesh is empty: it has no devices.")
    devices = list(mesh.devices.flat)
    hardware = read_topology(devices)
    if on is not None:
        hardware = attach(read_topology(on, slices=slices), devices)
    spec = MeshSpec.parse(list(mesh.devices.shape), names=_printable(mesh.axis_names))
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    found = measure(spec, hardware, positions, intensity=intensity)
    best = place(spec, hardware, intensity=intensity)
    other = best.axes if best.cost < found.cost * _CLEARLY else best.runner_up
    return dataclasses.replace(found, runner_up=other)
