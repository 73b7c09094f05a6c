"""From a name to a `Topology`, by tables of our own."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright._checks import check_integer
from meshwright.errors import TopologyError, listing, near, short
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.topology import PhysicalAxis, Topology

_NAME = re.compile(r"([a-z0-9]+):([0-9]+(?:x[0-9]+)*)(_twisted|_untwisted)?", re.ASCII)
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e", "v7x": "tpu7x", "v7": "tpu7x"}
_ALIASES |= {"tpu7": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
# Enough for any machine; every device costs a few bytes here.
LARGEST = 2**22


def from_name(
    name: str,
    slices: int = 1,
    chips_per_host: Sequence[int] | None = None,
    twisted: bool | None = None,
    speeds: Mapping[str, float] | None = None,
) -> Topology:
    """See `topology`."""
    chip, shape, says_twisted = parse_name(name)
    chip = with_speeds(chip, speeds)
    slices = check_count("slices", slices)
    if says_twisted is not None and twisted not in (None, says_twisted):
        raise TopologyError(f"{short(name)} and twisted={twisted} contradict each other.")
    twisted = bool(says_twisted or twisted)
    if chip.family == "tpu":
        return _tpu(chip, shape, slices, chips_per_host, twisted)
    if twisted or chips_per_host is not None:
        raise TopologyError(f"{short(name)}: twisted and chips_per_host are for TPUs.")
    return _switched(chip, shape, slices)


def parse_name(name: str) -> tuple[Chip, tuple[int, ...], bool | None]:
    """The parts of a name; suggests the near one when it is misspelt."""
    cleaned = name.strip().lower()
    match = _NAME.fullmatch(cleaned)
    word = _ALIASES.get(cleaned.split(":")[0], cleaned.split(":")[0])
    if word not in CHIPS:
        raise TopologyError(
            f"unknown hardware {short(name)}.{near(word, CHIPS)} Known: {', '.join(CHIPS)}; "
            "write e.g. 'v5p:8x8x8', 'h100:8x4' or 'cpu:8'."
        )
    chip = CHIPS[word]
    if not match:
        example = {3: "4x4x4", 2: "4x4"}.get(chip.torus, "8")
        raise TopologyError(
            f"{short(name)} is not a chip and a shape. Write e.g. '{chip.name}:{example}'."
        )
    if len(match[2]) > 40:
        raise TopologyError(f"{short(name)}: the shape is far too long.")
    shape = tuple(int(side) for side in match[2].split("x"))
    if 0 in shape or math.prod(shape) > LARGEST:
        raise TopologyError(f"{short(name)}: sides must be positive and hold at most {LARGEST}.")
    return chip, shape, None if match[3] is None else match[3] == "_twisted"


def with_speeds(chip: Chip, speeds: Mapping[str, float] | None) -> Chip:
    """The chip with speeds of the caller's own."""
    if speeds is not None and not isinstance(speeds, Mapping):
        raise TopologyError(f"speeds: {short(speeds)} is not a dict such as {{'link': 90}}.")
    known = ("link", "network", "core", "tflops", "memory_gb", "memory_tbps")
    for key, value in (speeds or {}).items():
        if key not in known:
            raise TopologyError(f"speeds: no {short(key)}.{near(str(key), known)} Known: {known}.")
        bad = isinstance(value, bool) or not isinstance(value, numbers.Real)
        if bad or not 0 < value < 1e30:
            raise TopologyError(f"speeds: {key} = {short(value)} is not a number above 0.")
    floats = {key: float(value) for key, value in (speeds or {}).items()}
    return dataclasses.replace(chip, **floats)  # type: ignore[arg-type]


def check_count(what: str, value: object) -> int:
    """Return a number of chips, hosts or slices that a machine can have."""
    return check_integer(what, value, most=LARGEST, error=TopologyError)


def check_total(name: str, devices: int) -> None:
    if devices > LARGEST:
        raise TopologyError(f"{name}: {devices} devices; at most {LARGEST} are supported.")


