"""Read hardware names such as `v5p:8x8x8`, `h100:8x4` or `cpu:8` into a `Topology`.

Done by tables of our own, without the vendor's compiler: `tests/compilers` compares the two.
Names that clouds use, such as `v5p-128`, are read by `cloud_names`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright._checks import check_integer
from meshwright.errors import TopologyError, listing, near, short
from meshwright.hardware.chips import CHIPS, Chip, can_twist, check_shape, shape_text, wraparound
from meshwright.hardware.cloud_names import ALIASES, read_cloud_name
from meshwright.hardware.topology import PhysicalAxis, Topology

_NAME = re.compile(r"([a-z0-9]+):([0-9]+(?:x[0-9]+)*)(_twisted|_untwisted)?", re.ASCII)
# Enough for any machine; every device costs a few bytes here.
LARGEST = 2**22


def from_name(
    name: str,
    slices: int = 1,
    chips_per_host: Sequence[int] | None = None,
    twisted: bool | None = None,
    speeds: Mapping[str, float] | None = None,
) -> Topology:
    """Build the topology of a name; the options are those of `topology`."""
    meant, machine_speeds = read_cloud_name(name)
    chip, shape, says_twisted = parse_name(meant)
    chip = with_speeds(with_speeds(chip, machine_speeds), speeds)
    slices = check_count("slices", slices)
    if says_twisted is not None and twisted not in (None, says_twisted):
        raise TopologyError(
            f"{short(name)} and twisted={twisted} contradict each other.", option="twisted"
        )
    twisted = bool(says_twisted or twisted)
    if chip.family == "tpu":
        return _tpu_topology(chip, shape, slices, chips_per_host, twisted)
    if twisted or chips_per_host is not None:
        raise TopologyError(
            f"{short(name)}: twisted and chips_per_host are for TPUs.",
            option="twisted" if twisted else "chips_per_host",
        )
    return _switched_topology(chip, shape, slices)


def parse_name(name: str) -> tuple[Chip, tuple[int, ...], bool | None]:
    """Split a name into chip, shape and whether it says `_twisted`; suggest near chip names."""
    cleaned = name.strip().lower()
    match = _NAME.fullmatch(cleaned)
    word = ALIASES.get(cleaned.split(":")[0], cleaned.split(":")[0])
    if word not in CHIPS:
        raise TopologyError(
            f"unknown hardware {short(name)}.{near(word, CHIPS)} Known: {', '.join(CHIPS)}; "
            "write e.g. 'v5p:8x8x8', 'h100:8x4' or 'cpu:8', or a cloud's name, 'v5p-128'."
        )
    chip = CHIPS[word]
    if not match:
        example = {3: "4x4x4", 2: "4x4"}.get(chip.torus, "8")
        raise TopologyError(
            f"{short(name)} is not a chip and a shape. Write e.g. '{chip.name}:{example}'."
        )
    if len(match[2]) > 40:  # before `int`, which refuses thousands of digits in words of its own
        raise TopologyError(f"{short(name)}: the shape is far too long.")
    shape = tuple(int(side) for side in match[2].split("x"))
    if 0 in shape or math.prod(shape) > LARGEST:
        raise TopologyError(f"{short(name)}: sides must be positive and hold at most {LARGEST}.")
    return chip, shape, None if match[3] is None else match[3] == "_twisted"


def with_speeds(chip: Chip, speeds: Mapping[str, float] | None) -> Chip:
    """Return the chip with the caller's own speeds in place of the table's."""
    if speeds is not None and not isinstance(speeds, Mapping):
        raise TopologyError(
            f"speeds: {short(speeds)} is not a dict such as {{'link': 90}}.", option="speeds"
        )
    known = ("link", "network", "bus", "core", "tflops", "memory_gb", "memory_tbps", "ram_gb")
    for key, value in (speeds or {}).items():
        if key not in known:
            raise TopologyError(
                f"speeds: no {short(key)}.{near(str(key), known)} Known: {known}.", option="speeds"
            )
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e30:
            raise TopologyError(
                f"speeds: {key} = {short(value)} is not a number above 0.", option="speeds"
            )
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
    """Return the directions x, y, z of a slice. If it is twisted, all but the longest are."""
    longest = max(shape)
    return tuple(
        PhysicalAxis(
            name, side, "torus", chip.link, wraps=wrap, twisted=twisted and side != longest
        )
        for name, side, wrap in zip("xyz", shape, wraps, strict=False)
    )


def network_axis(chip: Chip, slices: int, name: str) -> PhysicalAxis:
    # The table says what leaves a chip; the devices on it share that.
    return PhysicalAxis(name, slices, "network", chip.network / chip.cores)


def _tpu_topology(
    chip: Chip,
    shape: tuple[int, ...],
    slices: int,
    chips_per_host: Sequence[int] | None,
    twisted: bool,
) -> Topology:
    if len(shape) != chip.torus:
        raise TopologyError(
            f"{chip.name}:{shape_text(shape)} has {len(shape)} sides; {chip.name} shapes have "
            f"{chip.torus}, e.g. {chip.name}:{'x'.join('4' * chip.torus)}."
        )
    check_shape(chip, shape)
    if twisted and not can_twist(chip, shape):
        raise TopologyError(
            f"{chip.name}:{shape_text(shape)} cannot be twisted: only n x n x 2n and n x 2n x 2n "
            "of whole 4x4x4 cubes can.",
            option="twisted",
        )
    host_shape = _host_shape(chip, shape, chips_per_host)
    axes = torus_axes(chip, shape, wraparound(chip, shape), twisted)
    if slices > 1:
        axes = (network_axis(chip, slices, "slice"), *axes)
    if chip.cores > 1:
        axes = (*axes, PhysicalAxis("core", chip.cores, "core", chip.core))
    name = f"{chip.name}:{shape_text(shape)}" + ("_twisted" if twisted else "")
    check_total(name, math.prod(axis.size for axis in axes))
    host = _host_numbers(shape, host_shape)
    # Hosts are numbered on from slice to slice, and the cores of a chip share one.
    first_hosts = (int(host.max()) + 1) * np.arange(slices, dtype=np.int32)
    host = np.add.outer(first_hosts, host)
    host = np.repeat(host[..., None], chip.cores, axis=-1).reshape(
        tuple(axis.size for axis in axes)
    )
    return _without_devices(name, chip, axes, host, slices)


def _without_devices(
    name: str, chip: Chip, axes: tuple[PhysicalAxis, ...], host: np.ndarray, slices: int = 1
) -> Topology:
    devices = math.prod(axis.size for axis in axes)
    return Topology(
        name=name + (f" x {slices} slices" if slices > 1 and chip.family == "tpu" else ""),
        chip=chip,
        axes=axes,
        host=host,
        index=np.arange(devices).reshape(host.shape),
    )


def _host_shape(
    chip: Chip, shape: tuple[int, ...], chips_per_host: Sequence[int] | None
) -> tuple[int, ...]:
    if chips_per_host is None:
        # cloud docs: slices of up to 8 chips of the planar kinds are one machine.
        if chip.torus == 2 and math.prod(shape) <= 8:
            return shape
        return tuple(min(side, per_host) for side, per_host in zip(shape, chip.host, strict=True))
    if isinstance(chips_per_host, str) or not isinstance(chips_per_host, (list, tuple)):
        raise TopologyError(
            f"chips_per_host: {short(chips_per_host)} is not a list such as (2, 2, 1).",
            option="chips_per_host",
        )
    # The TPU compiler's own option names three sides, also for planar chips: trailing 1s are free.
    sides = tuple(check_count("chips_per_host", side) for side in chips_per_host)
    sides += (1,) * (len(shape) - len(sides))
    if len(sides) != len(shape) and set(sides[len(shape) :]) == {1}:
        sides = sides[: len(shape)]
    if len(sides) != len(shape) or any(s % h for s, h in zip(shape, sides, strict=True)):
        raise TopologyError(
            f"chips_per_host {shape_text(sides)} does not divide the slice {shape_text(shape)}. "
            f"Default: {shape_text(chip.host)}.",
            option="chips_per_host",
        )
    return sides


def _host_numbers(shape: tuple[int, ...], host_shape: tuple[int, ...]) -> np.ndarray:
    """Number the host of every chip: hosts are boxes, x fastest, as in the vendor's runtime."""
    counts = [side // per_host for side, per_host in zip(shape, host_shape, strict=True)]
    steps = np.cumprod([1, *counts[:-1]])
    host = np.zeros(shape, np.int32)
    for dim, (side, per_host) in enumerate(zip(shape, host_shape, strict=True)):
        along = (np.arange(side, dtype=np.int32) // per_host) * steps[dim]
        host += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return host


def _switched_topology(chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    """GPUs and CPUs: `devices per domain x domains`, a switch inside each domain."""
    if len(shape) > 2:
        raise TopologyError(
            f"{chip.name}:{shape_text(shape)} has {len(shape)} sides; write devices per "
            f"{'NVLink domain' if chip.family == 'gpu' else 'host'} x how many, "
            f"e.g. {chip.name}:{chip.domain or 8}x4."
        )
    inside, domains = (*shape, 1)[:2]
    if slices > 1 and len(shape) == 2:
        raise TopologyError(
            f"{chip.name}:{shape_text(shape)} already says {domains}; leave slices out.",
            option="slices",
        )
    domains = max(domains, slices)
    if chip.domain and inside > chip.domain:
        # Most likely all GPUs were meant: show how they divide over full domains.
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
    # A domain within one host is that host; a larger one (GB200) has several.
    word = "domain" if inside > per_host else "host"
    local = PhysicalAxis("gpu" if chip.family == "gpu" else "cpu", inside, "switch", chip.link)
    axes: tuple[PhysicalAxis, ...] = (local,)
    if domains > 1:
        axes = (network_axis(chip, domains, word), local)
    check_total(chip.name, inside * domains)
    host = np.arange(inside * domains, dtype=np.int32) // min(per_host, inside)
    name = f"{chip.name}:{inside}" + (f"x{domains}" if domains > 1 else "")
    return _without_devices(name, chip, axes, host.reshape(tuple(axis.size for axis in axes)))
