"""`Memory`: what a program takes of a device, part by part, against what there is.

Sizes are the compiler's own. What lives at the peak (`Buffer`) is worked out by `peak`, from the
live ranges of the scheduled program.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright._html import MEMORY, Html, Lane, Part, bars, join, legend
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Source, primitives
from meshwright.partitioning.report import LeafRow

CPU_ESTIMATE = "CPU estimate"  # the mark of all that simulated CPU devices stand in for
_SHOWN = 8  # buffers that are printed


@dataclasses.dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Bytes on every device. Prints itself; `to_json()`.

    `peak` is all that is allocated at once: arguments, outputs that do not overwrite an argument
    (`aliased` are those that do), temporaries and code. `limit` is what a program may have.
    `refused`: the compiler gave up, and `temporaries` is what it said it needs beyond the
    arguments. `buffers` are the values alive at the peak, largest first; `estimated` where they
    are those of the step partitioned for simulated CPU devices, since the compiler refused.
    `cpu_estimate`: all of it is those devices', in place of the hardware's.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    limit: int
    chip: str
    family: str
    refused: bool = False
    buffers: tuple[Buffer, ...] = ()
    estimated: bool = False
    cpu_estimate: bool = False

    @property
    def peak(self) -> int:
        """Bytes that are allocated at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def margin(self) -> int:
        """Bytes that are left of the limit; negative when it does not fit."""
        return self.limit - self.peak

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted the program and its peak is within the limit."""
        return not self.refused and self.margin >= 0

    @property
    def note(self) -> str:
        """A caveat about the verdict, or an empty string."""
        if self.refused:
            return "the compiler refused: temporaries are what it said it needs beside arguments"
        if self.family == "cpu" and not self.fits:
            return f"{amount(self.limit)} is what a simulated device is taken to have"
        if self.family == "gpu" and self.fits and self.peak > GPU_FRACTION * self.limit:
            return (
                f"more than the {GPU_FRACTION:.0%} of a GPU that JAX takes by default: set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION=.95"
            )
        return ""

    def parts(self) -> dict[str, int]:
        """Return the parts of the peak."""
        return {
            "arguments": self.arguments,
            "outputs": self.outputs,
            "aliased": -self.aliased,
            "temporaries": self.temporaries,
            "code": self.code,
        }

    def verdict(self) -> str:
        """One line: does it fit, with what margin; and the mark of a CPU estimate."""
        share = self.peak / self.limit
        mark = f" ({CPU_ESTIMATE})" if self.cpu_estimate else ""
        if self.fits:
            return (
                f"fits{mark}: {amount(self.peak)} of {amount(self.limit)} on each {self.chip} "
                f"({share:.0%}), {amount(self.margin)} to spare"
            )
        return (
            f"does NOT fit{mark}: {amount(self.peak)} on each {self.chip}, which has "
            f"{amount(self.limit)}: {amount(-self.margin)} too much ({share:.1f} times)"
        )

    def _sheet(self) -> Sheet:
        sizes = [
            [name, amount(size)] for name, size in self._at_once().values() if size or " " in name
        ]
        sizes += [["peak", amount(self.peak)], ["limit", amount(self.limit)]]
        parts: list[str | Table | Html] = [
            self.drawing(),
            Table(["memory on a device", "bytes"], sizes, [False, True]),
        ]
        if self.note:
            parts.append(f"note: {self.note}")
        if self.buffers:
            largest = "largest at the peak"
            if self.estimated:
                largest += ", estimated on CPU devices"
            heading = [largest, "bytes", "from"]
            rows = [
                [buffer.shape, amount(buffer.bytes), buffer.origin]
                for buffer in self.buffers[:_SHOWN]
            ]
            parts.append(Table(heading, rows, [False, True, False]))
        return Sheet(self.verdict(), parts)

    def lane(self, title: str) -> Lane:
        """What is allocated at once, part by part."""
        shown = self._at_once()
        parts = tuple(Part(*shown[name], colour) for name, colour in MEMORY.items())
        return Lane(f"{title}: {amount(self.peak)}", parts)

    def _at_once(self) -> dict[str, tuple[str, int]]:
        """Words and bytes of each part, for the table and the bar alike; they add up to the peak.

        Outputs that take the memory of a donated argument are counted there, and named.
        """
        beside = f" beside {amount(self.aliased)} aliased" if self.aliased else ""
        sizes = {**self.parts(), "outputs": self.outputs - self.aliased}
        return {name: (f"{name}{beside * (name == 'outputs')}", sizes[name]) for name in MEMORY}

    def drawing(self) -> Html:
        """Draw the parts against the limit, with what their colours mean."""
        lane = self.lane("a device")
        return join([bars([lane], amount, limit=self.limit), legend(lane.parts, amount, self.peak)])

    def to_json(self) -> dict[str, Any]:
        """Return the sizes in bytes, and the buffers at the peak, as plain data."""
        return {
            "fits": self.fits,
            "peak": self.peak,
            "limit": self.limit,
            "margin": self.margin,
            "refused": self.refused,
            "estimated": self.estimated,
            "cpu_estimate": self.cpu_estimate,
            "parts": self.parts(),
            "note": self.note,
            "buffers": [
                {
                    "shape": buffer.shape,
                    "bytes": buffer.bytes,
                    "op": buffer.op_name,
                    "source": None if buffer.source is None else str(buffer.source),
                    "layer": buffer.layer,
                }
                for buffer in self.buffers
            ],
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Buffer:
    """A value in memory at the moment of the peak, and whose operation it is."""

    name: str
    shape: str
    bytes: int
    op_name: str
    source: Source | None

    @property
    def made_by(self) -> str:
        """The operation in a word, or the compiler's own name where it has none."""
        return ", ".join(primitives(self.op_name)) or self.name

    @property
    def layer(self) -> str:
        """The layer it belongs to: the named scope of its operation, or the path of an argument.

        Without either, the function of its source line.

        >>> Buffer("p", "f32[8]", 32, "state['params']['layers']['mlp']['up']", None).layer
        'state/params/layers/mlp'
        >>> Buffer("d", "f32[8]", 32, "jit(f)/transpose(jvp(Net))/Dense_0/dot_general", None).layer
        'Net/Dense_0'
        """
        if "jit(" not in self.op_name and "/" not in self.op_name:
            path = re.findall(r"[^\[\].'\"]+", self.op_name or self.name.removeprefix("argument "))
            return "/".join(path[:-1]) or "/".join(path)
        scopes = _SCOPES.sub("", self.op_name.partition(":")[0]).replace(")", "").split("/")
        # `jnp.einsum` names a scope by its formula, such as `bsd,df->bsf`, which is no layer.
        named = [s for s in scopes[:-1] if s and s not in _NO_LAYER and "->" not in s]
        return "/".join(named) or (self.source.function if self.source else "") or "other"

    @property
    def origin(self) -> str:
        """Operation and source line, short enough for a table."""
        return f"{self.made_by[:40]} {self.source}" if self.source else self.made_by[:60]

    def __repr__(self) -> str:
        return short_repr(self, f"{self.shape}, {amount(self.bytes)}: {self.origin}")


