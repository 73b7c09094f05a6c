"""Table of the known chips: speeds, memory, host and slice shapes; what XLA is told of GPUs.

Every speed is in the chip's own file, `speeds/v5p.json`, with its source. Numbers are nominal and
one-way unless said.

Sources: "cloud docs" are the vendor's public pages for each TPU version (per-chip tables);
"datasheet" is the vendor's product sheet of the GPU. A caller who measured better numbers
passes them: `topology("v5p:4x4x4", speeds={"link": 90})`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from meshwright._show import short_repr
from meshwright.errors import TopologyError, listing
from meshwright.hardware.calibration_file import Calibration, shipped_speeds
from meshwright.hardware.measured_figures import Figure

Family = Literal["tpu", "gpu", "cpu"]


@dataclasses.dataclass(frozen=True, repr=False)
class Chip:
    """One kind of accelerator. GB/s are 1e9 bytes a second, one way.

    - `kinds`: the values of JAX's `device_kind` that mean this chip.
    - `tflops`: bf16 peak; `memory_gb`, `memory_tbps`: size and bandwidth of its memory.
    - `link`: GB/s per torus link of a TPU; per device into its NVLink switch on a GPU.
    - `network`: GB/s per chip out of its slice, NVLink domain or host.
    - `bus`: GB/s between a chip and the memory of its host, each way; 0 where it is not known.
    - `ram_gb`: GB of its host's memory for each chip; 0 where it is not known.
    - `torus`: how many dimensions the interconnect has (0: a switch).
    - `cores`: how many JAX devices share a chip; `core`: GB/s between them.
    - `host`: the box of chips that one host holds. `domain`: the most GPUs of one NVLink domain.
      `pod`: the most chips of one slice.
    - `gathers_planes`: whether its compiler gathers over several whole wrapped directions at once
      (docs/cost_model.md has the evidence).
    - `measured`: what `calibrate` has measured, which goes before all of these.
    - `given`: the names of those above that the caller gave in place of the table's.
    - `like`: the chip whose file it takes where it has none of its own.
    """

    name: str
    family: Family
    kinds: tuple[str, ...]
    tflops: float
    memory_gb: float
    memory_tbps: float
    link: float
    network: float
    bus: float = 0.0
    ram_gb: float = 0.0
    torus: int = 0
    cores: int = 1
    core: float = 0.0
    host: tuple[int, ...] = ()
    domain: int = 0
    pod: int = 0
    gathers_planes: bool = False
    measured: Calibration | None = None
    given: tuple[str, ...] = ()
    like: str = ""

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}: {self.tflops:g} TFLOP/s, {self.memory_gb:g} GB")

    @functools.cached_property
    def speeds(self) -> Calibration:
        """Every figure that results go by: what was given or measured, else that of the table."""
        table = shipped_speeds(self.like or self.name)
        own = tuple(
            Figure(
                name, getattr(self, field) * factor, unit, 0.0, source="given, or of this machine"
            )
            for field, (name, unit, factor) in FIGURES.items()
            if getattr(self, field) != (table.value(name) or 0.0) / factor
        )
        measured = table if self.measured is None else self.measured.over(table)
        return dataclasses.replace(measured, figures=own).over(measured) if own else measured

    def whose_speeds(self, devices: int) -> str:
        """Say whose speeds a result for so many devices of this chip goes by."""
        words = (self.measured or shipped_speeds(self.like or self.name)).note(devices)
        return words + (f"; as given: {', '.join(self.given)}" if self.given else "")


# The fields of a chip that are figures of its file: their name, unit and factor there.
FIGURES = {
    "tflops": ("nominal bf16", "FLOP/s", 1e12),
    "memory_gb": ("capacity memory", "B", 1e9),
    "memory_tbps": ("nominal memory", "B/s", 1e12),
    "link": ("nominal link", "B/s", 1e9),
    "network": ("nominal network", "B/s", 1e9),
    "bus": ("nominal bus", "B/s", 1e9),
    "ram_gb": ("capacity host memory", "B", 1e9),
    "core": ("nominal core", "B/s", 1e9),
}


def chip_of_file(name: str, family: Family, *kinds: str, **shape: Any) -> Chip:
    """Return a chip of this shape with the nominal speeds of its file."""
    table = shipped_speeds(name)
    nominal: dict[str, Any] = {
        field: (table.value(figure) or 0.0) / factor
        for field, (figure, _, factor) in FIGURES.items()
    }
    return Chip(name, family, kinds, **nominal, **shape)


_CUBES = {"torus": 3, "host": (2, 2, 1), "gathers_planes": True}
_PLANES = {"torus": 2, "host": (2, 2), "pod": 256}  # cloud docs, TPU v5e and v6e: pod size
_HGX = {"host": (8,), "domain": 8}

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        chip_of_file("v4", "tpu", "TPU v4", **_CUBES, pod=4096),  # cloud docs, TPU v4: pod size
        chip_of_file("v5e", "tpu", "TPU v5 lite", "TPU v5e", "TPU v5litepod", **_PLANES),
        chip_of_file("v5p", "tpu", "TPU v5", "TPU v5p", **_CUBES, pod=8960),  # docs: 16x20x28
        chip_of_file("v6e", "tpu", "TPU v6 lite", "TPU v6e", **_PLANES),
        # Cloud docs, TPU7x: pod size; two chiplets, each a device to JAX.
        chip_of_file("tpu7x", "tpu", "TPU7x", "TPU v7x", "TPU v7", **_CUBES, pod=9216, cores=2),
        chip_of_file("a100", "gpu", "NVIDIA A100", **_HGX),
        chip_of_file("h100", "gpu", "NVIDIA H100", **_HGX),
        chip_of_file("h200", "gpu", "NVIDIA H200", **_HGX),
        chip_of_file("b200", "gpu", "NVIDIA B200", **_HGX),
        # Datasheet: a compute tray holds four GPUs, an NVLink domain 72.
        chip_of_file("gb200", "gpu", "NVIDIA GB200", host=(4,), domain=72),
        chip_of_file("cpu", "cpu", "cpu"),
    )
}


def chip_of_kind(kind: str, platform: str) -> Chip | None:
    """Return the chip that a JAX `device_kind` names, or `None` if the table has no such chip.

    >>> chip_of_kind("TPU v5 lite", "tpu").name
    'v5e'
    >>> chip_of_kind("NVIDIA H100 80GB HBM3", "gpu").name
    'h100'
    """
    for chip in CHIPS.values():
        if kind in chip.kinds:
            return chip
    # GPU drivers append form factor and memory, so a prefix must do. Not for TPUs: "TPU v5" is
    # v5p, and "TPU v5 lite" is v5e.
    for chip in CHIPS.values():
        if chip.family == "gpu" and any(kind.startswith(known) for known in chip.kinds):
            return chip
    return CHIPS["cpu"] if platform == "cpu" else None


# What the GPU compiler must know about a GPU that is not there. Per chip: the name its driver
# reports, compute capability, streaming multiprocessors, FP32 lanes in each, shared memory per
# multiprocessor and per block (bytes), L2 cache (bytes), clock (GHz). From the vendor's
# architecture white papers and the compute capability tables of the programming guide.
_GPU_FACTS: dict[str, tuple[str, tuple[int, int], int, int, int, int, int, float]] = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 166912, 41943040, 1.41),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98),
    "h200": ("NVIDIA H200", (9, 0), 132, 128, 233472, 232448, 62914560, 1.98),
    "b200": ("NVIDIA B200", (10, 0), 148, 128, 233472, 232448, 132644864, 1.965),
    "gb200": ("NVIDIA GB200", (10, 0), 152, 128, 233472, 232448, 132644864, 1.965),
}


# The cuDNN that GPUs are taken to have: the least that JAX's own package for CUDA 13 asks for.
CUDNN = (9, 12)


def gpu_capability(chip: Chip) -> tuple[int, int]:
    """Return the compute capability of a GPU; of other chips, the one that most GPUs have."""
    return _GPU_FACTS[chip.name if chip.name in _GPU_FACTS else "h100"][1]


# TPUs whose two TensorCores are one device to JAX (cloud docs: v4 and v5p).
_MEGACORE = frozenset({"v4", "v5p"})


def device_facts(chip: Chip) -> tuple[str, int, int]:
    """Return what JAX says of a device: its kind, cores of a TPU, multiprocessors of a GPU.

    >>> device_facts(CHIPS["v5p"]), device_facts(CHIPS["h200"])
    (('TPU v5', 2, 0), ('NVIDIA H200', 1, 132))
    """
    if chip.name in _GPU_FACTS:
        return _GPU_FACTS[chip.name][0], 1, _GPU_FACTS[chip.name][2]
    return chip.kinds[0], 2 if chip.name in _MEGACORE else 1, 0


def gpu_target_config(chip: Chip) -> str:
    """Describe a GPU to XLA: its `GpuTargetConfigProto` in text form."""
    name, (major, minor), cores, lanes, shared, shared_block, cache, clock = _GPU_FACTS[chip.name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_block}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.memory_tbps * 1e12)}
  device_memory_size: {int(chip.memory_gb * 1e9)}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
device_description_str: "{name}"
"""


