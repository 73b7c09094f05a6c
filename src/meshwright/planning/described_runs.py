"""`DescribedRun`: a transformer's training run as its sizes, its mesh and its hardware say it.

There is no program here: this is what is known of a run that somebody published. Where its axes lie
on the hardware, and what exchanges over them take, is in here too (`exchange_seconds`);
`run_prediction` puts a step's time together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from meshwright.errors import PlanningError
from meshwright.hardware.chips import CHIPS, Chip, shape_text, shapes_of_count
from meshwright.hardware.topology import Topology, topology
from meshwright.placement.placement import AxisPlan
from meshwright.placement.placer import place
from meshwright.rehearsal.collectives.costs import Group, collective_seconds, group_cost

# GPUs that runs are published for and that `topology` does not know yet: nominal figures of their
# datasheets where they differ from the GPU they are made from.
OTHER_CHIPS = {
    "b300": dataclasses.replace(
        CHIPS["b200"], name="b300", like="b200", memory_gb=288, network=100
    ),
    "gb300": dataclasses.replace(
        CHIPS["gb200"], name="gb300", like="gb200", memory_gb=288, network=100
    ),
    "v100": dataclasses.replace(
        CHIPS["a100"],
        name="v100",
        like="a100",
        tflops=125,
        memory_gb=16,
        memory_tbps=0.9,
        link=150,
        network=100 / 8 / 8,
    ),
}

Remat = Literal["none", "minimal", "selective", "context", "mlp", "qkv", "full"]
Products = Literal["bf16", "fp8", "nvfp4"]


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder. With `experts`, each layer but the first `dense_layers` has so many.

    `active` of them see a token, `expert_mlp` wide each, beside `shared_mlp` for all tokens.
    `attention_weights` is for layers whose projections are not query, key, value and output. A part
    `local` of the layers sees the last `window` tokens only.
    """

    layers: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    gated: bool = True
    experts: int = 0
    active: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0
    attention_weights: int = 0
    local: float = 0.0
    window: int = 0

    @property
    def projections(self) -> int:
        """Weights of a layer's attention."""
        return self.attention_weights or 2 * self.embed * self.head * (self.heads + self.kv_heads)

    def layer_weights(self, active: bool = False) -> float:
        """Weights of the mean layer; `active`: those that one token meets."""
        wide = self.embed * (3 if self.gated else 2)
        if not self.experts:
            return self.projections + wide * self.mlp
        experts = self.active if active else self.experts
        moe = wide * (experts * self.expert_mlp + self.shared_mlp)
        dense = self.dense_layers / self.layers
        return self.projections + dense * wide * self.mlp + (1 - dense) * moe


@dataclasses.dataclass(frozen=True)
class DescribedRun:
    """A training run: a model, a chip and how many devices, a mesh, and how the step is computed.

    Sizes of axes are 1 where a run has none; `dp` is what is left of the devices. `microbatch`:
    rows that one replica (tp x pp x cp devices) computes at once. `vp`: chunks of layers that
    each stage of a pipeline has. `attention`: `scores` are kept in memory, or a `flash` kernel of
    2023 (and other libraries of that year), or `fused`, one of today. `eager`: every kernel is
    started by Python. `overlap`: exchanges run beside computation. `sharded_update`: replicas
    share the optimizer's work. `regather`: FSDP gathers weights for the backward pass again.
    `frozen`: only adapters are trained. `watts`: 0 for what the chip is sold with.
    """

    model: Transformer
    chip: Chip
    devices: int
    seq: int
    batch: int
    microbatch: float
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    slices: int = 1
    products: Products = "bf16"
    remat: Remat = "none"
    attention: Literal["scores", "flash", "fused"] = "fused"
    sequence_parallel: bool = True
    eager: bool = False
    overlap: bool = True
    sharded_update: bool = True
    regather: bool = True
    async_tp: bool = False
    frozen: bool = False
    watts: float = 0.0

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "cp", "ep", "fsdp", "vp")}
        if bad := [f"{axis}:{size}" for axis, size in sizes.items() if size < 1]:
            raise PlanningError(f"{', '.join(bad)}: an axis has one device at the least.")
        inside = self.tp * self.pp * self.cp
        if self.devices % inside:
            raise PlanningError(
                f"tp:{self.tp}, pp:{self.pp}, cp:{self.cp} need a multiple of {inside} devices, "
                f"and there are {self.devices}."
            )
        if self.microbatch <= 0 or self.microbatch * self.replicas > self.batch * 1.001:
            raise PlanningError(
                f"{self.replicas} replicas with microbatches of {self.microbatch:g} rows do not "
                f"share a batch of {self.batch}. Use at most {self.batch / self.replicas:g} rows."
            )

    @property
    def replicas(self) -> int:
        """How many parts the batch is cut into: dp x fsdp, with ep in them."""
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        """How many microbatches a replica computes in a step."""
        return max(1, round(self.batch / (self.replicas * self.microbatch)))

    @property
    def is_tpu(self) -> bool:
        return self.chip.family == "tpu"


