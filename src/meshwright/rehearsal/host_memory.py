"""`HostMemory`: what a program keeps in the memory of the hosts, against what they have.

Sizes are the compiler's own, of one device; the devices of a host share its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright._show import Sheet, Shown, Table
from meshwright._text import amount, plural
from meshwright.errors import option_text
from meshwright.hardware.topology import Topology
from meshwright.hlo.instructions import HOST_SPACE
from meshwright.hlo.program import Program
from meshwright.rehearsal.host_transfers import offload_lost_line
from meshwright.rehearsal.memory import Buffer
from meshwright.rehearsal.peak import live_buffers
from meshwright.rehearsal.step_arguments import count_on_host

if TYPE_CHECKING:  # a `Rehearsal` has a `HostMemory`
    from meshwright.rehearsal.result import Rehearsal

_SHOWN = 4  # buffers that are printed


@dataclasses.dataclass(frozen=True, repr=False)
class HostMemory(Shown):
    """Bytes of the host's memory for every device. Prints itself; `to_json()`.

    `devices` is how many devices of a host the program uses at most, `limit` the memory of such a
    host, `None` where it is not known. The Python process and the input pipeline need memory of
    the host too, which is not in here. `buffers` are the arrays there at the peak, largest first.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    devices: int
    limit: int | None
    buffers: tuple[Buffer, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of the host's memory for one device."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def total(self) -> int:
        """Bytes of one host for all its devices."""
        return self.peak * self.devices

    @property
    def fits(self) -> bool | None:
        """Whether the host has room; `None` where its memory is not known."""
        return None if self.limit is None else self.total <= self.limit

    def verdict(self) -> str:
        """One line: does it fit the host."""
        words = f"{amount(self.total)} of the host's memory for {plural(self.devices, 'device')}"
        if self.limit is None:
            return (
                f"{words}; how much the host has is not known: name a machine type, e.g. "
                f"{option_text('on', 'a3-highgpu-8g')}, or in Python give topology(name, "
                "speeds={'ram_gb': GB for each chip})"
            )
        if self.fits:
            return f"fits the host: {words}, of {amount(self.limit)}"
        return (
            f"does NOT fit the host: {words}, which has {amount(self.limit)}: "
            f"{amount(self.total - self.limit)} too much. Offload fewer names, use more hosts or "
            "fewer rows, or a machine type with more memory"
        )

    def _sheet(self) -> Sheet:
        rows = [[each.shape, amount(each.bytes), each.origin] for each in self.buffers[:_SHOWN]]
        heading = ["in the host's memory, of a device", "bytes", "from"]
        return Sheet(self.verdict(), [Table(heading, rows, [False, True, False])] if rows else [])

    def to_json(self) -> dict[str, Any]:
        """Return sizes, limit and the buffers at the peak as plain data."""
        return {
            "fits": self.fits,
            "peak": self.peak,
            "devices": self.devices,
            "total": self.total,
            "limit": self.limit,
            "parts": {
                "arguments": self.arguments,
                "outputs": self.outputs,
                "aliased": -self.aliased,
                "temporaries": self.temporaries,
            },
            "buffers": [{"shape": each.shape, "bytes": each.bytes} for each in self.buffers],
        }


def host_notes(result: Rehearsal) -> list[str]:
    """Say what of a step's use of the host differs from what it asks for; empty if nothing."""
    chip, notes = result.placement.topology.chip, []
    count = count_on_host(result.request.args)
    if count and (result.stand_in or chip.family == "cpu"):
        notes.append(
            f"{plural(count, 'array')} of the arguments on the host: taken to be on the device, "
            "since simulated CPU devices have no other memory."
        )
    if result.offload_lost:
        notes.append(offload_lost_line(result.offloads, chip, result.stand_in))
    if result.host_memory is not None and result.host_memory.fits is False:
        notes.append(f"It {result.host_memory.verdict()}.")
    return notes


def host_memory(
    sizes: Mapping[str, int], program: Program, used: Topology, hardware: Topology
) -> HostMemory | None:
    """`HostMemory` from the compiler's report of sizes; `None` if nothing is kept there.

    `used` is the part of `hardware` that runs the program.
    """
    given, results, aliased, temporaries = (
        sizes.get(f"host_{name}", 0) for name in ("argument", "output", "alias", "temp")
    )
    if not (given or results or temporaries):
        return None
    return HostMemory(
        given,
        results,
        aliased,
        temporaries,
        _most_on_a_host(used),
        host_share(0, 0, hardware).limit,
        live_buffers(program, space=HOST_SPACE),
    )


def host_share(arguments: int, peak: int, used: Topology) -> HostMemory:
    """`HostMemory` of a part of the hardware, which has its devices' share of its hosts' memory.

    `arguments` and `peak` are bytes of one device.
    """
    devices, chip = _most_on_a_host(used), used.chip
    ram = chip.ram_gb * 1e9 * devices / chip.cores
    return HostMemory(arguments, 0, 0, peak - arguments, devices, int(ram) or None)


def _most_on_a_host(topology: Topology) -> int:
    return int(np.unique(topology.host, return_counts=True)[1].max())
