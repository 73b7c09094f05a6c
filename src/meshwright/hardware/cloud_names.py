"""Names under which clouds rent hardware (`v5p-128`, `8xh100`, `p5.48xlarge`), read into ours.

A TPU's accelerator type says how many chips or cores a slice has, not its shape; a machine type
says which GPUs are in one machine, and how fast its network is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.errors import TopologyError, listing, near, short
from meshwright.hardware.chips import CHIPS, Chip, shape_text, shapes_of_count

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