# Where axes lie, and what exchanges over them take.


def exchange_seconds(run: DescribedRun, kind: str, size: float, axis: str) -> float:
    """Seconds of a collective of `size` bytes over an axis; 0 where it has one device."""
    if run.is_tpu:
        plans, machine = _tpu_axes(run.chip.name, run.devices, run.slices, _tpu_mesh(run))
        return group_cost(kind, int(size), plans[axis], machine).seconds if axis in plans else 0.0
    inside, nodes = gpu_axis(run, axis)
    if inside * nodes == 1:
        return 0.0
    name = run.chip.like or run.chip.name  # whose collectives are taken
    group = Group(name, inside, nodes, run.chip.link, run.chip.network)
    return collective_seconds(kind, int(size), group)


def domain_size(run: DescribedRun) -> int:
    """GPUs of a domain that the run uses: all, or as many as divide the devices."""
    most = min(run.chip.domain, run.devices)
    return next(size for size in range(most, 0, -1) if run.devices % size == 0)


def gpu_axis(run: DescribedRun, axis: str) -> tuple[int, int]:
    """How many GPUs of an axis are in one domain, and over how many domains it goes.

    Axes lie as Megatron and others lay them: tp next to each other, then cp, fsdp, dp, pp.
    """
    fsdp = math.gcd(run.fsdp, run.replicas)
    if axis == "ep":
        size, stride = math.gcd(run.ep, run.replicas * run.cp), run.tp
    else:
        sizes = {"tp": run.tp, "cp": run.cp, "fsdp": fsdp, "dp": run.replicas // fsdp}
        size, stride = sizes[axis], 1
        for name, each in sizes.items():
            if name == axis:
                break
            stride *= each
    inside = math.gcd(size, max(1, domain_size(run) // stride))
    return inside, size // inside


def _tpu_mesh(run: DescribedRun) -> tuple[tuple[str, int], ...]:
    fsdp = math.gcd(run.fsdp, run.replicas)
    ep = math.gcd(run.ep, run.replicas // fsdp)
    dp = run.replicas // (fsdp * ep)
    sizes = {"pp": run.pp, "dp": dp, "fsdp": fsdp, "ep": ep, "cp": run.cp, "tp": run.tp}
    return tuple((axis, size) for axis, size in sizes.items() if size > 1)


@functools.lru_cache(maxsize=256)
def _tpu_axes(
    name: str, devices: int, slices: int, mesh: tuple[tuple[str, int], ...]
) -> tuple[dict[str, AxisPlan], Topology]:
    """Place a mesh on so many devices of a TPU, in the shape that is documented for them."""
    chip = CHIPS[name]
    chips = devices // chip.cores // slices
    shapes = shapes_of_count(chip, chips)
    if not shapes or chips * slices * chip.cores != devices:
        raise PlanningError(
            f"{name}: {devices // chip.cores} chips are no {slices} slices of a documented shape. "
            "Say how many slices there are, or another number of chips."
        )
    machine = topology(f"{name}:{shape_text(shapes[0])}", slices=slices)
    placed = place(", ".join(f"{axis}:{size}" for axis, size in mesh) or "dp:1", machine)
    return {plan.name: plan for plan in placed.axes}, machine