def torus_axes(
    chip: Chip, shape: Sequence[int], wraps: Sequence[bool], twisted: bool = False
) -> tuple[PhysicalAxis, ...]:
    """Directions x, y, z of a slice. Twisted: every side but the longest ones is."""
    longest = max(shape)
    return tuple(
        PhysicalAxis(
            name, side, "torus", chip.link, wraps=wrap, twisted=twisted and side != longest
        )
        for name, side, wrap in zip("xyz", shape, wraps, strict=False)
    )


def network_axis(chip: Chip, slices: int, name: str) -> PhysicalAxis:
    return PhysicalAxis(name, slices, "network", chip.network / chip.cores)


def _tpu(
    chip: Chip,
    shape: tuple[int, ...],
    slices: int,
    chips_per_host: Sequence[int] | None,
    twisted: bool,
) -> Topology:
    if len(shape) != chip.torus:
        raise TopologyError(
            f"{chip.name}:{text(shape)} has {len(shape)} sides; {chip.name} shapes have "
            f"{chip.torus}, e.g. {chip.name}:{'x'.join('4' * chip.torus)}."
        )
    check_shape(chip, shape)
    if twisted and not may_twist(chip, shape):
        raise TopologyError(
            f"{chip.name}:{text(shape)} cannot be twisted: only n x n x 2n and n x 2n x 2n of "
            "whole 4x4x4 cubes can."
        )
    host_shape = _host_shape(chip, shape, chips_per_host)
    axes = torus_axes(chip, shape, wraparound(chip, shape), twisted)
    if slices > 1:
        axes = (network_axis(chip, slices, "slice"), *axes)
    if chip.cores > 1:
        axes = (*axes, PhysicalAxis("core", chip.cores, "core", chip.core))
    name = f"{chip.name}:{text(shape)}" + ("_twisted" if twisted else "")
    check_total(name, math.prod(axis.size for axis in axes))
    host = _hosts(shape, host_shape)
    per_slice = int(host.max()) + 1
    host = (
        host[None]
        + per_slice
        * np.arange(slices, dtype=np.int32).reshape(-1, 1, 1, 1)[(...,) + (0,) * (3 - len(shape))]
    )
    host = np.repeat(host[..., None], chip.cores, axis=-1).reshape(tuple(a.size for a in axes))
    return build(name, chip, axes, host, slices)


def build(
    name: str, chip: Chip, axes: tuple[PhysicalAxis, ...], host: np.ndarray, slices: int = 1
) -> Topology:
    """A topology without devices."""
    devices = math.prod(axis.size for axis in axes)
    return Topology(
        name=name + (f" x {slices} slices" if slices > 1 and chip.family == "tpu" else ""),
        chip=chip,
        axes=axes,
        host=host,
        index=np.arange(devices).reshape(host.shape),
    )


