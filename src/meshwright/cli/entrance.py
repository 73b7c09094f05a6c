"""`meshwright ...`: read the words, run the command, say errors in one line with exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Union

from meshwright.cli.commands import Devices, MeshCommand
from meshwright.cli.partition_command import PartitionCommand
from meshwright.errors import MeshwrightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    import tyro

    commands = Union[  # noqa: UP007
        Annotated[Devices, tyro.conf.subcommand("devices", prefix_name=False)],
        Annotated[MeshCommand, tyro.conf.subcommand("mesh", prefix_name=False)],
        Annotated[PartitionCommand, tyro.conf.subcommand("partition", prefix_name=False)],
    ]
    command: Any = tyro.cli(
        commands,
        prog="meshwright",
        description="The mesh layer for JAX: say what parallelism you want, on what hardware.",
        args=arguments,
    )
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            command.run()
    except MeshwrightError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"meshwright: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)