# Which shapes a TPU slice comes in, which shape a number of chips means, which of its dimensions
# wrap around, and which shapes may be wired as twisted tori.

# From the cloud docs: every slice shape of the two-dimensional chips.
PLANAR = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# And the shapes below one cube of 4x4x4; v5p and TPU7x lack a few, all are buildable.
BELOW_CUBE = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# The table of slices of the cloud docs for TPU v5p, and 8x8x12 of the defaults that Google's xpk
# has for v4: taken for what an accelerator type such as v5p-512 gets, and not twisted. Other
# shapes with as many chips must be asked for.
DOCUMENTED = (
    *((4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16)),
    *((8, 16, 16), (16, 16, 16), (16, 16, 24)),
)


def shapes_of_count(chip: Chip, chips: int) -> list[tuple[int, ...]]:
    """Return the shapes that a slice of so many chips may have, the documented default first.

    Only the default is returned where the cloud docs name one: it needs no choice.

    >>> from meshwright.hardware.chips import CHIPS
    >>> shapes_of_count(CHIPS["v5e"], 16), shapes_of_count(CHIPS["v5p"], 256)
    ([(4, 4)], [(4, 8, 8)])
    >>> shapes_of_count(CHIPS["v5p"], 384)
    [(4, 4, 24), (4, 8, 12)]
    """
    small = PLANAR if chip.torus == 2 else (*BELOW_CUBE, *DOCUMENTED)
    documented = [shape for shape in small if math.prod(shape) == chips <= chip.pod]
    if documented or chip.torus == 2 or chips % 64 or chips > chip.pod:
        return [tuple(shape) for shape in documented[:1]]
    cubes = chips // 64
    sides = [side for side in range(1, cubes + 1) if cubes % side == 0]
    return [
        (4 * a, 4 * b, 4 * (cubes // (a * b)))
        for a in sides
        for b in sides
        if cubes % (a * b) == 0 and a <= b <= cubes // (a * b)
    ]


def check_shape(chip: Chip, shape: tuple[int, ...]) -> None:
    """Refuse a shape that this chip does not come in, and name the near ones."""
    if chip.torus == 2:
        if shape not in PLANAR and shape[::-1] not in PLANAR:
            raise TopologyError(
                f"{chip.name} does not come in {shape_text(shape)}. Its shapes: "
                f"{listing((shape_text(s) for s in PLANAR), 10)}."
            )
        return
    chips = math.prod(shape)
    if len(shape) == 3 and (shape in BELOW_CUBE or is_whole_cubes(shape)) and chips <= chip.pod:
        return
    if chips > chip.pod:
        why = f"it has {chips} chips and a pod has {chip.pod}"
    else:
        why = f"beyond {shape_text(BELOW_CUBE[-1])} every side is a multiple of 4"
    rounded = tuple(max(4, 4 * round(side / 4)) for side in (*shape, 1, 1)[:3])
    nearest = f" Near: {shape_text(rounded)}." if math.prod(rounded) <= chip.pod else ""
    raise TopologyError(
        f"{chip.name} does not come in {shape_text(shape)}: {why}. Smaller shapes: "
        f"{listing(shape_text(s) for s in BELOW_CUBE)}.{nearest}"
    )


def wraparound(chip: Chip, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return which dimensions of a slice close to a ring.

    v5e and v6e: only a whole side of 16. v4, v5p, TPU7x: all, once the slice is made of
    whole 4x4x4 cubes, because optical switches join the faces of the cubes.
    """
    if chip.torus == 2:
        return tuple(side == 16 for side in shape)
    return (is_whole_cubes(shape),) * len(shape)


def can_twist(chip: Chip, shape: Sequence[int]) -> bool:
    """Whether a slice can be a twisted torus: n x n x 2n or n x 2n x 2n, made of whole cubes."""
    if chip.torus != 3 or not is_whole_cubes(shape):
        return False
    a, b, c = sorted(shape)
    return c == 2 * a and b in (a, c)


def is_whole_cubes(shape: Sequence[int]) -> bool:
    return all(side % 4 == 0 for side in shape)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
