"""Filling the open sizes of a spec from a number of devices and slices."""

from __future__ import annotations

import dataclasses
import math

from meshwright.errors import SpecError
from meshwright.spec.checks import check_positive
from meshwright.spec.meshspec import AxisSpec, MeshSpec


def resolve(spec: MeshSpec, devices: int, slices: int | None = None) -> MeshSpec:
    """See `MeshSpec.resolve`."""
    devices = check_positive("devices", devices)
    if slices is not None:
        slices = check_positive("slices", slices)
        if devices % slices:
            raise SpecError(f"{devices} devices do not form {slices} equal slices.")
    axes = _fill_slow(spec, devices, slices)
    known = math.prod(_known(axis) for axis in axes)
    open_axis = next((axis for axis in axes if axis.fast == -1), None)
    if open_axis is None:
        if known != devices:
            raise SpecError(_mismatch(spec, known, devices))
        return MeshSpec(axes)
    if devices % known:
        raise SpecError(
            f"'{spec}': the sizes given multiply to {known}, which does not divide {devices} "
            f"devices, so {open_axis.name!r} has nothing whole to take. {_fix(known, devices)}"
        )
    return MeshSpec(
        tuple(dataclasses.replace(a, fast=devices // known) if a.fast == -1 else a for a in axes)
    )


def _fill_slow(spec: MeshSpec, devices: int, slices: int | None) -> tuple[AxisSpec, ...]:
    known = math.prod(a.slow for a in spec.axes if a.slow not in (None, -1))
    open_axis = next((a for a in spec.axes if a.slow == -1), None)
    if open_axis is None:
        if slices is not None and slices % known:
            fix = f"make the slow parts multiply to a divisor of {slices}."
            raise SpecError(
                f"'{spec}' spans {known} parts of the slow network, but there "
                f"{'is 1' if slices == 1 else f'are {slices}'} (slices, hosts or domains): "
                + ("leave dcn and slow parts out here." if slices == 1 else fix)
            )
        return spec.axes
    if slices is None:
        raise SpecError(
            f"axis {open_axis.name!r} takes what is left of the slow network: say how many "
            "parts it has, resolve(devices, slices=...)."
        )
    if slices % known:
        raise SpecError(
            f"'{spec}': the slow parts given multiply to {known}, which does not divide "
            f"{slices} slices, so {open_axis.name!r} has nothing whole to take there."
        )
    return tuple(
        dataclasses.replace(a, slow=slices // known) if a.slow == -1 else a for a in spec.axes
    )


def _known(axis: AxisSpec) -> int:
    return (axis.slow or 1) * (1 if axis.fast == -1 else axis.fast)


def _mismatch(spec: MeshSpec, known: int, devices: int) -> str:
    if known > devices:
        problem = f"Not enough devices: '{spec}' needs {known}, there are {devices}."
    else:
        problem = f"'{spec}' uses {known} of {devices} devices."
    return f"{problem} {_fix(known, devices)}"


def _fix(known: int, devices: int) -> str:
    return (
        f"Make the sizes multiply to {devices}"
        + (", or put -1 on one axis to take what is left" if devices % known == 0 else "")
        + f" (largest common part: {math.gcd(known, devices)})."
    )
