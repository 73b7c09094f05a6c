"""`meshwright ...`: parse arguments, run a command, print errors in one line with exit code 2."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from meshwright._html import page
from meshwright._version import __version__
from meshwright.cli import terminal
from meshwright.cli.partition import PartitionCommand
from meshwright.cli.rehearse import RehearseCommand
from meshwright.cli.schedule import ScheduleCommand
from meshwright.errors import MeshwrightError, options_as_flags
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.build import placement_of, warn_idle, warn_names
from meshwright.meshes.devices import target_topology
from meshwright.spec.mesh_spec import MeshSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets text
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"meshwright {__version__}")
        return 0

    commands = Union[  # noqa: UP007
        Annotated[Devices, tyro.conf.subcommand("devices", prefix_name=False)],
        Annotated[MeshCommand, tyro.conf.subcommand("mesh", prefix_name=False)],
        Annotated[PartitionCommand, tyro.conf.subcommand("partition", prefix_name=False)],
        Annotated[RehearseCommand, tyro.conf.subcommand("rehearse", prefix_name=False)],
        Annotated[ScheduleCommand, tyro.conf.subcommand("schedule", prefix_name=False)],
    ]
    command: Any = tyro.cli(
        commands,
        prog="meshwright",
        description="The mesh layer for JAX: say what parallelism you want, on what hardware.",
        args=words,
    )
    try:
        with warnings.catch_warnings(), options_as_flags():
            warnings.showwarning = _note
            code: int = command.run() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130
    except MeshwrightError as error:
        print(f"meshwright: {error}{_flag(command, error)}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"meshwright: {where}{error.strerror}", file=sys.stderr)
        return 2
    return code


def _flag(command: Any, error: MeshwrightError) -> str:
    """Name the flag that an error is about, where the command has it and the text does not."""
    flag = f"--{(error.option or '').replace('_', '-')}"
    if error.option is None or not hasattr(command, error.option) or flag in str(error):
        return ""
    return f" On the command line this is {flag}."


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


# The commands, each a dataclass whose fields are its options.


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
        hardware = _hardware(self.on, self.slices)
        if self.json:
            print(json.dumps(hardware.to_json(), indent=2))
        else:
            terminal.show_topology(hardware)


@dataclasses.dataclass
class MeshCommand:
    """Place a mesh, explain it and draw it."""

    spec: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")]
    """The request, e.g. "dp:2, fsdp:-1, tp:4"."""
    on: str | None = None
    """Hardware by name, e.g. v5p:8x8x8, v5p-128, h100:8x4, cpu:8. Default: the live devices."""
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
        spec = MeshSpec.parse(self.spec)
        warn_names(spec)
        placed = placement_of(spec, hardware, self.dcn)
        warn_idle(placed.spec, placed.topology, hardware)
        if self.html is not None:
            text = page(str(placed.spec), placed._repr_html_())
            self.html.write_text(text, encoding="utf-8")
        if self.json:
            print(json.dumps(placed.to_json(), indent=2))
        else:
            terminal.show_placement(placed)


def _hardware(on: str | None, slices: int) -> Topology:
    return target_topology(None, None, slices) if on is None else read_topology(on, slices=slices)
