"""The commands, each a dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli import screen
from meshwright.hardware import Topology
from meshwright.hardware import topology as read_topology
from meshwright.meshes.build import placement_of, warn_idle
from meshwright.meshes.targets import target
from meshwright.spec import MeshSpec


@dataclasses.dataclass
class Devices:
    """Show the devices that are here, or hardware by its name."""

    on: str | None = None
    """Hardware by name, e.g. v5p:4x4x4, h100:8x4, cpu:8. Default: the live devices."""
    slices: int = 1
    """How many of them, joined by the slow network."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        found = _hardware(self.on, self.slices)
        if self.json:
            print(json.dumps(found.to_json(), indent=2))
        else:
            screen.show_topology(found)


@dataclasses.dataclass
class MeshCommand:
    """Place a mesh, explain it and draw it."""

    spec: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")]
    """The request, e.g. "dp:2, fsdp:-1, tp:4"."""
    on: str | None = None
    """Hardware by name, e.g. v5p:8x8x8, h100:8x4, cpu:8. Default: the live devices."""
    slices: int = 1
    """How many of them, joined by the slow network."""
    dcn: str | None = None
    """How much of each axis crosses the slow network, e.g. "dp:2". Default: worked out."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write the explanation with its drawings to this file."""

    def run(self) -> None:
        hardware = _hardware(self.on, self.slices)
        placed = placement_of(MeshSpec.parse(self.spec), hardware, self.dcn)
        warn_idle(placed.spec, placed.topology, hardware)
        if self.html is not None:
            page = screen.page(str(placed.spec), placed._repr_html_())
            self.html.write_text(page, encoding="utf-8")
        if self.json:
            print(json.dumps(placed.to_json(), indent=2))
        else:
            screen.show_placement(placed)


def _hardware(on: str | None, slices: int) -> Topology:
    return target(None, None, slices) if on is None else read_topology(on, slices=slices)
