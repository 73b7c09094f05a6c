"""`MeshSpec`: a request for a mesh, as axes with sizes, DCN parts and axis types.

A spec knows no hardware. Sizes may stay open (-1) until `resolve` fills them from a number of
devices and slices.

An axis can span two networks. Its `slow` factor counts the parts that are joined by DCN (the
data-center network between TPU slices, NVLink domains or hosts), its `fast` factor the devices
inside each of them; `2*8` is 2 parts of 8. Without a `slow` factor the placement chooses one.
"""

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
from meshwright._show import Sheet, Table, short_repr
from meshwright._text import plural
from meshwright.axes import role
from meshwright.errors import SpecError, listing, near, short


@dataclasses.dataclass(frozen=True, repr=False)
class MeshSpec:
    """A request for a mesh: what parallelism you want, before any hardware is known.

    >>> spec = MeshSpec.parse("dp:2, fsdp:-1, tp:4")
    >>> spec
    <MeshSpec dp:2, fsdp:-1, tp:4>
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
        # A spec is a cache key of every mesh, so what it holds must be hashable.
        object.__setattr__(self, "axes", tuple(self.axes))
        if not self.axes:
            raise SpecError("the spec has no axes. Name at least one, e.g. 'dp:-1'.")
        if len(self.axes) > MOST_AXES:
            raise SpecError(f"{len(self.axes)} axes; at most {MOST_AXES}.")
        check_distinct(self.names)
        # One -1 per network: `dp:-1*1, fsdp:-1` is fine, the slices fill the first and the
        # devices inside a slice the second.
        spans_dcn = any(axis.slow is not None for axis in self.axes)
        for where, parts in (
            (" inside a slice" if spans_dcn else "", [(a.name, a.fast) for a in self.axes]),
            (" over DCN", [(a.name, a.slow) for a in self.axes]),
        ):
            open_axes = [name for name, size in parts if size == -1]
            if len(open_axes) > 1:
                raise SpecError(
                    f"-1 appears {len(open_axes)} times{where} (axes "
                    f"{listing(open_axes)}); only one axis{where} can take what is left."
                )
        if self.size is not None and self.size > LARGEST:
            raise SpecError(
                f"the sizes multiply to {short(self.size)} devices, more than {LARGEST}."
            )

    @staticmethod
    def parse(value: SpecLike, names: Sequence[str] | None = None) -> MeshSpec:
        """Read a spec from a string, a dict, pairs, or sizes plus `names`.

        Raises `SpecError` for anything that is not exactly one of these; nothing is repaired.

        >>> MeshSpec.parse({"dp": 2, "tp": 4}) == MeshSpec.parse("dp=2,tp=4")
        True
        >>> print(MeshSpec.parse((2, 4), names=("data", "model")))
        data:2, model:4
        >>> print(MeshSpec.parse("dp:2, tp:4:explicit"))
        dp:2, tp:4:explicit
        """
        # Not at the top: the parser builds `MeshSpec`s, so it imports this module.
        from meshwright.spec.parsing import parse

        return parse(value, names)

    @property
    def names(self) -> tuple[str, ...]:
        """Name per axis, in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size per axis; -1 where it is still open."""
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int | None:
        """How many devices the mesh has, or `None` while an axis is open."""
        return None if -1 in self.sizes else math.prod(self.sizes)

    @property
    def types(self) -> tuple[str | None, ...]:
        """Axis type per axis as a word; `None` where the request leaves it to JAX's default."""
        return tuple(axis.type for axis in self.axes)

    def resolve(self, devices: int, slices: int | None = None) -> MeshSpec:
        """Fill the `-1`s, given `devices` in all, in `slices` parts joined by DCN.

        Raises `SpecError` when the sizes do not multiply to exactly `devices`.

        >>> print(MeshSpec.parse("dp:-1*1, fsdp:-1").resolve(64, slices=4))
        dp:4*1, fsdp:16
        """
        devices = check_integer("devices", devices)
        if slices is not None:
            slices = check_integer("slices", slices)
            if devices % slices:
                raise SpecError(
                    f"{devices} devices do not form {slices} equal slices.", option="slices"
                )
        # The slow factors first: they depend on the slices alone, and count as known below.
        axes = _fill_slow_factors(self, slices)
        known = math.prod((axis.slow or 1) * max(axis.fast, 1) for axis in axes)
        open_axis = next((axis for axis in axes if axis.fast == -1), None)
        if open_axis is None:
            if known != devices:
                raise SpecError(_mismatch(self, known, devices))
            return MeshSpec(axes)
        if devices % known:
            raise SpecError(
                f"'{self}': the sizes given multiply to {known}, which does not divide {devices} "
                f"devices, so -1 for {open_axis.name!r} cannot be inferred. {_fix(known, devices)}"
            )
        filled = dataclasses.replace(open_axis, fast=devices // known)
        return MeshSpec(tuple(filled if axis is open_axis else axis for axis in axes))

    def with_types(self, types: Any) -> MeshSpec:
        """Return the spec with axis types: one for all, one per axis, or a dict by name.

        A type is `"auto"`, `"explicit"`, `"manual"`, a `jax.sharding.AxisType` or `None`. Axes
        that a dict does not name keep theirs.

        >>> print(MeshSpec.parse("dp:2, tp:4").with_types("explicit"))
        dp:2:explicit, tp:4:explicit
        """
        if types is None:
            return self
        # A list is one type per axis; a single type may be any value that `check_type` knows.
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
                dataclasses.replace(axis, type=check_type(axis.name, axis_type))
                for axis, axis_type in zip(self.axes, per_axis, strict=True)
            )
        )

    def with_dcn(self, dcn: Any, slices: int | None = None) -> MeshSpec:
        """Return the spec with the part of each axis that crosses DCN fixed.

        The sizes stay as they are. `dcn` is a dict (axes it does not name get 1), one number per
        axis, or a string such as `"dp:2"`. A -1 in it takes what is left of `slices`.

        >>> print(MeshSpec.parse("dp:2, fsdp:16").with_dcn({"fsdp": 2}))
        dp:1*2, fsdp:2*8
        >>> print(MeshSpec.parse("dp:2, fsdp:16").with_dcn((2, -1), slices=8))
        dp:2*1, fsdp:4*4
        """
        if dcn is None:
            return self
        if isinstance(dcn, str):
            parsed = MeshSpec.parse(dcn)
            if any(axis.slow is not None or axis.type is not None for axis in parsed.axes):
                raise SpecError(
                    f"dcn: {short(dcn)} says more than name:size, e.g. 'dp:2'.", option="dcn"
                )
            dcn = {axis.name: axis.size for axis in parsed.axes}  # a string is a short dict
        if isinstance(dcn, Mapping):
            self._check_known("dcn", dcn)
            parts = [dcn.get(axis.name, 1) for axis in self.axes]
        elif isinstance(dcn, (list, tuple)):
            self._check_count("dcn", dcn)
            parts = list(dcn)
        else:
            raise SpecError(
                f"dcn: {short(dcn)} is not a dict, a sequence or a string like 'dp:2'.",
                option="dcn",
            )
        sizes = [check_size(axis.name, part) for axis, part in zip(self.axes, parts, strict=True)]
        if slices is not None:
            sizes = _fill_dcn(sizes, check_integer("slices", slices))
        return MeshSpec(
            tuple(_split_over_dcn(axis, size) for axis, size in zip(self.axes, sizes, strict=True))
        )

    def _check_known(self, option: str, by_name: Mapping[Any, Any]) -> None:
        for name in by_name:
            if name not in self.names:
                raise SpecError(
                    f"{option}: no axis {short(name)} in {listing(self.names)}."
                    f"{near(str(name), self.names)}",
                    option=option,
                )

    def _check_count(self, option: str, per_axis: Sequence[Any]) -> None:
        if len(per_axis) != len(self.axes):
            raise SpecError(
                f"{option} has {plural(len(per_axis), 'entry')} for "
                f"{plural(len(self.axes), 'axis')} ({listing(self.names)}). Give one per axis.",
                option=option,
            )

    def __str__(self) -> str:
        return ", ".join(str(axis) for axis in self.axes)

    def __repr__(self) -> str:
        return short_repr(self, str(self))

    def _repr_html_(self) -> str:
        devices = "size open" if self.size is None else plural(self.size, "device")
        rows = [
            [
                axis.name,
                "the rest" if axis.fast == -1 else f"{axis.size:,}",
                role(axis.name).description,
                "" if axis.slow is None else f"{axis.slow} parts",
                axis.type or "",
            ]
            for axis in self.axes
        ]
        heading = ["axis", "size", "what it splits", "over DCN", "type"]
        table = Table(heading, rows, [False, True, False, False, False])
        return Sheet(f"{self} ({devices})", [table]).html()


