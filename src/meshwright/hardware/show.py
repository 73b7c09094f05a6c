"""A topology as text, HTML and JSON."""

from __future__ import annotations

import html
from typing import Any

from meshwright.hardware.grid import Topology


def count(number: int, word: str) -> str:
    """
    >>> count(1, "host"), count(1200, "device")
    ('1 host', '1,200 devices')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def headline(topology: Topology) -> str:
    parts = [count(topology.num_devices, "device")]
    if topology.num_chips != topology.num_devices:
        parts.append(count(topology.num_chips, "chip"))
    return f"{topology.name}: {' = '.join(parts)} on {count(topology.num_hosts, 'host')}"


def lines(topology: Topology) -> list[str]:
    unit = {"torus": "a link", "switch": "a device", "network": "a device", "core": "between cores"}
    return [f"{axis}, {axis.speed:.4g} GB/s {unit[axis.kind]}" for axis in topology.axes]


def as_text(topology: Topology) -> str:
    note = ["scattered: these devices fill no box, their links are unknown"]
    shown = lines(topology) + (note if topology.scattered else [])
    return "\n  ".join([headline(topology), *shown])


def as_html(topology: Topology) -> str:
    rows = "".join(f"<li>{html.escape(line)}</li>" for line in lines(topology))
    return f"<div><b>{html.escape(headline(topology))}</b><ul>{rows}</ul></div>"


def as_json(topology: Topology) -> dict[str, Any]:
    chip = topology.chip
    return {
        "name": topology.name,
        "chip": chip.name,
        "devices": topology.num_devices,
        "chips": topology.num_chips,
        "hosts": topology.num_hosts,
        "slices": topology.num_slices,
        "scattered": topology.scattered,
        "axes": [
            {
                "name": axis.name,
                "size": axis.size,
                "kind": axis.kind,
                "gb_per_s": axis.speed,
                "wraps": axis.wraps,
                "twisted": axis.twisted,
            }
            for axis in topology.axes
        ],
        "memory_gb": chip.memory_gb,
        "bf16_tflops": chip.tflops,
    }
