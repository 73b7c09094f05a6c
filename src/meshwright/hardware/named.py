"""Read hardware names such as `v5p:8x8x8`, `h100:8x4` or `cpu:8` into a `Topology`.

Done by tables of our own, without the vendor's compiler: `tests/compilers` compares the two. Names
under which clouds rent hardware (`v5p-128`, `8xh100`, `p5.48xlarge`) are read into ours first.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright._checks import check_integer
from meshwright.errors import TopologyError, listing, near, short
from meshwright.hardware.calibration_file import Calibration, read_speeds
from meshwright.hardware.chips import (
    CHIPS,
    FIGURES,
    Chip,
    can_twist,
    check_shape,
    shape_text,
    shapes_of_count,
    wraparound,
)
from meshwright.hardware.topology import PhysicalAxis, Topology

_NAME = re.compile(r"([a-z0-9]+):([0-9]+(?:x[0-9]+)*)(_twisted|_untwisted)?", re.ASCII)
# Enough for any machine; every device costs a few bytes here.
LARGEST = 2**22


def from_name(
    name: str,
    slices: int = 1,
    chips_per_host: Sequence[int] | None = None,
    twisted: bool | None = None,
    speeds: SpeedsLike = None,
) -> Topology:
    """Build the topology of a name; the options are those of `topology`."""
    meant, machine_speeds = read_cloud_name(name)
    chip, shape, says_twisted = parse_name(meant)
    chip = dataclasses.replace(with_speeds(chip, machine_speeds), given=())  # they are ours
    chip = with_speeds(chip, speeds)
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


SpeedsLike = Mapping[str, float] | str | os.PathLike[str] | Calibration | None


def with_speeds(chip: Chip, speeds: SpeedsLike) -> Chip:
    """Return the chip with the caller's own speeds, or a calibration, in place of the table's."""
    if isinstance(speeds, (str, os.PathLike, Calibration)):
        return dataclasses.replace(chip, measured=read_speeds(speeds, chip.name))
    if speeds is not None and not isinstance(speeds, Mapping):
        raise TopologyError(
            f"speeds: {short(speeds)} is not a dict such as {{'link': 90}}, nor a file of "
            "`meshwright calibrate`.",
            option="speeds",
        )
    known = tuple(FIGURES)
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
    given = tuple(dict.fromkeys((*chip.given, *floats)))
    return dataclasses.replace(chip, given=given, **floats)  # type: ignore[arg-type]


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


# Names of clouds. A TPU's accelerator type says how many chips or cores a slice has, not its shape;
# a machine type says which GPUs are in one machine, and how fast its network is.

# What the vendors' own tools and pages call the same chips.
ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6lite": "v6e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "v7": "tpu7x",
    "tpu7": "tpu7x",
    "ironwood": "tpu7x",
}
# Accelerator types count TensorCores where a chip has two (cloud docs: v5p-32 has 16 chips; for
# tpu7x as Google's xpk counts them).
_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}

_COUNTED = re.compile(r"([a-z][a-z0-9]*)-([0-9]{1,9})", re.ASCII)
_TIMES = re.compile(r"([0-9]{1,9})x([a-z][a-z0-9_.-]*)|([a-z][a-z0-9]*?)x([0-9]{1,9})", re.ASCII)

# Machine types: the GPUs of one machine, Gb/s of the adapters that serve them, all together, and GB
# of memory of the machine, 0 where no source was at hand; as the clouds publish them (nominal;
# `speeds` replaces them). Memory: lists of machine types of Google Cloud and Azure, and Amazon's
# page on EC2 capacity blocks.
_MACHINES: Mapping[str, tuple[str, int, float, float]] = {
    # Google Cloud
    "a2-ultragpu-1g": ("a100", 1, 24, 170),
    "a2-ultragpu-2g": ("a100", 2, 32, 340),
    "a2-ultragpu-4g": ("a100", 4, 50, 680),
    "a2-ultragpu-8g": ("a100", 8, 100, 1360),
    "a3-highgpu-1g": ("h100", 1, 25, 234),
    "a3-highgpu-2g": ("h100", 2, 50, 468),
    "a3-highgpu-4g": ("h100", 4, 100, 936),
    "a3-highgpu-8g": ("h100", 8, 800, 1872),
    "a3-megagpu-8g": ("h100", 8, 1600, 1872),
    "a3-ultragpu-8g": ("h200", 8, 3200, 2952),
    "a4-highgpu-8g": ("b200", 8, 3200, 3968),
    "a4x-highgpu-4g": ("gb200", 4, 1600, 884),
    # Amazon EC2
    "p4de.24xlarge": ("a100", 8, 400, 0),
    "p5.4xlarge": ("h100", 1, 100, 0),
    "p5.48xlarge": ("h100", 8, 3200, 2048),
    "p5e.48xlarge": ("h200", 8, 3200, 2048),
    "p5en.48xlarge": ("h200", 8, 3200, 0),
    "p6-b200.48xlarge": ("b200", 8, 3200, 0),
    "p6e-gb200.36xlarge": ("gb200", 4, 1600, 0),
    # Azure, with or without "Standard_"
    "nd96amsr_a100_v4": ("a100", 8, 1600, 1800),
    "nd96isr_h100_v5": ("h100", 8, 3200, 1900),
    "nd96isr_h200_v5": ("h200", 8, 3200, 1850),
}
# Machines with A100s of 40 GB; the table of chips has those of 80.
_SMALL_A100 = {
    "a2-highgpu-1g": 1,
    "a2-highgpu-2g": 2,
    "a2-highgpu-4g": 4,
    "a2-highgpu-8g": 8,
    "p4d.24xlarge": 8,
    "nd96asr_v4": 8,
}


def machine_names(chip: Chip) -> list[str]:
    """List the clouds' machine types that have this GPU."""
    return [name for name, (gpu, *_) in _MACHINES.items() if gpu == chip.name]