SpecLike: TypeAlias = MeshSpec | str | Mapping[str, int] | Sequence[Any]


@dataclasses.dataclass(frozen=True, repr=False)
class AxisSpec:
    """One axis of a `MeshSpec`.

    `slow=None`: `fast` is the whole size, and its split over the networks is free. Otherwise the
    axis spans `slow` parts over DCN times `fast` devices inside each.
    """

    name: str
    fast: int
    slow: int | None = None
    type: str | None = None

    def __post_init__(self) -> None:
        # The checks also turn what numpy and JAX offer (np.int64, AxisType) into plain values,
        # so that equal requests are equal specs.
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

    def __repr__(self) -> str:
        return short_repr(self, str(self))


def _fill_dcn(sizes: list[int], slices: int) -> list[int]:
    """Replace the one -1 in `dcn`; several are left for `MeshSpec` to refuse by name."""
    if sizes.count(-1) != 1:
        return sizes
    known = math.prod(size for size in sizes if size != -1)
    if slices % known:
        raise SpecError(
            f"dcn: the parts given multiply to {known}, which does not divide {slices} slices, "
            "so -1 cannot be inferred.",
            option="dcn",
        )
    return [slices // known if size == -1 else size for size in sizes]


def _split_over_dcn(axis: AxisSpec, slow: int) -> AxisSpec:
    """Take `slow` parts out of the size of an axis that has no slow factor of its own yet."""
    if axis.slow is not None and axis.slow != slow:
        raise SpecError(
            f"axis {axis.name!r}: the spec says {axis.slow} over DCN, dcn says {slow}.",
            option="dcn",
        )
    if axis.slow is not None:
        return axis
    if axis.fast == -1:  # open inside: the slow part is known all the same
        return dataclasses.replace(axis, slow=slow)
    if slow == -1:
        raise SpecError(
            f"axis {axis.name!r}: dcn -1 takes what is left of the slices: say how many there are.",
            option="dcn",
        )
    if axis.fast % slow:
        # Bounded, because an axis may have up to 2**31 devices and the list is cut anyway.
        divisors = [d for d in range(1, min(axis.fast, 4096) + 1) if axis.fast % d == 0]
        raise SpecError(
            f"axis {axis.name!r}: dcn {slow} does not divide its size {axis.fast}. "
            f"Use one of {listing(divisors)}.",
            option="dcn",
        )
    return dataclasses.replace(axis, slow=slow, fast=axis.fast // slow)


def _fill_slow_factors(spec: MeshSpec, slices: int | None) -> tuple[AxisSpec, ...]:
    """Replace the one slow factor of -1, and check that the factors fit the slices."""
    known = math.prod(axis.slow for axis in spec.axes if axis.slow not in (None, -1))
    open_axis = next((axis for axis in spec.axes if axis.slow == -1), None)
    if open_axis is None:
        # A divisor is enough: axes without a slow factor can still take the remaining slices.
        if slices is not None and slices % known:
            fix = f"make the DCN parts multiply to a divisor of {slices}."
            raise SpecError(
                f"'{spec}' spans {known} parts over DCN, but there {_are(slices)} (slices, hosts "
                "or domains): " + ("leave dcn and DCN parts out here." if slices == 1 else fix)
            )
        return spec.axes
    if slices is None:
        raise SpecError(
            f"axis {open_axis.name!r} takes what is left over DCN: say how many parts "
            "there are, resolve(devices, slices=...).",
            option="slices",
        )
    if slices % known:
        raise SpecError(
            f"'{spec}': the DCN parts given multiply to {known}, which does not divide "
            f"{slices} slices, so -1 for {open_axis.name!r} cannot be inferred there."
        )
    filled = dataclasses.replace(open_axis, slow=slices // known)
    return tuple(filled if axis is open_axis else axis for axis in spec.axes)


def _mismatch(spec: MeshSpec, known: int, devices: int) -> str:
    if known > devices:
        # The words that the contract fixes for `DeviceMeshManager`; every mesh says it so.
        problem = f"Not enough devices: '{spec}' needs {known}, there {_are(devices)}."
    else:
        problem = f"'{spec}' uses {known} of {devices} devices."
    return f"{problem} {_fix(known, devices)}"


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _fix(known: int, devices: int) -> str:
    return (
        f"Make the sizes multiply to {devices}"
        + (", or put -1 on one axis to take what is left" if devices % known == 0 else "")
        + f" (largest common part: {math.gcd(known, devices)})."
    )
