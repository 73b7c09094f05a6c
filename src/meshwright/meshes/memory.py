"""On what hardware an `AbstractMesh` of ours was built; it has no devices that could tell."""

from __future__ import annotations

import weakref
from typing import Any

from jax.sharding import AbstractMesh

from meshwright.errors import MeshError, listing
from meshwright.placement import Placement

# JAX hands out one object for equal abstract meshes, so one mesh may stand for several machines.
_built: weakref.WeakKeyDictionary[AbstractMesh, dict[Any, Placement]] = weakref.WeakKeyDictionary()


def remember(mesh: AbstractMesh, placement: Placement) -> None:
    hardware = placement.topology
    how = tuple((axis.weight, axis.parts, axis.order) for axis in placement.axes)
    _built.setdefault(mesh, {})[hardware.name, hardware.axes, how] = placement


def recall(mesh: AbstractMesh) -> Placement:
    """The placement behind an abstract mesh; refused when none or several fit."""
    found = _built.get(mesh, {})
    if len(found) == 1:
        return next(iter(found.values()))
    problem = "has no devices"
    if found:
        names = listing(dict.fromkeys(name for name, _, _ in found))
        problem = f"was built in {len(found)} ways, on {names}, and does not say which is meant"
    raise MeshError(
        f"this AbstractMesh {problem}: say on what hardware, explain(mesh, on='v5p:8x8x8')."
    )