# What JAX writes around and between the scopes that a user or a library named.
_SCOPES = re.compile(r"p?jit\([^()/]*\)|\w+\(")
_NO_LAYER = frozenset(
    {
        *("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "remat"),
        *("remat2", "scan", "custom_vjp_call", "custom_jvp_call", "shard_map", "core_call"),
    }
)


def as_compiled(sizes: Mapping[str, int], chip: Chip, buffers: tuple[Buffer, ...]) -> Memory:
    """`Memory` from the compiler's own report of sizes."""
    return Memory(
        sizes["argument"],
        sizes["output"],
        sizes["alias"],
        _temporaries(sizes, chip),
        sizes["generated_code"],
        available(chip),
        chip.name,
        chip.family,
        buffers=buffers,
    )


# libtpu (0.0.42) reports more temporaries than it allocates: MaxText-32B on 64 v5p, 93.5 GiB where
# its own buffer assignment has 81.5 GiB in main memory, of 95.7 GiB that the chip grants; it counts
# the right size when it decides whether a program fits. That assignment counts, with the gaps that
# it leaves between arrays: up to a fourth of what is alive at once.
def _temporaries(sizes: Mapping[str, int], chip: Chip) -> int:
    """Bytes of temporaries: as reported, or on a TPU what is assigned beside the arguments.

    Where the assignment is not known, what is alive at once beside them.
    """
    beside = sizes["argument"] + sizes["output"] - sizes["alias"]
    if chip.family == "tpu" and sizes.get("assigned"):
        return max(0, sizes["assigned"] - beside)
    if chip.family == "tpu" and sizes.get("live"):
        return min(sizes["temp"], max(0, sizes["live"] - beside))
    return sizes["temp"]


def as_refused(reason: str, rows: Sequence[LeafRow], chip: Chip) -> Memory:
    """`Memory` from the message of a compiler that ran out of memory.

    It names what it needs and what there is, not what for; of the buffers the arguments are known.
    """
    needed, limit = _read_refusal(reason)
    arguments = sum(row.device_bytes for row in rows)
    buffers = [
        Buffer(f"argument {row.path}", _local_shape(row), row.device_bytes, "", None)
        for row in rows
    ]
    return Memory(
        arguments,
        0,
        0,
        max(0, (needed or arguments) - arguments),
        0,
        limit or available(chip),
        chip.name,
        chip.family,
        refused=True,
        buffers=tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))),
    )


def _local_shape(row: LeafRow) -> str:
    """What a device holds of an argument, such as `f32[512,128]`."""
    return f"{row.text.partition('[')[0]}[{','.join(map(str, row.local))}]"


# The two forms in which libtpu says that a program is too large.
_EXCEEDS = re.compile(r"([\d.]+)([KMGT])?i?B?\) exceeds available HBM \(([\d.]+)([KMGT])?")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}


def _read_refusal(reason: str) -> tuple[int | None, int | None]:
    """Read what a program needs and what there is, in bytes, as far as the compiler says.

    >>> [size // 2**20 for size in _read_refusal("Used 20.00G of 15.75G hbm")]
    [20480, 16128]
    """
    sizes = _EXCEEDS.search(reason) or _USED.search(reason)
    if sizes is None:
        return None, None
    needed, needed_unit, limit, limit_unit = sizes.groups(default="")
    return int(float(needed) * _UNITS[needed_unit]), int(float(limit) * _UNITS[limit_unit])


_GIB = 2**30

# GiB a device, as the TPU compiler itself says when it refuses ("available HBM"; libtpu 0.0.42).
_AVAILABLE = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}

# What JAX takes of a GPU unless told otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_FRACTION = 0.75


def available(chip: Chip) -> int:
    """Bytes a program may take of a device: what its compiler grants, or the memory it has."""
    if chip.name in _AVAILABLE:
        return int(_AVAILABLE[chip.name] * _GIB)
    return int(chip.memory_gb * 1e9) // chip.cores