def _host_shape(chip: Chip, shape: tuple[int, ...], asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        # cloud docs: slices of up to 8 chips of the planar kinds are one machine.
        if chip.torus == 2 and math.prod(shape) <= 8:
            return shape
        return tuple(min(side, per_host) for side, per_host in zip(shape, chip.host, strict=True))
    if isinstance(asked, str) or not isinstance(asked, (list, tuple)):
        raise TopologyError(f"chips_per_host: {short(asked)} is not a list such as (2, 2, 1).")
    sides = tuple(check_count("chips_per_host", side) for side in asked)
    sides += (1,) * (len(shape) - len(sides))
    if len(sides) != len(shape) and set(sides[len(shape) :]) == {1}:
        sides = sides[: len(shape)]
    if len(sides) != len(shape) or any(s % h for s, h in zip(shape, sides, strict=True)):
        raise TopologyError(
            f"chips_per_host {text(sides)} does not divide the slice {text(shape)}. "
            f"Default: {text(chip.host)}."
        )
    return sides


def _hosts(shape: tuple[int, ...], host_shape: tuple[int, ...]) -> np.ndarray:
    """Hosts are boxes, numbered with x running fastest, as the vendor's runtime does."""
    counts = [side // per_host for side, per_host in zip(shape, host_shape, strict=True)]
    steps = np.cumprod([1, *counts[:-1]])
    host = np.zeros(shape, np.int32)
    for dim, (side, per_host) in enumerate(zip(shape, host_shape, strict=True)):
        along = (np.arange(side, dtype=np.int32) // per_host) * steps[dim]
        host += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return host


def _switched(chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    """GPUs and CPUs: `per domain x domains`."""
    if len(shape) > 2:
        raise TopologyError(
            f"{chip.name}:{text(shape)} has {len(shape)} sides; write devices per "
            f"{'NVLink domain' if chip.family == 'gpu' else 'host'} x how many, "
            f"e.g. {chip.name}:{chip.domain or 8}x4."
        )
    inside, domains = (*shape, 1)[:2]
    if slices > 1 and len(shape) == 2:
        raise TopologyError(f"{chip.name}:{text(shape)} already says {domains}; leave slices out.")
    domains = max(domains, slices)
    if chip.domain and inside > chip.domain:
        per_domain = next(d for d in range(chip.domain, 0, -1) if inside % d == 0)
        several = f"{chip.name}:{per_domain}x{inside // per_domain * domains}"
        raise TopologyError(
            f"{chip.name}: {inside} GPUs in one NVLink domain; it holds {chip.domain}. "
            + (f"Write {several} for several." if per_domain > 1 else "Use a multiple of it.")
        )
    per_host = chip.host[0] if chip.host else inside
    if inside > per_host and inside % per_host:
        raise TopologyError(
            f"{chip.name}: {inside} GPUs do not fill hosts of {per_host}. Use one of "
            f"{listing(range(per_host, chip.domain + 1, per_host), 20)}."
        )
    word = "domain" if inside > per_host else "host"
    local = PhysicalAxis("gpu" if chip.family == "gpu" else "cpu", inside, "switch", chip.link)
    axes: tuple[PhysicalAxis, ...] = (local,)
    if domains > 1:
        axes = (network_axis(chip, domains, word), local)
    check_total(chip.name, inside * domains)
    host = np.arange(inside * domains, dtype=np.int32) // min(per_host, inside)
    name = f"{chip.name}:{inside}" + (f"x{domains}" if domains > 1 else "")
    return build(name, chip, axes, host.reshape(tuple(a.size for a in axes)))


# Which shapes a TPU comes in, which of their dimensions wrap around, which may be twisted.


# cloud docs: every slice shape of the two-dimensional chips.
PLANAR = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# cloud docs: the shapes below one cube of 4x4x4; v5p and TPU7x lack a few, all are buildable.
BELOW_CUBE = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def check_shape(chip: Chip, shape: tuple[int, ...]) -> None:
    """Refuse a shape that this chip does not come in, and name the near ones."""
    if chip.torus == 2:
        known = {
            *PLANAR,
            *(s[::-1] for s in PLANAR),
        }
        if shape not in known:
            raise TopologyError(
                f"{chip.name} does not come in {text(shape)}. Its shapes: "
                f"{listing((text(s) for s in PLANAR), 10)}."
            )
        return
    chips = math.prod(shape)
    if len(shape) == 3 and (shape in BELOW_CUBE or is_cubes(shape)) and chips <= chip.pod:
        return
    if chips > chip.pod:
        why = f"it has {chips} chips and a pod has {chip.pod}"
    else:
        why = f"beyond {text(BELOW_CUBE[-1])} every side is a multiple of 4"
    rounded = tuple(max(4, 4 * round(side / 4)) for side in (*shape, 1, 1)[:3])
    near = f" Near: {text(rounded)}." if math.prod(rounded) <= chip.pod else ""
    raise TopologyError(
        f"{chip.name} does not come in {text(shape)}: {why}. Smaller shapes: "
        f"{listing(text(s) for s in BELOW_CUBE)}.{near}"
    )


def wraparound(chip: Chip, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which dimensions close to a ring.

    v5e and v6e: only a whole side of 16. v4, v5p, TPU7x: all, once the slice is made of
    whole 4x4x4 cubes.
    """
    if chip.torus == 2:
        return tuple(side == 16 for side in shape)
    return (is_cubes(shape),) * len(shape)


def may_twist(chip: Chip, shape: Sequence[int]) -> bool:
    """n x n x 2n and n x 2n x 2n, made of whole cubes, can be wired as twisted tori."""
    if chip.torus != 3 or not is_cubes(shape):
        return False
    a, b, c = sorted(shape)
    return c == 2 * a and b in (a, c)


def is_cubes(shape: Sequence[int]) -> bool:
    return all(side % 4 == 0 for side in shape)


def text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