def slice_names(chip: Chip) -> list[str]:
    """List the slices of a TPU with a power of two of chips, as the cloud docs shape them.

    >>> slice_names(CHIPS["v5e"])[-2:]
    ['v5e:8x16', 'v5e:16x16']
    """
    counts = [1 << power for power in range(chip.pod.bit_length())]
    shapes = [shapes_of_count(chip, count) for count in counts]
    return [f"{chip.name}:{shape_text(only[0])}" for only in shapes if len(only) == 1]


def read_cloud_name(name: str) -> tuple[str, dict[str, float]]:
    """Return a name of ours for a name that a cloud uses, and speeds that come with it.

    Any other name is returned as it is. Raises `TopologyError` where several shapes may be meant,
    and lists them.

    >>> read_cloud_name("v5litepod-16"), read_cloud_name("v5p-128"), read_cloud_name("8xH100")
    (('v5e:4x4', {}), ('v5p:4x4x4', {}), ('h100:8', {}))
    >>> read_cloud_name("a3-megagpu-8g"), read_cloud_name("16xH100")
    (('h100:8', {'network': 25.0, 'ram_gb': 234.0}), ('h100:8x2', {}))
    """
    word = name.strip().lower().removeprefix("standard_")
    times = _TIMES.fullmatch(word)
    many, kind = (int(times[1] or times[4]), times[2] or times[3]) if times else (1, word)
    machine = kind.removeprefix("standard_")
    if machine in _MACHINES and many:
        gpu, count, gigabits, ram = _MACHINES[machine]
        several = f"x{many}" if many > 1 else ""
        own = {"network": gigabits / 8 / count, "ram_gb": ram / count}
        return f"{gpu}:{count}{several}", {name: value for name, value in own.items() if value}
    if word in _SMALL_A100:
        raise TopologyError(
            f"{short(name)} has A100s of 40 GB, and 'a100' means 80. Write topology("
            f"'a100:{_SMALL_A100[word]}', speeds={{'memory_gb': 40, 'memory_tbps': 1.555}})."
        )
    if ":" not in word and any(mark in word for mark in ("gpu-", "xlarge", "nd96", "nd128")):
        raise TopologyError(
            f"{short(name)} is not a machine type known here.{near(word, _MACHINES)} Write its "
            "GPUs, e.g. 'h100:8' for a machine of 8, 'h100:8x4' for 4 of them."
        )
    if times and ALIASES.get(kind, kind) in CHIPS:
        chip = CHIPS[ALIASES.get(kind, kind)]
        return (_slice_name(name, chip, many) if chip.torus else _domains_name(chip, many)), {}
    counted = _COUNTED.fullmatch(word)
    chip_word = ALIASES.get(counted[1], counted[1]) if counted else ""
    if counted and chip_word in CHIPS:
        chip, count = CHIPS[chip_word], int(counted[2])
        if not chip.torus:
            return _domains_name(chip, count), {}
        cores = _CORES.get(chip.name, 1)
        if count % cores:
            raise TopologyError(
                f"{short(name)}: {chip.name}-N counts TensorCores, {cores} a chip; {count} is odd. "
                f"Write the shape in chips, e.g. '{chip.name}:{shape_text((4,) * chip.torus)}'."
            )
        return _slice_name(name, chip, count // cores), {}
    return name, {}


def _domains_name(chip: Chip, count: int) -> str:
    """Return the name of that many GPUs: of full domains, where there are more than one holds."""
    if chip.domain and count > chip.domain and count % chip.domain == 0:
        return f"{chip.name}:{chip.domain}x{count // chip.domain}"
    return f"{chip.name}:{count}"  # a count that fills no domain is refused by `topology`


def _slice_name(name: str, chip: Chip, chips: int) -> str:
    shapes = shapes_of_count(chip, chips)
    if len(shapes) == 1:
        return f"{chip.name}:{shape_text(shapes[0])}"
    if shapes:
        raise TopologyError(
            f"{short(name)} is {chips} chips, which come in several shapes: "
            f"{listing(shape_text(shape) for shape in shapes)}. Write the one you mean, e.g. "
            f"'{chip.name}:{shape_text(shapes[-1])}'."
        )
    raise TopologyError(
        f"{short(name)} is {chips} chips; no slice of {chip.name} has so many. Write a shape, e.g. "
        f"'{chip.name}:{shape_text((4,) * chip.torus)}'."
    )
