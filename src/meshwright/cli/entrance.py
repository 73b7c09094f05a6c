"""`meshwright ...`: read the words, run the command, say errors in one line with exit code 2."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Union

from meshwright._version import __version__
from meshwright.cli.commands import Devices, MeshCommand
from meshwright.cli.partition_command import PartitionCommand
from meshwright.cli.rehearse_command import RehearseCommand
from meshwright.cli.schedule_command import ScheduleCommand
from meshwright.errors import MeshwrightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    import tyro

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
        with warnings.catch_warnings():
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
        print(f"meshwright: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"meshwright: {where}{error.strerror}", file=sys.stderr)
        return 2
    return code


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)
