"""`MeshSpec`: axes, sizes, how much of each crosses the slow network, axis types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from meshwright._checks import (
    LARGEST,
    MOST_AXES,
    check_distinct,
    check_integer,
    check_name,
    check_size,
    check_type,
)
from meshwright.errors import SpecError, listing, near, short


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """One axis. `slow=None`: `fast` is the whole size, its split over the networks is free.

    Otherwise the axis spans `slow` parts over the slow network times `fast` inside.
    """

    name: str
    fast: int
    slow: int | None = None
    type: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        object.__setattr__(self, "fast", check_size(self.name, self.fast))
        if self.slow is not None:
            object.__setattr__(self, "slow", check_size(self.name, self.slow))
        object.__setattr__(self, "type", check_type(self.name, self.type))

    @property
    def size(self) -> int:
        """The whole size, or -1 while a part of it is still open."""
        if self.slow is None:
            return self.fast
        return -1 if -1 in (self.slow, self.fast) else self.slow * self.fast

    def __str__(self) -> str:
        size = f"{self.fast}" if self.slow is None else f"{self.slow}*{self.fast}"
        return f"{self.name}:{size}" + (f":{self.type}" if self.type else "")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A request for a mesh: what parallelism you want, before any hardware is known.

    >>> spec = MeshSpec.parse("dp:2, fsdp:-1, tp:4")
    >>> print(spec.resolve(64))
    dp:2, fsdp:8, tp:4
    >>> spec.resolve(64).sizes
    (2, 8, 4)

    An axis may span both networks, `slow*fast`: 2 over the network, 8 inside.

    >>> MeshSpec.parse("fsdp:2*8, tp:4").size
    64
    """

    axes: tuple[AxisSpec, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.axes, (list, tuple)) or not all(
            isinstance(axis, AxisSpec) for axis in self.axes
        ):
            raise SpecError(
                f"{short(self.axes)} is not a tuple of AxisSpec. Use MeshSpec.parse('dp:2, tp:4')."
            )
        object.__setattr__(self, "axes", tuple(self.axes))
        if not self.axes:
            raise SpecError("the spec has no axes. Name at least one, e.g. 'dp:-1'.")
        if len(self.axes) > MOST_AXES:
            raise SpecError(f"{len(self.axes)} axes; at most {MOST_AXES}.")
        check_distinct(self.names)
        for level, parts in (
            ("fast network", [(a.name, a.fast) for a in self.axes]),
            ("slow network", [(a.name, a.slow) for a in self.axes]),
        ):
            open_axes = [name for name, size in parts if size == -1]
            if len(open_axes) > 1:
                raise SpecError(
                    f"-1 appears {len(open_axes)} times on the {level} (axes "
                    f"{listing(open_axes)}); only one axis there can take what is left."
                )
        if self.size is not None and self.size > LARGEST:
            raise SpecError(
                f"the sizes multiply to {short(self.size)} devices, more than {LARGEST}."
            )

    @staticmethod
    def parse(value: SpecLike, names: Sequence[str] | None = None) -> MeshSpec:
        """Read a spec from a string, a dict, pairs, or sizes plus names.

        >>> MeshSpec.parse({"dp": 2, "tp": 4}) == MeshSpec.parse("dp=2,tp=4")
        True
        >>> print(MeshSpec.parse((2, 4), names=("data", "model")))
        data:2, model:4
        >>> print(MeshSpec.parse("dp:2, tp:4:explicit"))
        dp:2, tp:4:explicit
        """
        from meshwright.spec.parsing import parse

        return parse(value, names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size per axis; -1 where it is still open."""
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int | None:
        """How many devices, or `None` while an axis is open."""
        return None if -1 in self.sizes else math.prod(self.sizes)

    @property
    def types(self) -> tuple[str | None, ...]:
        return tuple(axis.type for axis in self.axes)

    def resolve(self, devices: int, slices: int | None = None) -> MeshSpec:
        """Fill the `-1`: with `devices` in all, in `slices` parts of the slow network.

        >>> print(MeshSpec.parse("dp:-1*1, fsdp:-1").resolve(64, slices=4))
        dp:4*1, fsdp:16
        """
        return resolve(self, devices, slices)

    def with_types(self, types: Any) -> MeshSpec:
        """The same spec with axis types: one for all, one per axis, or a dict by name.

        >>> print(MeshSpec.parse("dp:2, tp:4").with_types("explicit"))
        dp:2:explicit, tp:4:explicit
        """
        if types is None:
            return self
        if isinstance(types, Mapping):
            self._check_known("axis_types", types)
            per_axis = [types.get(axis.name, axis.type) for axis in self.axes]
        elif isinstance(types, (list, tuple)):
            self._check_count("axis_types", types)
            per_axis = list(types)
        else:
            per_axis = [types] * len(self.axes)
        return MeshSpec(
            tuple(
                dataclasses.replace(axis, type=check_type(axis.name, value))
                for axis, value in zip(self.axes, per_axis, strict=True)
            )
        )

    def with_slow(self, dcn: Any, slices: int | None = None) -> MeshSpec:
        """The same sizes, with the part of each axis that crosses the slow network fixed.

        A -1 in `dcn` takes what is left of `slices`.

        >>> print(MeshSpec.parse("dp:2, fsdp:16").with_slow({"fsdp": 2}))
        dp:1*2, fsdp:2*8
        >>> print(MeshSpec.parse("dp:2, fsdp:16").with_slow((2, -1), slices=8))
        dp:2*1, fsdp:4*4
        """
        if dcn is None:
            return self
        if isinstance(dcn, str):
            parsed = MeshSpec.parse(dcn)
            if any(axis.slow is not None or axis.type is not None for axis in parsed.axes):
                raise SpecError(f"dcn: {short(dcn)} says more than name:size, e.g. 'dp:2'.")
            dcn = {axis.name: axis.size for axis in parsed.axes}
        if isinstance(dcn, Mapping):
            self._check_known("dcn", dcn)
            parts = [dcn.get(axis.name, 1) for axis in self.axes]
        elif isinstance(dcn, (list, tuple)):
            self._check_count("dcn", dcn)
            parts = list(dcn)
        else:
            raise SpecError(f"dcn: {short(dcn)} is not a dict, a sequence or a string like 'dp:2'.")
        sizes = [check_size(a.name, part) for a, part in zip(self.axes, parts, strict=True)]
        if slices is not None:
            sizes = _fill(sizes, check_integer("slices", slices))
        return MeshSpec(tuple(_spread(a, size) for a, size in zip(self.axes, sizes, strict=True)))

    def _check_known(self, what: str, given: Mapping[Any, Any]) -> None:
        for name in given:
            if name not in self.names:
                raise SpecError(
                    f"{what}: no axis {short(name)} in {listing(self.names)}."
                    f"{near(str(name), self.names)}"
                )

    def _check_count(self, what: str, given: Sequence[Any]) -> None:
        if len(given) != len(self.axes):
            raise SpecError(
                f"{what} has {len(given)} entries for {len(self.axes)} axes "
                f"({listing(self.names)}). Give one per axis."
            )

    def __str__(self) -> str:
        return ", ".join(str(axis) for axis in self.axes)


SpecLike: TypeAlias = MeshSpec | str | Mapping[str, int] | Sequence[Any]


def _fill(slow: list[int], slices: int) -> list[int]:
    known = math.prod(size for size in slow if size != -1)
    if slow.count(-1) == 1 and slices % known:
        raise SpecError(
            f"dcn: the parts given multiply to {known}, which does not divide {slices} slices, "
            "so -1 has nothing whole to take."
        )
    return [slices // known if size == -1 and slow.count(-1) == 1 else size for size in slow]


def _spread(axis: AxisSpec, slow: int) -> AxisSpec:
    if axis.slow is not None and axis.slow != slow:
        raise SpecError(
            f"axis {axis.name!r}: the spec says {axis.slow} over the slow network, dcn says {slow}."
        )
    if axis.slow is not None:
        return axis
    if axis.fast == -1:
        return dataclasses.replace(axis, slow=slow)
    if slow == -1:
        raise SpecError(
            f"axis {axis.name!r}: dcn -1 takes what is left of the slices: say how many there are."
        )
    if axis.fast % slow:
        divisors = [d for d in range(1, min(axis.fast, 4096) + 1) if axis.fast % d == 0]
        raise SpecError(
            f"axis {axis.name!r}: dcn {slow} does not divide its size {axis.fast}. "
            f"Use one of {listing(divisors)}."
        )
    return dataclasses.replace(axis, slow=slow, fast=axis.fast // slow)


# Filling the open sizes of a spec from a number of devices and slices.


def resolve(spec: MeshSpec, devices: int, slices: int | None = None) -> MeshSpec:
    """See `MeshSpec.resolve`."""
    devices = check_integer("devices", devices)
    if slices is not None:
        slices = check_integer("slices", slices)
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
